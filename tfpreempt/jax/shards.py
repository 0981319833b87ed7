"""The saved form of JAX arrays, and `Shards`: each process saves its shards.

The elements of an array may be divided among the processes (a divided array). A save
reads only the shards on the devices of its process, because a computation on a divided
array would need all processes.

`PyTreeState` and the variables of `model.fit` on JAX are owners of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

import jax
import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.bundles.bundle_writer import THREADS
from tfpreempt.checkpoint.bundles.partitioning import DenseTensor
from tfpreempt.checkpoint.bundles.tensor_copies import CopyMemory
from tfpreempt.checkpoint.state.encoding import (
    pieces,
    read_header,
    read_parts,
    readable,
)
from tfpreempt.checkpoint.state.state import Capture, State, StateRegistry
from tfpreempt.core import private_api
from tfpreempt.core.snapshot_memory import available_bytes

_log = logging.getLogger(__name__)

_VIEWED = ("cpu",)  # platforms on which NumPy's array is a view of JAX's array
_PINNED = "pinned_host"  # JAX's memory on the host to which devices copy fastest
_KIND = "pytree shards"
_NumpyArray = np.ndarray[Any, Any]
_Bounds = tuple[tuple[int, int], ...]
"""The range of an array that a shard contains: first index and end, by dimension."""


class ShardsOwner(Protocol):
    """An object with arrays, of which some may be divided among the processes."""

    def divided(self) -> Mapping[str, jax.Array]:
        """Returns the divided arrays by name."""

    def described(self, name: str) -> str:
        """Returns a text for errors that describes an array."""

    def take(self, loaded: Mapping[str, DividedArray]) -> None:
        """Takes the divided arrays of a commit, by name."""


class Shards(State):
    """Saves the divided arrays of an owner: every process saves its shards.

    Args:
        name: name of the State.
        owner: the owner, which has a reference to this object.
        registry: registry to which the State is added, or None.
    """

    _is_reserved = True  # the name comes from the name of another State
    _is_optional = True

    def __init__(
        self, name: str, owner: ShardsOwner, registry: StateRegistry | None
    ) -> None:
        super().__init__(name, per_worker=True, registry=registry)
        self._owner = weakref.proxy(owner)
        self._copies = HostCopies()

    def should_save(self) -> bool:
        return bool(self._owner.divided())

    def save(self, fileobj: IO[bytes]) -> None:
        write(fileobj, *self._contents())

    def _capture(self) -> Capture | None:
        return self._copies.capture(self, *self._contents())

    def _contents(self) -> tuple[dict[str, Any], list[bytes | Unread]]:
        """Returns the header of the file, and the arrays."""
        arrays: list[bytes | Unread] = []
        saved = {}
        for name, array in self._owner.divided().items():
            described = SavedArray.of_array(array, self._owner.described(name))
            parts = _shards(array)
            saved[name] = {
                "jax": dataclasses.asdict(described),
                "parts": [*parts],
                "array": len(arrays),
            }
            arrays += (Unread(array.shape, {each: parts[each]}) for each in parts)
        return {"kind": _KIND, "leaves": saved}, arrays

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
            body(read_header(fileobj)[0], _KIND)

    def _needs_every_worker(self) -> bool:
        return self.should_save()

    def _load(self, files: Sequence[IO[bytes]]) -> None:
        found: dict[str, DividedArray] = {}
        for file in files:
            with readable(self):
                header, parts = read_parts(file)
                for name, saved in body(header, _KIND).items():
                    what = self._owner.described(name)
                    array = DividedArray(what, SavedArray.of(saved["jax"]))
                    array = found.setdefault(name, array)
                    for number, given in enumerate(saved["parts"], saved["array"]):
                        array.add(given, parts[number])
        self._owner.take(found)


@dataclasses.dataclass(eq=False)
class DividedArray:
    """A saved array, assembled from the shards that this process has read.

    Attributes:
        what: description of the array, for errors.
        saved: shape and dtype of the array.
    """

    what: str
    saved: SavedArray
    _pieces: dict[_Bounds, _NumpyArray] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.saved.dtype)

    def add(self, bounds: Iterable[tuple[int, int]], part: bytes) -> None:
        """Adds a range of the array, read from a file."""
        key = tuple((int(first), int(end)) for first, end in bounds)
        self._pieces[key] = self.saved.numpy_part(key, part)

    def at(self, index: Any) -> _NumpyArray:
        """Returns the numbers at an index of the whole array.

        Raises:
            CheckpointMismatchError: the shards do not have every number.
        """
        shape, key_shape = self.saved.shape, self.saved.key_shape
        if index is ...:
            index = tuple(map(slice, shape))
        wanted = _bounds(index[: len(shape)], shape)
        if wanted in self._pieces:
            return self._pieces[wanted]
        sizes = [end - first for first, end in wanted]
        found = np.empty([*sizes, *key_shape], self.saved.dtype)
        is_there = np.zeros(sizes, bool)
        for bounds, piece in self._pieces.items():
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
                f"{self.what} is divided among the processes in another way than in "
                f"the commit, and this process has saved {sorted(self._pieces)}, not "
                f"all of {wanted}. Use the mesh and the sharding of the interrupted "
                "run; or restart with another number of processes, which read all "
                "shards."
            )
        return found


@dataclasses.dataclass(eq=False, kw_only=True)
class SavedArray:
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
    def of_array(cls, array: jax.Array, what: str) -> SavedArray:
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
    def of(cls, saved: dict[str, Any]) -> SavedArray:
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

    def check(self, what: str, here: Any) -> None:
        """Checks that the saved array can replace a leaf of the program's tree.

        If the leaf is a Python number or a weakly typed array, the saved dtype may
        differ, because a step function may change such a type in its first call.

        Args:
            what: description of the leaf, for an error.
            here: the leaf.

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
                f"{what} was saved as {_described(*saved)}, and is "
                f"{_described(*found)} here. Build the tree as the interrupted run "
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
        now = jax.random.key_data(here) if self.key else here
        made = placed(self.raw_shape, at, now)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """The shards of an array on the devices of this process, or copies of the shards.

    Attributes:
        shape: shape of the array.
        shards: shards by range of the array, as arrays on one device or of NumPy.
    """

    shape: tuple[int, ...]
    shards: Mapping[_Bounds, Any]

    @property
    def nbytes(self) -> int:
        return sum(int(each.nbytes) for each in self.shards.values())

    def copy_to_host_async(self) -> None:
        """Starts to copy the shards to the memory of the host, for `__array__`."""
        start_copies(self.shards.values())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _NumpyArray:
        """Returns the numbers of the array; of the shard, if there is one shard."""
        parts = {bounds: np.asarray(each) for bounds, each in self.shards.items()}
        first = next(iter(parts.values()))
        if len(parts) == 1:
            return first
        whole = np.empty((*self.shape, *first.shape[len(self.shape) :]), first.dtype)
        for bounds, part in parts.items():
            whole[tuple(slice(*each) for each in bounds)] = part
        return whole


