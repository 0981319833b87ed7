"""Ready-made States for plain values: a step, JSON values, NumPy arrays."""

from __future__ import annotations

import ast
import json
import math
from typing import IO, Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    UNREADABLE,
    read_parts,
    readable,
    write_parts,
)
from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry

_MAX_DEPTH = 500  # json's own limit depends on the stack depth of the caller
_MAX_STEP = 1 << 63


class JsonState(State):
    """Saves a value as JSON, such as a dict of settings or a list of losses.

    Args:
        name: name of the State, unique among the existing States.
        value: value until a saved value is loaded.
        per_worker: whether each worker saves its own value; by default the chief's
            value is saved, and restored on every worker.
        registry: registry of States; None does not register the State.

    Attributes:
        value: the value; assign a new value, or change the value in place. Supported
            are dictionaries with strings as keys, lists, strings, numbers, booleans and
            None. A save raises SaveError for a value that JSON would change, such as a
            tuple.
    """

    def __init__(
        self,
        name: str,
        value: Any = None,
        *,
        per_worker: bool = False,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        super().__init__(name, per_worker, registry=registry)
        self.value = value

    def save(self, fileobj: IO[bytes]) -> None:
        problem = _why_not_json(self.value, "value", _MAX_DEPTH)
        try:
            data = b"" if problem else json.dumps(self.value).encode()
        except ValueError as error:  # for example an int of thousands of digits
            problem = f"value cannot be written: {error}"
        if problem:
            raise errors.SaveError(
                f"The value of {self!r} cannot be saved as JSON: {problem}. Expected "
                "dictionaries with strings as keys, lists, strings, numbers, booleans "
                "and None. Convert the value (a NumPy scalar or a tensor: by "
                "float(value) or int(value)), or use an ArrayDictState or a subclass "
                "of State."
            )
        fileobj.write(data)

    def load(self, fileobj: IO[bytes]) -> None:
        self.value = _read_json(fileobj, self)

    def validate(self, fileobj: IO[bytes]) -> None:
        _read_json(fileobj, self)


def _why_not_json(value: Any, path: str, depth: int) -> str | None:
    """Returns the reason for which JSON cannot restore a value exactly, or None."""
    if depth == 0:
        return f"{path[:60]}... is nested too deep, or contains itself"
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if type(value) is dict:  # JSON would restore a defaultdict without its default
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{path} has the key {key!r}, a {type(key).__name__}"
            if problem := _why_not_json(item, f"{path}[{key!r}]", depth - 1):
                return problem
        return None
    if type(value) is list:
        for index, item in enumerate(value):
            if problem := _why_not_json(item, f"{path}[{index}]", depth - 1):
                return problem
        return None
    return f"{path} is a {type(value).__name__}"


def _read_json(fileobj: IO[bytes], state: State) -> Any:
    try:
        return json.loads(fileobj.read())
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointCorruptedError(
            f"The saved state of {state!r} is not valid JSON: {error}"
        ) from error


class StepCounter(State):
    """Saves the number of completed steps.

    Without a handler, `save_all_states` uses the value as the step of the commit, if
    the program has exactly one StepCounter.

    Args:
        name: name of the State, unique among the existing States.
        value: value until a saved value is loaded.
        per_worker: whether each worker saves its own value; by default the chief's
            value is saved, and restored on every worker.
        registry: registry of States; None does not register the State.
    """

    def __init__(
        self,
        name: str = "step",
        value: int = 0,
        *,
        per_worker: bool = False,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        self._value = _check_step(value)
        super().__init__(name, per_worker, registry=registry)

    @property
    def value(self) -> int:
        """The number of completed steps, an int of at least 0."""
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        self._value = _check_step(value)

    def increment(self, by: int = 1) -> int:
        """Adds steps to the counter.

        Args:
            by: number of steps.

        Returns:
            The new value.
        """
        self.value = self._value + by
        return self._value

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(self._value).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        self._value = self._read(fileobj)

    def validate(self, fileobj: IO[bytes]) -> None:
        self._read(fileobj)

    def _read(self, fileobj: IO[bytes]) -> int:
        value = _read_json(fileobj, self)
        if type(value) is not int or not 0 <= value < _MAX_STEP:
            raise errors.CheckpointCorruptedError(
                f"The saved state of {self!r} is {str(value)[:80]!r}; expected a "
                "number of steps."
            )
        return value


def _check_step(value: object) -> int:
    if isinstance(value, np.integer):
        value = int(value)
    if type(value) is not int or not 0 <= value < _MAX_STEP:
        raise errors.ConfigurationError(
            f"StepCounter got the value {value!r}; expected an integer of 0 or more, "
            "below 2**63."
        )
    return value


class ArrayDictState(State):
    """Saves NumPy arrays by name, with exact dtype, shape and bytes.

    Args:
        name: name of the State, unique among the existing States.
        arrays: arrays until saved arrays are loaded; the dictionary is not copied.
        per_worker: whether each worker saves its own arrays; by default the chief's
            arrays are saved, and restored on every worker.
        registry: registry of States; None does not register the State.

    Attributes:
        arrays: the arrays by name. A load replaces the dictionary's contents; the
            loaded arrays are new and writable. NumPy's structured dtypes are supported.
            For arrays of Python objects, masked arrays and dtypes of other packages
            (bfloat16), a save raises SaveError, because they could not be restored
            exactly.
    """

    def __init__(
        self,
        name: str,
        arrays: dict[str, np.ndarray[Any, Any]] | None = None,
        *,
        per_worker: bool = False,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        super().__init__(name, per_worker, registry=registry)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {} if arrays is None else arrays

    def save(self, fileobj: IO[bytes]) -> None:
        header, parts = [], []
        for name, array in self.arrays.items():
            if problem := _why_not_exact(name, array):
                raise errors.SaveError(f"{self!r} cannot be saved: {problem}.")
            # Keep Fortran order: the memory order decides the last bit of a sum.
            is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            header.append(
                {
                    "name": name,
                    "dtype": repr(np.lib.format.dtype_to_descr(array.dtype)),
                    "shape": array.shape,
                    "order": "F" if is_fortran else "C",
                }
            )
            parts.append(array.tobytes("F" if is_fortran else "C"))
        write_parts(fileobj, header, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        loaded = self._read(fileobj)
        self.arrays.clear()
        self.arrays.update(loaded)

    def validate(self, fileobj: IO[bytes]) -> None:
        self._read(fileobj)

    def _read(self, fileobj: IO[bytes]) -> dict[str, np.ndarray[Any, Any]]:
        header, parts = read_parts(fileobj)
        with readable(self):
            return {
                str(entry["name"]): _array(entry, part)
                for entry, part in zip(header, parts, strict=True)
            }


def _why_not_exact(name: object, array: object) -> str | None:
    """Returns the reason for which an array cannot be restored exactly, or None."""
    if not isinstance(name, str):
        return f"the name {name!r} is a {type(name).__name__}; expected a string"
    if type(array) not in (np.ndarray, np.memmap):
        return (
            f"{name!r} is a {type(array).__name__}; expected a numpy.ndarray (see "
            "numpy.asarray)"
        )
    assert isinstance(array, np.ndarray)
    dtype = array.dtype
    if dtype.hasobject:
        return f"{name!r} has dtype {dtype} with Python objects; expected plain numbers"
    try:
        is_exact = _dtype(repr(np.lib.format.dtype_to_descr(dtype))) == dtype
    except UNREADABLE:
        is_exact = False
    if not is_exact:
        return (
            f"{name!r} has dtype {dtype}, which cannot be written to a file; expected "
            "a simple dtype (save a view of the array)"
        )
    return None


def _dtype(text: str) -> np.dtype[Any]:
    if len(text) > 100_000:
        raise ValueError(f"the name of a dtype has {len(text)} characters")
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(ast.literal_eval(text))
    if dtype.hasobject:
        raise ValueError(f"the dtype {dtype} contains Python objects")
    return dtype


def _array(entry: Any, part: bytes) -> np.ndarray[Any, Any]:
    """Returns the array described by an entry of a file's header.

    Allocates no more memory than `part` has, even for a forged entry. Raises an error
    of `UNREADABLE` if the entry does not match the bytes.

    Args:
        entry: description of the array: a dict with name, dtype, shape and memory
            order.
        part: the array's bytes, read from the file.
    """
    dtype, shape = _dtype(entry["dtype"]), tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {str(shape)[:80]} is not valid")
    if math.prod(shape) * dtype.itemsize != len(part):
        raise ValueError(
            f"got {len(part)} bytes for an array of dtype {dtype} and shape "
            f"{str(shape)[:80]}"
        )
    if entry["order"] not in ("C", "F"):
        raise ValueError(
            f"the memory order is {str(entry['order'])[:20]!r}; expected 'C' or 'F'"
        )
    # Use a bytearray, because an array on bytes would not be writable.
    array: np.ndarray[Any, Any] = np.ndarray(
        shape, dtype, bytearray(part), order=entry["order"]
    )
    return array
