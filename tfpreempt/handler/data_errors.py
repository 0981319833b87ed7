"""Whether an error comes of data that could not be read, and what was done before it.

A signal to a whole group ends the readers of the data together with the notice.

The bytecode of a step is read, once, after such an error. Rejected: the source, which
does not tell which of several calls in one line failed, nor is it there for a lambda; a
commit after half a step would be a wrong one.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

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
