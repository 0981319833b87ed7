"""Python and NumPy values as JSON and raw bytes, bit for bit, without pickle."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from tfpreempt import errors

_HEADER = struct.Struct("<8sI")
_MAGIC = b"tfpbytes"
_UNREADABLE = (struct.error, ValueError, KeyError, TypeError, RecursionError)


def write_parts(fileobj: IO[bytes], header: Any, parts: list[bytes]) -> None:
    """Writes a JSON header and byte strings; `read_parts` gives the same back."""
    head = json.dumps({"header": header, "sizes": [len(p) for p in parts]}).encode()
    fileobj.write(_HEADER.pack(_MAGIC, len(head)))
    fileobj.write(head)
    for part in parts:
        fileobj.write(part)


def read_parts(fileobj: IO[bytes]) -> tuple[Any, list[bytes]]:
    """Reads what `write_parts` wrote.

    Raises:
        CheckpointDamagedError: the file is something else or cut short.
    """
    header, sizes = read_header(fileobj)
    return header, [fileobj.read(size) for size in sizes]


def begins(fileobj: IO[bytes]) -> bool:
    """Whether it looks like what `write_parts` wrote; its position stays."""
    start = fileobj.tell()
    found = fileobj.read(len(_MAGIC))
    fileobj.seek(start)
    return found == _MAGIC


def read_header(fileobj: IO[bytes]) -> tuple[Any, list[int]]:
    """Reads what comes before the parts: the header, and how long each part is.

    Raises:
        CheckpointDamagedError: the file is something else or cut short.
    """
    try:
        start = fileobj.tell()
        left = fileobj.seek(0, os.SEEK_END) - start
        fileobj.seek(start)
        magic, size = _HEADER.unpack(fileobj.read(_HEADER.size))
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        left -= _HEADER.size + size
        if left < 0:
            raise ValueError("it is cut short")
        head = json.loads(fileobj.read(size))
        header, sizes = head["header"], head["sizes"]
        # Compared before anything is read: a size may be a lie of many terabytes.
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("it has a part of an impossible size")
        if sum(sizes) != left:
            raise ValueError(f"its parts have {left} bytes, not {sum(sizes)}")
    except _UNREADABLE as error:
        raise errors.CheckpointDamagedError(
            f"The state file {getattr(fileobj, 'name', '')!r} cannot be read: {error}"
        ) from error
    return header, sizes


def encode(value: Any) -> Any:
    """JSON for what RNG states are made of; `decode` gives the same back."""
    if isinstance(value, np.ndarray):
        raw = np.ascontiguousarray(value)
        return {
            "array": raw.tobytes().hex(),
            "dtype": raw.dtype.str,
            "shape": raw.shape,
        }
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    return value


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        raw = np.frombuffer(bytes.fromhex(value["array"]), np.dtype(value["dtype"]))
        return raw.reshape(value["shape"]).copy()
    if "float" in value:
        return float.fromhex(value["float"])
    if "tuple" in value:
        return tuple(decode(item) for item in value["tuple"])
    if "list" in value:
        return [decode(item) for item in value["list"]]
    return {key: decode(item) for key, item in value["dict"].items()}


@contextlib.contextmanager
def readable(state: object) -> Iterator[None]:
    """What goes wrong in the body means that the saved bytes are not the State's.

    Raises:
        CheckpointDamagedError: in place of what Python and NumPy raise.
    """
    try:
        yield
    except (
        *(ValueError, KeyError, TypeError, IndexError, AttributeError),
        *(OverflowError, RecursionError, MemoryError),
    ) as error:
        raise errors.CheckpointDamagedError(
            f"What was saved for {state!r} cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error


def check_bit_generator(state: Any) -> None:
    """Checks what NumPy does not: it would read memory that is not its own.

    Args:
        state: a decoded state of a NumPy generator, before NumPy is given it.

    Raises:
        ValueError: it is none, or has a position that is out of range.
        KeyError: it lacks a part.
    """
    if type(state) is not dict or not isinstance(state["bit_generator"], str):
        raise ValueError(f"a bit generator's state is a {type(state).__name__}")
    inner = state["state"]
    if type(inner) is not dict:
        raise ValueError(f"a bit generator's inner state is a {type(inner).__name__}")
    for holder, field, top in (
        (inner, "pos", 624),  # MT19937
        (state, "buffer_pos", 4),  # Philox
    ):
        if field not in holder:
            continue
        if type(holder[field]) is not int or not 0 <= holder[field] <= top:
            raise ValueError(f"{field} is {holder[field]!r}")
