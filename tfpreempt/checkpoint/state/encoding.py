"""Encodes Python and NumPy values as JSON and raw bytes, without pickle; the decoded
values are equal bit for bit."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from tfpreempt import errors

_HEADER = struct.Struct("<8sI")
MAGIC = b"tfpbytes"  # first bytes of a file written by `write_parts`
UNREADABLE = (
    *(struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(OverflowError, RecursionError, MemoryError),
    SyntaxError,  # NumPy parses some dtype names as Python code
)
"""Exceptions that Python and NumPy may raise when corrupt bytes are decoded."""
_AS_THEY_ARE = frozenset({type(None), bool, int, str})
_KINDS = "biufcSUmM"  # NumPy types described in full by `dtype.str`
_EXPECTED = (
    "None, a bool, int, float, str, NumPy array or NumPy number, or a list, tuple or "
    "dict of these"
)


def write_parts(
    fileobj: IO[bytes], header: Any, parts: Sequence[bytes | memoryview]
) -> None:
    """Writes a JSON-able header, followed by byte strings, each directly after the
    other. `read_parts` reads this format."""
    for piece in pieces(header, [len(part) for part in parts], parts):
        fileobj.write(piece)


def pieces(
    header: Any, sizes: Sequence[int], parts: Iterable[bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    """Yields the bytes that `write_parts` writes; `sizes` are the sizes of the byte
    strings `parts`, which are read one after the other."""
    head = json.dumps({"header": header, "sizes": [*sizes]}).encode()
    yield _HEADER.pack(MAGIC, len(head)) + head
    yield from parts


def read_parts(fileobj: IO[bytes]) -> tuple[Any, list[bytes]]:
    """Reads a header and byte strings written by `write_parts`.

    Raises:
        CheckpointCorruptedError: the file is too short, or in another format.
    """
    header, sizes = read_header(fileobj)
    return header, [fileobj.read(size) for size in sizes]


def read_header(fileobj: IO[bytes]) -> tuple[Any, list[int]]:
    """Reads the header written by `write_parts`, and the sizes of the byte strings;
    does not read the byte strings.

    Raises:
        CheckpointCorruptedError: the file is too short, or in another format.
    """
    try:
        start = fileobj.tell()
        left = fileobj.seek(0, os.SEEK_END) - start
        fileobj.seek(start)
        magic, size = _HEADER.unpack(fileobj.read(_HEADER.size))
        if magic != MAGIC:
            raise ValueError(
                f"expected a file that begins with {MAGIC!r}, not {magic!r}"
            )
        left -= _HEADER.size + size
        if left < 0:
            raise ValueError("the file is incomplete")
        head = json.loads(fileobj.read(size))
        header, sizes = head["header"], head["sizes"]
        # Check the sizes before reading: a hostile file may claim terabytes.
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("a size in the header is negative or not an integer")
        if sum(sizes) != left:
            raise ValueError(
                f"expected {sum(sizes)} bytes after the header, not {left}"
            )
    except UNREADABLE as error:
        raise errors.CheckpointCorruptedError(
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
    """Returns a JSON-able form of a value, from which `decode` makes an equal value
    with the same types.

    Args:
        value: None, a bool, int, float, str, NumPy array or number, or lists, tuples
            and dicts of these values.
        path: name of the value in an error.
        arrays: list to which the function appends the bytes of arrays; the result then
            has only their indices in the list. None: the result contains the bytes, in
            hexadecimal.
        takes_tensors: whether tensors are accepted, and encoded as NumPy arrays.
        takes_bytes: whether bytes are accepted, and appended to `arrays` without a
            copy; needs `arrays`.

    Raises:
        SaveError: the value, or a value inside, has an unsupported type.
    """
    inner = functools.partial(
        encode, arrays=arrays, takes_tensors=takes_tensors, takes_bytes=takes_bytes
    )
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind is float:  # JSON cannot hold infinity, or the bits of a NaN
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
    dtype, is_array = value.dtype, type(value) is np.ndarray
    if not _is_plain(dtype) or (is_array and not dtype.itemsize):
        raise errors.SaveError(
            f"{path} is an array of dtype {dtype}; expected numbers, bools, strings or "
            "times of a simple dtype, not objects or records"
        )
    name = dtype.str if dtype.kind in _KINDS else dtype.name
    # Keep Fortran order: the memory order decides the last bit of a sum.
    is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    data = value.tobytes("F" if is_fortran else "C")
    if isinstance(value, np.generic):
        return {"scalar": data.hex(), "dtype": name}
    found = {"array": data.hex(), "dtype": name, "shape": list(value.shape)}
    if is_fortran:
        found["order"] = "F"
    if arrays is not None:
        found["array"] = len(arrays)
        arrays.append(data)
    return found


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _KINDS or dtype.isbuiltin == 2  # such as ml_dtypes.bfloat16


def decode(encoded: Any, arrays: Sequence[bytes] = ()) -> Any:
    """Returns the value that was passed to `encode`; arrays are new and writable.

    Args:
        encoded: result of `encode`; may have been converted to JSON text and back.
        arrays: the list to which `encode` appended bytes.
    """
    return _decoded(encoded, dict(enumerate(arrays)))


def _decoded(encoded: Any, left: dict[int, bytes]) -> Any:
    """Decodes a value, see `decode`; removes the bytes of each array from `left`.

    `encode` refers once to each array. Many references in a small file would make many
    copies of the array, which fill the memory.
    """
    if isinstance(encoded, list):
        return [_decoded(item, left) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "float" in encoded:
        if len(encoded["float"]) != 16:  # commits of earlier versions have this format
            return float.fromhex(encoded["float"])
        return struct.unpack(">d", bytes.fromhex(encoded["float"]))[0]
    if "list" in encoded:  # commits of earlier versions have this format
        return _decoded(encoded["list"], left)
    if "bytes" in encoded:
        return left.pop(encoded["bytes"])
    if "tuple" in encoded:
        return tuple(_decoded(item, left) for item in encoded["tuple"])
    if "dict" in encoded:
        return {key: _decoded(item, left) for key, item in encoded["dict"].items()}
    if "pairs" in encoded:
        return {_decoded(k, left): _decoded(v, left) for k, v in encoded["pairs"]}
    dtype: np.dtype[Any] = np.dtype(str(encoded["dtype"]))
    if not _is_plain(dtype):  # NumPy would take bytes for addresses of objects
        raise ValueError(f"got the dtype {dtype}, which tfpreempt never saves")
    if "scalar" in encoded:
        return np.ndarray((), dtype, bytes.fromhex(encoded["scalar"]))[()]
    if not dtype.itemsize:  # no byte of the file, but memory for each element
        raise ValueError(f"got an array of the dtype {dtype}, which is never saved")
    where = encoded["array"]
    data = bytes.fromhex(where) if isinstance(where, str) else left.pop(where)
    order = encoded.get("order", "C")
    return np.ndarray(encoded["shape"], dtype, data, order=order).copy(order)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60] + '...' if len(text) > 60 else text} ({type(value).__name__})"


@contextlib.contextmanager
def readable(state: object) -> Iterator[None]:
    """Returns a context for code that decodes the saved bytes of a State: an exception
    in `UNREADABLE` is raised as CheckpointCorruptedError.

    Args:
        state: the State that the message names.

    Raises:
        CheckpointCorruptedError: Python or NumPy raised an exception in `UNREADABLE`.
    """
    try:
        yield
    except UNREADABLE as error:
        raise errors.CheckpointCorruptedError(
            f"The saved state of {state!r} cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error


def check_bit_generator(state: Any) -> None:
    """Checks the saved state of a NumPy bit generator, especially the position in its
    buffer of random numbers.

    NumPy does not check the position, and would read memory out of bounds.

    Args:
        state: the decoded state, before it is passed to NumPy.

    Raises:
        ValueError: the value is not a generator's state, or a position is out of range.
        KeyError: a key of the state is missing.
    """
    if type(state) is not dict or not isinstance(state["bit_generator"], str):
        raise ValueError(
            f"the state of a bit generator is a {type(state).__name__}; expected a dict"
        )
    inner = state["state"]
    if type(inner) is not dict:
        raise ValueError(
            f"the inner state of a bit generator is a {type(inner).__name__}; expected "
            "a dict"
        )
    for holder, field, top in (
        (inner, "pos", 624),  # MT19937
        (state, "buffer_pos", 4),  # Philox
    ):
        if field not in holder:
            continue
        if type(holder[field]) is not int or not 0 <= holder[field] <= top:
            raise ValueError(
                f"{field} is {holder[field]!r}; expected an integer from 0 to {top}"
            )
