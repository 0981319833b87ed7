"""Python and NumPy values as JSON and raw bytes, bit for bit, without pickle."""

from __future__ import annotations

import json
import os
import struct
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
        parts = [fileobj.read(size) for size in sizes]
    except _UNREADABLE as error:
        raise errors.CheckpointDamagedError(
            f"The state file {getattr(fileobj, 'name', '')!r} cannot be read: {error}"
        ) from error
    return header, parts


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
