"""What callbacks remember as JSON and raw bytes, bit for bit, without pickle.

Unlike `checkpoint/encoding.py` it keeps the type of NumPy numbers, keeps large arrays
out of the JSON, and refuses what it could not give back as it was.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpreempt import errors

_AS_THEY_ARE = (type(None), bool, int, str)
_KINDS = "biufcSUmM"  # of NumPy types that `dtype.str` names in full
_EXPECTED = (
    "None, a bool, int, float, str, NumPy array or NumPy number, or a list, tuple or "
    "dict (with str keys) of these"
)


class Packer:
    """Packs values; their arrays are collected.

    Attributes:
        arrays: the bytes of all arrays so far.
    """

    def __init__(self) -> None:
        self.arrays: list[bytes] = []

    def pack(self, value: Any, path: str, *, takes_tensors: bool = False) -> Any:
        """JSON that `unpack` makes the same value of.

        Args:
            value: what a callback remembers.
            path: names the value in an error.
            takes_tensors: tensors become NumPy arrays; otherwise they are refused.

        Raises:
            SaveError: a part of the value is of another kind.
        """
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is float:
            return _pack_float(value)
        if isinstance(value, np.generic) or kind is np.ndarray:
            return self._pack_array(value, path)
        if kind in (list, tuple):
            items = [
                self.pack(item, f"{path}[{i}]", takes_tensors=takes_tensors)
                for i, item in enumerate(value)
            ]
            return items if kind is list else {"tuple": items}
        if kind is dict:
            return {"dict": self._pack_items(value, path, takes_tensors)}
        if takes_tensors and callable(getattr(value, "numpy", None)):
            return self.pack(value.numpy(), path)
        raise errors.SaveError(f"{path} is {_shown(value)}; expected {_EXPECTED}")

    def add(self, data: bytes) -> int:
        """Adds bytes that are no array.

        Returns:
            Where they are in `arrays`.
        """
        self.arrays.append(data)
        return len(self.arrays) - 1

    def _pack_items(self, value: dict[Any, Any], path: str, tensors: bool) -> Any:
        for key in value:
            if type(key) is not str:
                raise errors.SaveError(
                    f"{path} has the key {_shown(key)}; expected keys of type str "
                    "only, because others do not come back from JSON"
                )
        return {
            key: self.pack(item, f"{path}[{key!r}]", takes_tensors=tensors)
            for key, item in value.items()
        }

    def _pack_array(self, value: Any, path: str) -> Any:
        dtype = _dtype_name(value.dtype)
        if dtype is None:
            raise errors.SaveError(
                f"{path} is an array of dtype {value.dtype}; expected numbers, bools, "
                "strings or times of one plain dtype, not objects or records"
            )
        if isinstance(value, np.generic):
            return {"scalar": value.tobytes().hex(), "dtype": dtype}
        return {
            "array": self.add(value.tobytes()),
            "dtype": dtype,
            "shape": list(value.shape),
        }


def unpack(packed: Any, arrays: Sequence[bytes]) -> Any:
    """What `Packer.pack` was given; arrays are new and writable.

    Args:
        packed: what it returned, also after a trip through JSON.
        arrays: the packer's.
    """
    if isinstance(packed, list):
        return [unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "float" in packed:
        return struct.unpack(">d", bytes.fromhex(packed["float"]))[0]
    if "tuple" in packed:
        return tuple(unpack(item, arrays) for item in packed["tuple"])
    if "dict" in packed:
        return {key: unpack(item, arrays) for key, item in packed["dict"].items()}
    dtype = np.dtype(packed["dtype"])
    if "scalar" in packed:
        return np.ndarray((), dtype, bytes.fromhex(packed["scalar"]))[()]
    return np.ndarray(packed["shape"], dtype, arrays[packed["array"]]).copy()


def _pack_float(value: float) -> Any:
    """JSON gives finite floats back exactly; the bits of a NaN need more."""
    if math.isfinite(value):
        return value
    return {"float": struct.pack(">d", value).hex()}


def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    """A name that `np.dtype` understands; None where there is none."""
    if dtype.kind in _KINDS:
        return dtype.str
    is_registered = dtype.isbuiltin == 2  # bfloat16 and its like, by ml_dtypes
    return dtype.name if is_registered else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60] + '...' if len(text) > 60 else text} ({type(value).__name__})"