class HostCopies:
    """Copies the arrays of a State to the memory of the host, in asynchronous saves."""

    def __init__(self) -> None:
        self._kept = 0  # bytes that JAX keeps for the next copies

    def capture(
        self, state: State, header: Any, arrays: Sequence[bytes | Unread]
    ) -> Capture | None:
        """Starts the copies of all arrays. A device copies while training continues,
        and a later step that reuses the memory of an array waits for the copy.

        Args:
            state: the State, for the log.
            header: header of the State's file.
            arrays: the arrays in the file. Byte strings are not copied.

        Returns:
            The contents of the file; None if there is too little memory.
        """
        of_jax = [each for each in arrays if isinstance(each, Unread)]
        shards = [shard for each in of_jax for shard in each.shards.values()]
        size = sum(each.nbytes for each in of_jax)
        try:
            _check_room(size - self._kept)
            copies = iter(_copied(shards))
        # RuntimeError: JAX has no memory, or the step has failed, which `save` reports.
        except (MemoryError, RuntimeError) as error:
            _log.info("%r is written while training waits: %s", state, error)
            return None
        if jax.default_backend() not in _VIEWED:
            self._kept = max(self._kept, size)
        copied = [
            Unread(each.shape, {bounds: next(copies) for bounds in each.shards})
            if isinstance(each, Unread)
            else each
            for each in arrays
        ]
        return Capture(sum(map(_size, copied)), _pieces(header, copied))


def _check_room(size: int) -> None:
    try:
        available = available_bytes()
    except OSError:
        return  # the free memory is unknown
    if size > available:
        raise MemoryError(f"a copy needs {size} bytes, and {available} are available")


def _copied(shards: Sequence[jax.Array]) -> Sequence[Any]:
    """Returns copies of arrays, each on one device, in the memory of the host."""
    devices = set().union(*(each.devices() for each in shards))
    kinds = [
        {each.kind for each in device.addressable_memories()} for device in devices
    ]
    # On a CPU, the next step would wait for JAX's copy, which one thread makes.
    if jax.default_backend() not in _VIEWED and all(_PINNED in each for each in kinds):
        targets = [each.sharding.with_memory_kind(_PINNED) for each in shards]
        copies: Sequence[Any] = jax.device_put([*shards], targets, may_alias=False)
        return copies
    start_copies(shards)
    read = [np.asarray(each) for each in shards]
    tensors = [DenseTensor("", 0, each.shape, _flat(each), False) for each in read]
    memory = CopyMemory(is_kept=False)
    return [
        copy.data.view(each.dtype).reshape(each.shape)
        for copy, each in zip(memory.copied(tensors, THREADS), read, strict=True)
    ]


