"""Whether an error comes of data that could not be read, and what was done before it.

A signal to a whole group ends the readers of the data together with the notice.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

_READERS = ("multiprocessing", "concurrent.futures")
_EFFECTS = ("CALL", "STORE_SUBSCR", "STORE_ATTR", "BINARY_OP", "BEFORE_WITH")


def is_of_data(error: BaseException) -> bool:
    """Whether the reading of data failed, in Python or in an op."""
    if "IteratorGetNext" in str(error):
        return True
    return any(_is_reading(code, module) for code, _, module in _frames(error))


def is_before_all(error: BaseException) -> bool:
    """Whether the function that raised had done nothing but read data.

    From it down to the reading no function was called before, in no loop, and nothing
    was assigned to. A tf.function is not looked into: what needs no data in it, such as
    a counter, runs beside the reading.

    Args:
        error: caught by who called the function.
    """
    frames = list(_frames(error))[1:]
    reads = (i for i, (code, _, name) in enumerate(frames) if _is_reading(code, name))
    until = next(reads, None)
    return until is not None and not any(
        _has_acted(code, at) for code, at, _ in frames[:until]
    )


def _has_acted(code: CodeType, at: int) -> bool:
    return any(
        "JUMP_BACKWARD" in op.opname
        or (op.offset < at and op.opname.startswith(_EFFECTS))
        for op in dis.get_instructions(code)
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
