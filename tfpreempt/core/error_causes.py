"""Causes of an error in a step: lost workers, or data that could not be read.

*Lost workers*: TensorFlow's message for a failed collective names the workers.

*Data*: a SIGTERM to the whole process group also kills the child processes that read
the data, so the step fails. The state can be saved only if the step has changed nothing
before the error. The bytecode of the step's functions shows whether the step has
changed something. The source code is not sufficient: the source does not show which of
several calls in a line has failed, and is missing for a lambda.
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
    # A worker that was suspended logs this message about its own missed heartbeats:
    r"|Task /job:\w+/replica:\d+/task:\d+ heartbeat timeout"
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_BROKEN_OFF = re.compile(
    r"remote target (/job:\w+/replica:\d+/task:\d+) while calling [\w/.]+:\s*"
    r":UNKNOWN:[^\n]*grpc_message:\"[^\"\n]*"
    r"(?:Connection reset by peer|Socket closed|Broken pipe|failed to connect)"
)
# Part of the message if a call to the coordination service fails.
_SERVICE = "tensorflow.CoordinationService/"
# Part of the message of an error that the coordination service itself reports.
_ANSWERED = "tensorflow.CoordinationServiceError"


def describe_loss(error: BaseException, cluster: Cluster, where: str) -> str:
    """Returns a line for the log that names the lost worker.

    Args:
        error: error raised by a collective or by the key-value store.
        cluster: the workers of the run.
        where: phase in which the error was raised, such as "step 12".

    Returns:
        A line of text; "" if the error names no lost worker.
    """
    text = str(error)
    if lost := _workers(" ".join(_SILENT.findall(text)), cluster):
        return f"{lost} stopped sending heartbeats in {where}"
    if _SERVICE in text and _ANSWERED not in text:
        return (
            f"worker 0, which hosts the coordination service, is unreachable in {where}"
        )
    if lost := _workers(" ".join(_BROKEN_OFF.findall(text)), cluster):
        return f"{lost} closed the connection in {where}"
    return ""


def _workers(tasks: str, cluster: Cluster) -> str:
    """Returns the workers that a text names, such as "workers 1, 2"; "" without any.

    Args:
        tasks: text with task names of TensorFlow, "/job:worker/replica:0/task:1".
        cluster: the workers of the run. Tasks of other jobs are omitted, such as the
            remote workers of a single client.
    """
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
    """Returns whether an error was raised while data were read.

    Either Python code or an op of TensorFlow was reading the data.
    """
    if "IteratorGetNext" in str(error):
        return True
    return any(_is_reading(code, module) for code, _, module in _frames(error))


def is_before_all(error: BaseException) -> bool:
    """Returns whether a step failed while reading data, before any change.

    True if the functions of the program, from the step down to the library that reads,
    had made no call, entered no loop, and assigned local variables only. A data reader
    written by the program counts as the program, because the reader may keep its
    position in saved state. False for a failure inside a tf.function: TensorFlow may
    already have run ops that need no data, such as a counter.

    Args:
        error: the error, caught by the caller of the step.
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
    # Find the instruction that `at` belongs to: `at` may point into the cache entries
    # behind the instruction.
    here = max(op.offset for op in ops if op.offset <= at)
    return any(
        "JUMP_BACKWARD" in op.opname
        or (op.offset < here and op.opname.startswith(_EFFECTS))
        for op in ops
    )


def _is_reading(code: CodeType, module: str) -> bool:
    """Returns whether a function supplies data: iterator, generator, pool or queue."""
    is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
    return is_generator or code.co_name == "__next__" or module.startswith(_READERS)


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int, str]]:
    """Yields the frames of an error's traceback, outermost first.

    A frame is given as code, offset in the bytecode, and module name.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        yield frame.f_code, trace.tb_lasti, str(frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
