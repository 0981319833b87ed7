"""Python and NumPy values as JSON and raw bytes, bit for bit, without pickle."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

import numpy as np

from tfpreempt import errors

_HEADER = struct.Struct("<8sI")
_MAGIC = b"tfpbytes"


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
        magic, size = _HEADER.unpack(fileobj.read(_HEADER.size))
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        head = json.loads(fileobj.read(size))
        parts = [fileobj.read(size) for size in head["sizes"]]
        if [len(part) for part in parts] != head["sizes"]:
            raise ValueError("it is cut short")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise errors.CheckpointDamagedError(
            f"The state file {getattr(fileobj, 'name', '')!r} cannot be read: {error}"
        ) from error
    return head["header"], parts


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