def start_copies(arrays: Iterable[jax.Array | Unread]) -> None:
    """Starts to copy arrays to the host, so that devices copy while others are read."""
    if jax.default_backend() not in _VIEWED:  # a view needs no copy
        for each in arrays:
            each.copy_to_host_async()


def write(fileobj: IO[bytes], header: Any, arrays: list[bytes | Unread]) -> None:
    """Writes the file of a State at once; empties the list of the arrays."""
    start_copies(each for each in arrays if isinstance(each, Unread))
    for piece in _pieces(header, arrays):
        fileobj.write(piece)


def _pieces(header: Any, arrays: list[bytes | Unread]) -> Iterator[bytes | memoryview]:
    """Yields the contents of a file; empties the list, to free copies early."""
    sizes = [_size(each) for each in arrays]
    ordered = (arrays.pop(0) for _ in sizes)
    parts = (e if isinstance(e, bytes) else buffer(np.asarray(e)) for e in ordered)
    return pieces(header, sizes, parts)


def _size(part: bytes | Unread) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def local_numbers(array: jax.Array) -> list[_NumpyArray]:
    """Returns the numbers of an array in the shards of this process. Shards with the
    same range of the array are returned once."""
    found = unread(array)
    found.copy_to_host_async()
    return list(map(np.asarray, found.shards.values()))


def unread(array: jax.Array) -> Unread:
    """Returns an array for a later read; for random keys, the integers of the keys."""
    return Unread(array.shape, _shards(array))


def placed(
    shape: Sequence[int], at: Callable[[Any], _NumpyArray], here: Any
) -> jax.Array:
    """Returns numbers as a JAX array with the sharding of another array.

    No process needs another process, unlike in `jax.device_put`.

    Args:
        shape: shape of the numbers.
        at: function that returns the numbers at an index.
        here: the other array; another value has no sharding.
    """
    if isinstance(here, jax.Array) and here.committed:
        return jax.make_array_from_callback(tuple(shape), here.sharding, at)
    return jax.numpy.asarray(at(...))


def is_whole(array: jax.Array) -> bool:
    """Returns whether every process holds every element of an array."""
    return array.is_fully_addressable or _holds_all(array.sharding, array.shape)


@functools.lru_cache(maxsize=4096)
def _holds_all(sharding: Any, shape: tuple[int, ...]) -> bool:
    held: dict[int, set[_Bounds]] = {p: set() for p in range(jax.process_count())}
    for device, index in sharding.devices_indices_map(shape).items():
        held[device.process_index].add(_bounds(index, shape))
    everything = set().union(*held.values())
    return all(each == everything for each in held.values())


def local_shards(array: jax.Array) -> list[jax.Array]:
    """Returns the shards of an array on the devices of this process, without replicas;
    the array itself if this process has all shards."""
    return [array] if array.is_fully_addressable else [*_shards(array).values()]


def wide_sum(array: jax.Array) -> jax.Array:
    """Returns the sum of the elements of a floating-point array, in at least 32 bits,
    because a sum in 16 bits would often be infinite."""
    return jax.numpy.sum(
        array, dtype=jax.numpy.promote_types(array.dtype, jax.numpy.float32)
    )


def _is_key(array: jax.Array) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def _shards(array: jax.Array) -> dict[_Bounds, jax.Array]:
    """Returns the shards on the devices of this process, by the range of the array; for
    random keys, the integers of the keys. Replicas of a shard are returned once."""
    # Not from `addressable_shards`, which raises an error for a replicated array that
    # `jax.device_put` has made in several processes (JAX 0.10.2).
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    shards = {
        _bounds(index or (), array.shape): array.addressable_data(number)
        for number, index in enumerate(indices.values())
    }
    if _is_key(array):
        return {each: jax.random.key_data(data) for each, data in shards.items()}
    return shards


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


def buffer(array: _NumpyArray) -> memoryview:
    """Returns the bytes of an array, without a copy if possible."""
    return _flat(array).data


def _flat(array: _NumpyArray) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def body(header: Any, kind: str) -> dict[str, Any]:
    """Returns the descriptions of the leaves in the header of a file, by key path.
    Raises ValueError if the file is not of the expected kind."""
    if header.get("kind") != kind or type(header["leaves"]) is not dict:
        raise ValueError(f"its head is {str(header)[:80]!r}")
    leaves: dict[str, Any] = header["leaves"]
    return leaves


def _described(shape: tuple[int, ...], dtype: str, key: str) -> str:
    kind = f"random keys {key!r}" if key else dtype
    return f"{kind} of shape {list(shape)}"
