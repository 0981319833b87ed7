"""Causes of an error in a step: workers that are gone, or data that could not be read.

TensorFlow's message for a failed collective names the workers that are gone.

A signal to a process group ends the processes that read the data together with the
notice. The bytecode of a step is read, once, after such an error, to find out whether
the step had done anything before. Rejected: the source, which does not tell which of
several calls in one line failed, nor is it there for a lambda; a commit after half a
step would be a wrong one.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from types import CodeType

from tfpreempt.core.cluster import Cluster

_SILENT = re.compile(
    r"stopped sending heartbeats\):(?:\s*/job:\w+/replica:\d+/task:\d+)+"
    r"|Task /job:\w+/replica:\d+/task:\d+ heartbeat timeout"  # to itself, if it thaws
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_BROKEN_OFF = re.compile(
    r"remote target (/job:\w+/replica:\d+/task:\d+) while calling [\w/.]+:\s*"
    r":UNKNOWN:[^\n]*grpc_message:\"[^\"\n]*"
    r"(?:Connection reset by peer|Socket closed|Broken pipe|failed to connect)"
)
_SERVICE = "tensorflow.CoordinationService/"  # a call of the host that failed
_ANSWERED = "tensorflow.CoordinationServiceError"  # the host itself said that


def describe_loss(error: BaseException, cluster: Cluster, where: str) -> str:
    """Says who was lost, for people.

    Args:
        error: what a collective, or the store, has raised.
        cluster: who the workers are.
        where: the phase in which it did, such as "step 12".

    Returns:
        One line; "" where the error does not say who.
    """
    text = str(error)
    if lost := _workers(" ".join(_SILENT.findall(text)), cluster):
        return f"{lost} stopped sending heartbeats in {where}"
    if _SERVICE in text and _ANSWERED not in text:
        return f"worker 0, which hosts the coordination service, is silent in {where}"
    if lost := _workers(" ".join(_BROKEN_OFF.findall(text)), cluster):
        return f"{lost} broke off the connection in {where}"
    return ""


def _workers(tasks: str, cluster: Cluster) -> str:
    """Those that tasks are of, for people; one client's remote workers are none."""
    jobs = [job for job, _ in cluster.jobs]
    found = sorted(
        {
            sum(tasks for _, tasks in cluster.jobs[: jobs.index(job)]) + int(task)
            for job, task in _TASK.findall(tasks)
            if job in jobs
        }
    )
    if not found:
        return ""
    return f"worker{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


_READERS = ("multiprocessing", "concurrent.futures", "queue")
_LIBRARIES = (*_READERS, "keras.", "tf_keras.", "tensorflow.")
_EFFECTS = (
    "CALL",
    "STORE_SUBSCR",
    "STORE_ATTR",
    "STORE_GLOBAL",
    "STORE_DEREF",
    "BINARY_OP",
    "BEFORE_WITH",
)


def is_of_data(error: BaseException) -> bool:
    """Whether the reading of data failed, in Python or in an op."""
    if "IteratorGetNext" in str(error):
        return True
    return any(_is_reading(code, module) for code, _, module in _frames(error))


def is_before_all(error: BaseException) -> bool:
    """Whether the function that raised had done nothing but read data.

    From it down to the library that reads, nothing was called before, in no loop, and
    nothing was assigned to: the program's own reader may keep its place in what is
    saved. A tf.function is not looked into: what needs no data in it, such as a
    counter, runs beside the reading.

    Args:
        error: caught by who called the function.
    """
    frames = list(_frames(error))[1:]
    libraries = (i for i, frame in enumerate(frames) if frame[2].startswith(_LIBRARIES))
    until = next(libraries, len(frames))
    is_reading = any(_is_reading(code, name) for code, _, name in frames[: until + 1])
    return is_reading and not any(
        _has_acted(code, at) for code, at, _ in frames[:until]
    )


def _has_acted(code: CodeType, at: int) -> bool:
    ops = list(dis.get_instructions(code))
    here = max(op.offset for op in ops if op.offset <= at)  # `at` may be in its cache
    return any(
        "JUMP_BACKWARD" in op.opname
        or (op.offset < here and op.opname.startswith(_EFFECTS))
        for op in ops
    )


def _is_reading(code: CodeType, module: str) -> bool:
    """Whether a function gives data: of an iterator, a generator, a pool or a queue."""
    is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
    return is_generator or code.co_name == "__next__" or module.startswith(_READERS)


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int, str]]:
    """From the outermost: the code, where in it, and the module's name."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        yield frame.f_code, trace.tb_lasti, str(frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
