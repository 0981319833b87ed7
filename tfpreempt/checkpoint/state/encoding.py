"""Python and NumPy values as JSON and raw bytes, bit for bit, without pickle."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from tfpreempt import errors

_HEADER = struct.Struct("<8sI")
MAGIC = b"tfpbytes"  # begins what `write_parts` writes
UNREADABLE = (
    *(struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(OverflowError, RecursionError, MemoryError),
    SyntaxError,  # NumPy reads some names of dtypes as Python
)
"""What Python and NumPy raise where bytes are not what was saved."""
_AS_THEY_ARE = frozenset({type(None), bool, int, str})
_KINDS = "biufcSUmM"  # of NumPy types that `dtype.str` names in full
_EXPECTED = (
    "None, a bool, int, float, str, NumPy array or NumPy number, or a list, tuple or "
    "dict of these"
)


def write_parts(fileobj: IO[bytes], header: Any, parts: list[bytes]) -> None:
    """Writes a JSON header and byte strings; `read_parts` gives the same back."""
    head = json.dumps({"header": header, "sizes": [len(p) for p in parts]}).encode()
    fileobj.write(_HEADER.pack(MAGIC, len(head)))
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
        if magic != MAGIC:
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
    except UNREADABLE as error:
        raise errors.CheckpointDamagedError(
            f"The state file {getattr(fileobj, 'name', '')!r} cannot be read: {error}"
        ) from error
    return header, sizes


def encode(
    value: Any,
    path: str = "the value",
    arrays: list[bytes] | None = None,
    *,
    takes_tensors: bool = False,
    takes_bytes: bool = False,
) -> Any:
    """JSON that `decode` makes the same value of, type for type.

    Args:
        value: None, a bool, int, float, str, NumPy array or number, or lists, tuples
            and dicts of these.
        path: names the value in an error.
        arrays: takes the bytes of arrays; without it they are in the JSON.
        takes_tensors: tensors become NumPy arrays; otherwise they are refused.
        takes_bytes: bytes are put among the arrays, without a copy; likewise.

    Raises:
        SaveError: a part of the value is of another kind.
    """
    inner = functools.partial(
        encode, arrays=arrays, takes_tensors=takes_tensors, takes_bytes=takes_bytes
    )
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind is float:  # JSON has no infinity, nor the bits of a NaN
        return {"float": struct.pack(">d", value).hex()}
    if kind is bytes and takes_bytes and arrays is not None:
        arrays.append(value)
        return {"bytes": len(arrays) - 1}
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encode_array(value, path, arrays)
    if kind in (list, tuple):
        items = [*value]
        if not _AS_THEY_ARE.issuperset(map(type, items)):
            items = [inner(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        pairs = {key: inner(item, f"{path}[{key!r}]") for key, item in value.items()}
        if all(type(key) is str for key in pairs):
            return {"dict": pairs}
        keys = [inner(key, f"a key of {path}") for key in pairs]
        return {"pairs": [*zip(keys, pairs.values(), strict=True)]}
    if takes_tensors and callable(getattr(value, "numpy", None)):
        return inner(value.numpy(), path)
    expected = f"bytes, {_EXPECTED}" if takes_bytes else _EXPECTED
    raise errors.SaveError(f"{path} is {_shown(value)}; expected {expected}")


def _encode_array(value: Any, path: str, arrays: list[bytes] | None) -> Any:
    dtype = value.dtype
    if not _is_plain(dtype):
        raise errors.SaveError(
            f"{path} is an array of dtype {dtype}; expected numbers, bools, strings or "
            "times of one plain dtype, not objects or records"
        )
    name = dtype.str if dtype.kind in _KINDS else dtype.name
    data = value.tobytes()
    if isinstance(value, np.generic):
        return {"scalar": data.hex(), "dtype": name}
    found = {"array": data.hex(), "dtype": name, "shape": list(value.shape)}
    if arrays is not None:
        found["array"] = len(arrays)
        arrays.append(data)
    return found


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _KINDS or dtype.isbuiltin == 2  # bfloat16, by ml_dtypes


def decode(encoded: Any, arrays: Sequence[bytes] = ()) -> Any:
    """What `encode` was given; arrays are new and writable.

    Args:
        encoded: what it returned, also after a trip through JSON.
        arrays: those that `encode` filled.
    """
    if isinstance(encoded, list):
        return [decode(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "float" in encoded:
        if len(encoded["float"]) != 16:  # of older commits
            return float.fromhex(encoded["float"])
        return struct.unpack(">d", bytes.fromhex(encoded["float"]))[0]
    if "list" in encoded:  # of older commits
        return decode(encoded["list"], arrays)
    if "bytes" in encoded:
        return arrays[encoded["bytes"]]
    if "tuple" in encoded:
        return tuple(decode(item, arrays) for item in encoded["tuple"])
    if "dict" in encoded:
        return {key: decode(item, arrays) for key, item in encoded["dict"].items()}
    if "pairs" in encoded:
        return {decode(k, arrays): decode(v, arrays) for k, v in encoded["pairs"]}
    dtype: np.dtype[Any] = np.dtype(str(encoded["dtype"]))
    if not _is_plain(dtype):  # for one, saved bytes are no addresses of objects
        raise ValueError(f"the dtype {dtype}, which is never saved")
    if "scalar" in encoded:
        return np.ndarray((), dtype, bytes.fromhex(encoded["scalar"]))[()]
    where = encoded["array"]
    data = bytes.fromhex(where) if isinstance(where, str) else arrays[where]
    return np.ndarray(encoded["shape"], dtype, data).copy()


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60] + '...' if len(text) > 60 else text} ({type(value).__name__})"


@contextlib.contextmanager
def readable(state: object) -> Iterator[None]:
    """What goes wrong in the body means that the saved bytes are not the State's.

    Raises:
        CheckpointDamagedError: in place of what Python and NumPy raise.
    """
    try:
        yield
    except UNREADABLE as error:
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
