"""`PyTreeState`: a ready-made State for a pytree of JAX arrays and plain values.

A leaf is saved under its key path, such as "['dense']['kernel']", with dtype and shape.
No Python object is pickled: the program builds the tree again, and a load replaces the
leaves.

Process 0 saves the plain values, and the arrays of which every process holds every
element. If the elements of an array are divided among the processes (a divided array),
each process saves the shards on its devices, in a second State. A save reads only the
shards on the devices of its process, because a computation on a divided array would
need all processes.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import jax
import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    decode,
    encode,
    read_header,
    read_parts,
    readable,
    write_parts,
)
from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry
from tfpreempt.core import private_api

_KIND, _SHARDS_KIND = "pytree", "pytree shards"
_MOST_NAMED = 5  # leaves named in an error
_NumpyArray = np.ndarray[Any, Any]
_Bounds = tuple[tuple[int, int], ...]
"""The range of an array that a shard contains: first index and end, by dimension."""


class PyTreeState(State):
    """Saves a pytree: JAX arrays and random keys, NumPy arrays, Python scalars.

    Every leaf is restored bit for bit, with its dtype (also bfloat16 and float8), shape
    and weak type. A JAX array is restored with the sharding that the array at the same
    path has in the program. So build the tree as at the first start: the paths, shapes
    and dtypes must be equal.

    With several processes (`jax.distributed`), the elements of an array may be divided
    among the processes. Then every process saves its shards. A restart with the same
    number of processes must divide the array as before; a restart with another number
    of processes may divide the array in any way. `save_state` raises an error for such
    a tree, and `load_state` does not load the shards.

    Args:
        name: name of the State, unique among the existing States.
        value: the initial pytree, which a load replaces.
        per_worker: whether each process saves its own tree; by default the tree is
            equal on every process, and process 0 saves the tree.
        registry: registry to which the State is added; with None, commits do not
            include the State.

    Raises:
        ConfigurationError: two leaves have the same key path.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        *,
        per_worker: bool = False,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        private_api.check_available("jax_arrays")
        super().__init__(name, per_worker, registry=registry)
        self._value = value
        self._missing: list[str] = []  # divided arrays whose shards are not loaded
        self._shards = _Shards(self, registry)
        self._leaves()

    @property
    def value(self) -> Any:
        """The current pytree. After each step the program must assign the new pytree.

        Raises:
            CheckpointMismatchError: the restored commit has no shards for this process.
        """
        if self._missing:
            raise errors.CheckpointMismatchError(
                f"{self!r} was loaded without {_named(self._missing)}. Their elements "
                "are divided among the processes, and the shards of this process are "
                "missing. Restore a commit by a PreemptionCheckpointHandler."
            )
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value

    def unregister(self) -> None:
        """Excludes the State from later commits."""
        super().unregister()
        self._shards.unregister()

    def save(self, fileobj: IO[bytes]) -> None:
        arrays: list[Any] = []
        saved = {
            path: self._encoded(path, leaf, arrays)
            for path, leaf in self._leaves().items()
        }
        write_parts(fileobj, {"kind": _KIND, "leaves": saved}, arrays)

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            header, parts = read_parts(fileobj)
            saved: dict[str, Any] = _body(header, _KIND)
        here = self._leaves()
        self._check_paths(saved, here)
        loaded = {}
        for path, leaf in here.items():
            with readable(self):
                if "value" in saved[path]:
                    loaded[path] = decode(saved[path]["value"], parts)
                    continue
                head = _Head.of(saved[path]["jax"])
                whole = head.numpy(parts)
            head.check(self, path, leaf)
            if whole is not None:
                loaded[path] = head.place(whole.__getitem__, leaf)
        self._missing = [path for path in here if path not in loaded]
        self._assign(loaded)

    def validate(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            _body(read_header(fileobj)[0], _KIND)

    def _needs_every_worker(self) -> bool:
        return bool(self._divided())

    def _try_save(self) -> None:
        for path, leaf in self._leaves().items():  # without the bytes of arrays
            if isinstance(leaf, jax.Array):
                _Head.of_array(leaf, f"The leaf {path}")
            else:
                self._encoded(path, leaf, [])

    # --- the leaves ------------------------------------------------------------------

    def _leaves(self) -> dict[str, Any]:
        """Returns the leaves of the tree by key path.

        Raises:
            ConfigurationError: two leaves have the same key path.
        """
        found: dict[str, Any] = {}
        for keys, leaf in jax.tree_util.tree_flatten_with_path(self._value)[0]:
            path = jax.tree_util.keystr(keys)
            if path in found:
                raise errors.ConfigurationError(
                    f"{self!r} has two leaves with the key path {path!r}; expected "
                    "one. Rename one of the keys."
                )
            found[path] = leaf
        return found

    def _divided(self) -> dict[str, jax.Array]:
        """Returns the arrays whose elements are divided among the processes, by key
        path."""
        return {
            path: leaf
            for path, leaf in self._leaves().items()
            if isinstance(leaf, jax.Array) and not _is_whole(leaf)
        }

    def _assign(self, loaded: dict[str, Any]) -> None:
        """Replaces leaves of the tree.

        Args:
            loaded: new leaves by key path; the remaining leaves are kept.
        """
        leaves = self._leaves() | loaded
        structure = jax.tree_util.tree_structure(self._value)
        self._value = jax.tree_util.tree_unflatten(structure, leaves.values())
        self._missing = [path for path in self._missing if path not in loaded]

    def _encoded(self, path: str, leaf: Any, arrays: list[Any]) -> Any:
        """Returns the JSON-able description of a leaf for the header of the file;
        appends the bytes of the leaf to `arrays`."""
        what = f"The leaf {path} of {self!r}"
        if not isinstance(leaf, jax.Array):
            return {"value": encode(leaf, what, arrays)}
        head = _Head.of_array(leaf, what)
        if _is_whole(leaf):
            whole = np.empty(head.raw_shape, head.dtype)
            for bounds, part in _parts(leaf).items():
                whole[tuple(slice(*each) for each in bounds)] = part
            head.array = len(arrays)
            arrays.append(_buffer(whole))
        return {"jax": dataclasses.asdict(head)}

    def _check_paths(self, saved: Iterable[str], here: Iterable[str]) -> None:
        """Raises CheckpointMismatchError if the key paths of the saved tree differ from
        the key paths of the program's tree (`here`)."""
        lacking = [path for path in here if path not in set(saved)]
        unknown = [path for path in saved if path not in set(here)]
        if lacking or unknown:
            texts = [
                *([f"the commit has no {_named(lacking)}"] if lacking else []),
                *([f"the program has no {_named(unknown)}"] if unknown else []),
            ]
            raise errors.CheckpointMismatchError(
                f"{self!r} was saved from another tree: {'; '.join(texts)}. Build the "
                "tree as the interrupted run did, or use another checkpoint directory."
            )


class _Shards(State):
    """Saves a PyTreeState's arrays that are divided among the processes: every process
    saves its shards.

    States are loaded in name order. The name of this State is the name of the tree with
    a suffix, so the tree is loaded first.

    Args:
        tree: the PyTreeState, which has a reference to this object.
        registry: registry to which the tree was added, or None.
    """

    _is_optional = True

    def __init__(self, tree: PyTreeState, registry: StateRegistry | None) -> None:
        super().__init__(f"{tree.name}.shards", per_worker=True, registry=registry)
        self._tree = weakref.proxy(tree)

    def should_save(self) -> bool:
        return bool(self._tree._divided())

    def save(self, fileobj: IO[bytes]) -> None:
        arrays: list[Any] = []
        saved = {}
        for path, array in self._tree._divided().items():
            head = dataclasses.asdict(_Head.of_array(array, f"The leaf {path}"))
            parts = _parts(array)
            saved[path] = {"jax": head, "parts": [*parts], "array": len(arrays)}
            arrays += map(_buffer, parts.values())
        write_parts(fileobj, {"kind": _SHARDS_KIND, "leaves": saved}, arrays)

    def load(self, fileobj: IO[bytes]) -> None:
        self._load([fileobj])

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores every array from the shards of all earlier processes, with the
        sharding that the array has in this program."""
        self._load([file for file in files if file is not None])

    def validate(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            _body(read_header(fileobj)[0], _SHARDS_KIND)

    def _load(self, files: Sequence[IO[bytes]]) -> None:
        tree = self._tree
        heads: dict[str, _Head] = {}
        pieces: dict[str, dict[_Bounds, _NumpyArray]] = {}
        for file in files:
            with readable(self):
                header, parts = read_parts(file)
                for path, saved in _body(header, _SHARDS_KIND).items():
                    head = heads.setdefault(path, _Head.of(saved["jax"]))
                    found = pieces.setdefault(path, {})
                    for number, given in enumerate(saved["parts"], saved["array"]):
                        bounds = tuple((int(first), int(end)) for first, end in given)
                        found[bounds] = head.numpy_part(bounds, parts[number])
        here, loaded = tree._leaves(), {}
        for path, head in heads.items():
            if path not in here:
                continue  # the tree has raised an error, or will
            head.check(tree, path, here[path])
            part = _Assembled(tree, path, head, pieces[path])
            loaded[path] = head.place(part.at, here[path])
        tree._assign(loaded)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Head:
    """Description of a saved JAX array.

    Attributes:
        shape: shape of the array.
        dtype: name of the elements' dtype. For an array of random keys: name of the
            dtype of the integers in a key.
        weak: whether the array has a weak type.
        key: for an array of random keys, the name of the implementation; otherwise "".
        key_shape: shape of the integers in a random key; () for other arrays.
        array: index of the array's bytes in the file; None if the file does not contain
            the bytes, because the array is divided among the processes.
    """

    shape: tuple[int, ...]
    dtype: str
    weak: bool
    key: str = ""
    key_shape: tuple[int, ...] = ()
    array: int | None = None

    @classmethod
    def of_array(cls, array: jax.Array, what: str) -> _Head:
        """Returns the description of an array.

        Args:
            array: array of this program.
            what: name of the array, for an error.

        Raises:
            SaveError: the array was donated to a computation, or its random keys have
                an unknown implementation.
        """
        if array.is_deleted():
            raise errors.SaveError(
                f"{what} was deleted, perhaps by a donation to a compiled function; "
                "assign the new tree to `value` after each step."
            )
        key: Any = ""
        dtype, key_shape = array.dtype, ()
        if _is_key(array):
            key = jax.random.key_impl(array)
            if not isinstance(key, str):
                raise errors.SaveError(
                    f"{what} has random keys of the implementation {key!r}; expected "
                    "an implementation with a name, such as 'threefry2x32'."
                )
            data = jax.eval_shape(jax.random.key_data, array)
            dtype, key_shape = data.dtype, data.shape[array.ndim :]
        return cls(
            shape=array.shape,
            dtype=dtype.name,
            weak=not key and bool(array.weak_type),
            key=key,
            key_shape=key_shape,
        )

    @classmethod
    def of(cls, saved: dict[str, Any]) -> _Head:
        """Returns the description that a file contains. Raises an exception in
        `encoding.UNREADABLE` if the description is invalid."""
        head = cls(**saved)
        head.shape, head.key_shape = tuple(head.shape), tuple(head.key_shape)
        if not all(type(size) is int and size >= 0 for size in head.raw_shape):
            raise ValueError(f"the shape {str(head.raw_shape)[:80]}")
        if np.dtype(head.dtype).hasobject:
            raise ValueError(f"the dtype {head.dtype}, which is never saved")
        return head

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of the saved numbers: `shape`; for random keys, followed by
        `key_shape`."""
        return *self.shape, *self.key_shape

    def numpy(self, parts: Sequence[bytes]) -> _NumpyArray | None:
        """Returns the saved numbers of the array; None if the byte strings of the file
        (`parts`) do not include the array."""
        if self.array is None:
            return None
        return self.numpy_part([(0, size) for size in self.shape], parts[self.array])

    def numpy_part(self, bounds: Iterable[tuple[int, int]], part: bytes) -> _NumpyArray:
        """Returns the numbers of a range of the array, from the bytes of the range."""
        shape = *(end - first for first, end in bounds), *self.key_shape
        dtype = np.dtype(self.dtype)
        if math.prod(shape) * dtype.itemsize != len(part):
            raise ValueError(f"{len(part)} bytes for {dtype} of shape {shape}")
        return np.frombuffer(part, dtype).reshape(shape)

    def check(self, tree: PyTreeState, path: str, here: Any) -> None:
        """Checks that the saved array can replace a leaf of the program's tree.

        If the leaf is a Python number or a weakly typed array, the saved dtype may
        differ, because a step function may change such a type in its first call.

        Raises:
            CheckpointMismatchError: shape, dtype or random key implementation differ.
        """
        if not isinstance(here, jax.Array | np.ndarray):
            here = np.empty(np.shape(here))
            found: tuple[Any, ...] = here.shape, self.dtype, self.key
        elif isinstance(here, jax.Array):
            is_key = _is_key(here)
            key = str(jax.random.key_impl(here)) if is_key else ""
            is_free = is_key or here.weak_type or self.weak
            found = here.shape, self.dtype if is_free else here.dtype.name, key
        else:
            found = here.shape, here.dtype.name, ""
        saved = self.shape, self.dtype, self.key
        if found != saved:
            raise errors.CheckpointMismatchError(
                f"The leaf {path} of {tree!r} was saved as {_described(*saved)}, and "
                f"is {_described(*found)} here. Build the tree as the interrupted run "
                "did, or use another checkpoint directory."
            )

    def place(self, at: Callable[[Any], _NumpyArray], here: Any) -> jax.Array:
        """Returns the saved array as a JAX array, with the sharding of a leaf.

        Args:
            at: function that returns the saved numbers at an index of the array.
            here: the leaf of the program's tree that the array will replace.

        Raises:
            CheckpointMismatchError: JAX has no such dtype without `jax_enable_x64`.
        """
        made: jax.Array
        if isinstance(here, jax.Array) and here.committed:
            now = jax.random.key_data(here) if self.key else here
            made = jax.make_array_from_callback(self.raw_shape, now.sharding, at)
        else:
            made = jax.numpy.asarray(at(...))
        if made.dtype.name != self.dtype:
            raise errors.CheckpointMismatchError(
                f"An array was saved as {self.dtype}, and JAX makes {made.dtype.name} "
                "here. Set jax_enable_x64 as the interrupted run did."
            )
        if self.key:
            made = jax.random.wrap_key_data(made, impl=self.key)
        elif self.weak:
            made = private_api.jax_lax._convert_element_type(made, weak_type=True)
        return made


@dataclasses.dataclass(eq=False)
class _Assembled:
    """A saved array, assembled from its shards. `pieces` has the numbers of each shard
    that this process has read, by the range of the array."""

    tree: PyTreeState
    path: str
    head: _Head
    pieces: dict[_Bounds, _NumpyArray]

    def at(self, index: Any) -> _NumpyArray:
        """Returns the numbers at an index of the whole array.

        Raises:
            CheckpointMismatchError: the shards do not have every number.
        """
        if index is ...:
            index = tuple(map(slice, self.head.shape))
        wanted = _bounds(index[: len(self.head.shape)], self.head.shape)
        if wanted in self.pieces:
            return self.pieces[wanted]
        shape = [end - first for first, end in wanted]
        found = np.empty([*shape, *self.head.key_shape], self.head.dtype)
        is_there = np.zeros(shape, bool)
        for bounds, piece in self.pieces.items():
            common = [
                (max(first, low), min(end, high))
                for (first, end), (low, high) in zip(wanted, bounds, strict=True)
            ]
            if all(first < end for first, end in common):
                to = _index(common, wanted)
                found[to] = piece[_index(common, bounds)]
                is_there[to] = True
        if not is_there.all():
            raise errors.CheckpointMismatchError(
                f"The leaf {self.path} of {self.tree!r} is divided among the processes "
                "in another way than in the commit, and this process has saved "
                f"{sorted(self.pieces)}, not all of {wanted}. Use the mesh and the "
                "sharding of the interrupted run; or restart with another number of "
                "processes, which read all shards."
            )
        return found


def local_numbers(array: jax.Array) -> list[np.ndarray[Any, Any]]:
    """Returns the numbers of an array in the shards of this process. Shards with the
    same range of the array are returned once."""
    return list(_parts(array).values())


def _is_whole(array: jax.Array) -> bool:
    """Returns whether every process holds every element of an array."""
    if array.is_fully_addressable:
        return True
    held: dict[int, set[_Bounds]] = {p: set() for p in range(jax.process_count())}
    indices: Any = array.sharding.devices_indices_map(array.shape)
    for device, index in indices.items():
        held[device.process_index].add(_bounds(index, array.shape))
    everything = set().union(*held.values())
    return all(each == everything for each in held.values())


def _is_key(array: jax.Array) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def _raw(array: jax.Array) -> _NumpyArray:
    """Returns the numbers of an array on a device of this process; for random keys, the
    integers of the keys."""
    return np.asarray(jax.random.key_data(array) if _is_key(array) else array)


def _parts(array: jax.Array) -> dict[_Bounds, _NumpyArray]:
    """Returns the numbers of the shards on the devices of this process, by the range of
    the array. Replicas of a shard are returned once."""
    shards = {_bounds(s.index, array.shape): s.data for s in array.addressable_shards}
    if not _is_key(array):
        for data in shards.values():
            data.copy_to_host_async()
    return {bounds: _raw(data) for bounds, data in shards.items()}


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> _Bounds:
    """Returns the bounds of an index of an array. For random keys, the index may have
    further dimensions, for the integers in a key, which are ignored."""
    pairs = zip(index, shape, strict=False)
    return tuple(each.indices(size)[:2] for each, size in pairs)


def _index(bounds: Sequence[tuple[int, int]], within: _Bounds) -> tuple[slice, ...]:
    """Returns the index of a range of an array in the part of the array that the larger
    range `within` selects."""
    return tuple(
        slice(first - base, end - base)
        for (first, end), (base, _) in zip(bounds, within, strict=True)
    )


def _buffer(array: _NumpyArray) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def _body(header: Any, kind: str) -> dict[str, Any]:
    """Returns the descriptions of the leaves in the header of a file, by key path.
    Raises ValueError if the file is not of the expected kind."""
    if header.get("kind") != kind or type(header["leaves"]) is not dict:
        raise ValueError(f"its head is {str(header)[:80]!r}")
    leaves: dict[str, Any] = header["leaves"]
    return leaves


def _described(shape: tuple[int, ...], dtype: str, key: str) -> str:
    kind = f"random keys {key!r}" if key else dtype
    return f"{kind} of shape {list(shape)}"


def _named(paths: Sequence[str]) -> str:
    more = len(paths) - _MOST_NAMED
    shown = ", ".join(paths[:_MOST_NAMED]) or "the tree itself"
    return f"{shown} and {more} more" if more > 0 else shown
