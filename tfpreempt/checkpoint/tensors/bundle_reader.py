"""Reads the large tensors of a checkpoint with many threads; TensorFlow uses one.

TensorFlow's RestoreV2 reads the tensors in sequence. Here several threads read the data
files in pieces, and compute the checksum of a piece while the piece is still in the
processor's cache. A variable then uses the memory without a copy. TensorFlow itself
reads small tensors, and tensors that are not plain memory, such as strings.

Tensors are returned only after every byte was read and all checksums matched, so no
value of a corrupt file is assigned. A chief (worker 0) that verifies a commit keeps the
tensors until the restore (`read_ahead`), so the files are read only once.
`bundle_writer` names the source of the file format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tfpreempt import errors
from tfpreempt.checkpoint.state import bundle
from tfpreempt.checkpoint.tensors import bundle_writer
from tfpreempt.checkpoint.tensors.bundle_writer import data_file, slice_key
from tfpreempt.core import private_api
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, file_reading

_PIECE_BYTES = 1 << 19  # small enough to be still in the cache for its checksum
# Bytes that a thread reads in one job. A large tensor is divided into many jobs.
_JOB_BYTES = 1 << 24
_SMALL_BLOCK_BYTES = 1 << 16  # bytes of a memory block shared by small tensors
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, OverflowError),
    *(struct.error, DecodeError),
)
"""Errors raised for a corrupt index or an unreadable file."""
_UNKNOWN = -1  # the index has no crc32c for the bytes between tensors
_MANY = 512  # buffers filled by a single preadv() call; the kernel allows 1,024
_ALIGNED_BYTES = 64  # alignment of TensorFlow's own memory (EIGEN_MAX_ALIGN_BYTES)

_INTEGERS = (tf.int8, tf.int16, tf.int32, tf.int64)
_NATURAL = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_KINDS = (*_INTEGERS, *_NATURAL, *_FLOATS, tf.complex64, tf.complex128)
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _StoredSlice(NamedTuple):
    """A range of bytes in a data file: a whole tensor, or some rows of a tensor.

    Attributes:
        path: path of the data file.
        offset: first byte of the range in the file.
        size: size in bytes.
        crc32c: masked checksum of the bytes, from the index; `_UNKNOWN` for bytes
            between tensors.
    """

    path: str
    offset: int
    size: int
    crc32c: int


class _Stored(NamedTuple):
    """A tensor stored in the checkpoint files, as byte ranges (`slices`). Joined in
    order, the ranges are the bytes of the tensor."""

    dtype: tf.DType
    shape: tuple[int, ...]
    slices: tuple[_StoredSlice, ...]

    @property
    def size(self) -> int:
        """Size of the tensor in bytes."""
        return sum(stored_slice.size for stored_slice in self.slices)

    @property
    def first_position(self) -> tuple[str, int]:
        """The file and the offset of the tensor's first byte; used to sort tensors."""
        return _position(self.slices[0]) if self.slices else ("", 0)


class _Piece(NamedTuple):
    """Some bytes of a stored range, and the memory to read the bytes into.

    Attributes:
        stored_slice: the range of the file to which the piece belongs.
        offset: first byte of the piece in the file.
        memory: destination of the bytes.
    """

    stored_slice: _StoredSlice
    offset: int
    memory: _Bytes


_Key = TypeVar("_Key")

_Part = tuple[_StoredSlice, _Bytes]
"""A tensor slice, and the memory for the bytes of the slice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """The numeric tensors of a checkpoint, read before the restore.

    Attributes:
        prefix: prefix of TensorFlow's files.
        index: index of the checkpoint.
        tensors: the tensors with their memory, by name; a restore removes the used
            tensors.
        sums: size and crc32c of the completely read data files, by path.
    """

    prefix: str
    index: _Index
    tensors: dict[str, tuple[_Stored, _Bytes]]
    sums: Mapping[str, tuple[int, int]]


def read_ahead(prefix: str) -> ReadAhead | None:
    """Reads the numeric tensors of a checkpoint, and the bytes between the tensors, so
    that checksums of whole files are known.

    Returns:
        The tensors and the checksums of the files. None if the tensors have too few
        bytes to be worth several threads. None if the tensors cannot be read; a
        verification of the files then reports the reason.
    """
    try:
        if _size(prefix) < bundle_writer.WORTH_BYTES or not _is_here():
            return None
        bundle.check_size(prefix)
        index = _Index(prefix)
        stored = {
            name: found
            for name in index.names()
            if (found := index.find(name)) is not None and found.size
        }
        # Check the size: an unverified index may claim any number of bytes.
        size = sum(each.size for each in stored.values())
        if not bundle_writer.WORTH_BYTES <= size <= _size(prefix):
            return None
        names = sorted(stored, key=lambda name: stored[name].first_position)
        # Sort in file order: neighbours in a file then become neighbours in memory.
        stored = {name: stored[name] for name in names}
        tensors, sums = _read(stored, has_gaps=True)
    except (*_UNREADABLE, errors.CheckpointError):
        return None
    return ReadAhead(prefix=prefix, index=index, tensors=tensors, sums=sums)


def _size(prefix: str) -> int:
    """Returns the total size of a checkpoint's data files in bytes."""
    return sum(map(os.path.getsize, glob.iglob(glob.escape(prefix) + ".data-*")))


@contextlib.contextmanager
def reading_in_threads(path: str, ahead: ReadAhead | None = None) -> Iterator[None]:
    """Returns a context in which TensorFlow restores from the given files with many
    threads.

    The context patches TensorFlow's `restore_v2`; use it on the main thread. TensorFlow
    still reads by itself from any other file (which another thread may restore), in a
    graph, and for another machine.

    Args:
        path: prefix of TensorFlow's files.
        ahead: tensors of these files, if read before; the restore removes the used
            tensors.

    Raises:
        CheckpointCorruptedError: in the body. A file cannot be read, or its bytes
            differ from the written bytes; no value of the call was assigned.
    """
    if _size(path) < bundle_writer.WORTH_BYTES:
        yield
        return
    restore_v2 = private_api.io_ops.restore_v2

    @functools.cache  # read the index only once: TensorFlow may ask for single tensors
    def index() -> _Index:
        return _Index(path) if ahead is None else ahead.index

    def restore(
        prefix: Any,
        tensor_names: Sequence[str],
        shape_and_slices: Sequence[str],
        dtypes: Sequence[Any],
        name: str | None = None,
    ) -> Any:
        def by_tensorflow(which: Sequence[int]) -> Any:
            asked = (tensor_names, shape_and_slices, dtypes)
            parts = ([each[i] for i in which] for each in asked)
            return restore_v2(prefix, *parts, name=name)

        everything = range(len(tensor_names))
        if not _is_here() or tf.get_static_value(prefix) != path.encode():
            return by_tensorflow(everything)
        with _damage_told(path):
            where = index()
        ready: dict[int, tuple[_Stored, _Bytes]] = {}
        large: dict[int, _Stored] = {}
        for i in everything:
            if shape_and_slices[i]:
                continue
            if ahead is not None and (found := ahead.tensors.get(tensor_names[i])):
                # Remove the entry: the eager tensor will own the memory.
                if found[0].dtype == dtypes[i]:
                    ready[i] = ahead.tensors.pop(tensor_names[i])
            elif (
                (stored := where.find(tensor_names[i])) is not None
                and stored.dtype == dtypes[i]
                and stored.size >= bundle_writer.SMALL_BYTES
            ):
                large[i] = stored
        if sum(each.size for each in large.values()) < bundle_writer.WORTH_BYTES:
            large = {}
        rest = [i for i in everything if i not in large and i not in ready]
        tensors = dict(zip(rest, by_tensorflow(rest), strict=True)) if rest else {}
        if large:
            with _damage_told(path):
                found_large, _ = _read(large)
            ready.update(found_large)
        tensors.update((i, _tensor(*each)) for i, each in ready.items())
        return [tensors[i] for i in everything]

    private_api.io_ops.restore_v2 = restore
    try:
        yield
    finally:
        private_api.io_ops.restore_v2 = restore_v2


@contextlib.contextmanager
def _damage_told(path: str) -> Iterator[None]:
    """Returns a context that turns an OSError into a CheckpointCorruptedError."""
    try:
        yield
    except OSError as error:
        raise errors.CheckpointCorruptedError(
            f"{path!r} could not be read: {error}"
        ) from error


def _is_here() -> bool:
    """Returns whether TensorFlow executes eagerly, with new tensors in the memory of
    this process."""
    if not tf.executing_eagerly():
        return False
    host = private_api.eager_context.context().host_address_space()
    device: str = tf.constant(0).device
    return device.startswith(f"{host}/device:CPU:")


class _Index:
    """The index of a checkpoint: the position of each tensor in the files.

    Args:
        prefix: prefix of TensorFlow's files.

    Raises:
        OSError: the index cannot be read.
    """

    def __init__(self, prefix: str) -> None:
        with file_reading.open_file(prefix + ".index") as file:
            self._entries = dict(bundle.entries(bundle.read(file)))
        self._prefix = prefix
        header = private_api.tensor_bundle.BundleHeaderProto.FromString(
            self._entries[b""]
        )
        self._files = header.num_shards

    def names(self) -> Iterator[str]:
        """Yields the names of the tensors."""
        for key in self._entries:
            if key and not key.startswith(b"\0"):  # skip the header and the slices
                yield key.decode()

    def find(self, name: str) -> _Stored | None:
        """Returns where a tensor is stored. None if the tensor is missing, or its byte
        ranges do not join to the tensor's memory (strings, variants, slices without
        full rows).

        Args:
            name: name of the tensor.
        """
        if (entry := self._entry(name.encode())) is None:
            return None
        dtype = tf.as_dtype(entry.dtype)
        shape = tuple(dim.size for dim in entry.shape.dim)
        parts = self._slices(name, entry) if entry.slices else [entry]
        found = _Stored(
            dtype=dtype, shape=shape, slices=tuple(map(self._stored_slice, parts))
        )
        is_plain = dtype in _KINDS and found.size == math.prod(shape) * dtype.size
        return found if is_plain else None

    def _slices(self, name: str, entry: Any) -> list[Any]:
        """Returns the index entries of a tensor's slices, in row order. A slice without
        full rows, or with a gap before it, is left out, so `find` notices missing
        bytes."""
        parts, rows = [], 0
        for extents in sorted(
            (each.extent for each in entry.slices), key=lambda each: each[0].start
        ):
            first, *others = extents
            key = slice_key(name, first.start, first.length, len(extents))
            has_full_rows = not any(each.HasField("length") for each in others)
            if first.start == rows and has_full_rows and (part := self._entry(key)):
                parts.append(part)
                rows += first.length
        return parts

    def _entry(self, key: bytes) -> Any:
        if (value := self._entries.get(key)) is None:
            return None
        return private_api.tensor_bundle.BundleEntryProto.FromString(value)

    def _stored_slice(self, entry: Any) -> _StoredSlice:
        return _StoredSlice(
            path=data_file(self._prefix, entry.shard_id, self._files),
            offset=entry.offset,
            size=entry.size,
            crc32c=entry.crc32c,
        )


def _read(
    stored: Mapping[_Key, _Stored], *, has_gaps: bool = False
) -> tuple[dict[_Key, tuple[_Stored, _Bytes]], dict[str, tuple[int, int]]]:
    """Reads tensors into new memory, and checks their checksums.

    Args:
        stored: the tensors, by any keys.
        has_gaps: whether to read the bytes between tensors as well, for the checksums
            of whole files.

    Returns:
        The tensors with their memory, by key. Size and crc32c of the completely read
        files, by path; empty without `has_gaps`.

    Raises:
        CheckpointCorruptedError: the bytes of a tensor do not match the index.
    """
    memory = _allocate([each.size for each in stored.values()])
    tensors = dict(zip(stored, zip(stored.values(), memory, strict=True), strict=True))
    parts: list[_Part] = []
    for tensor, data in tensors.values():
        begin = 0
        for stored_slice in tensor.slices:
            parts.append((stored_slice, data[begin : begin + stored_slice.size]))
            begin += stored_slice.size
    if has_gaps:
        parts += _gaps([stored_slice for stored_slice, _ in parts])
    jobs = list(_jobs(parts))
    threads = bundle_writer.THREADS
    crcs = map_in_threads(_read_job, jobs, threads=threads, name="tfpreempt-read")
    sums: dict[_StoredSlice, checksum.ChecksumWriter] = {}
    for job, found in zip(jobs, crcs, strict=True):
        for piece, crc in zip(job, found, strict=True):
            whole = sums.setdefault(piece.stored_slice, checksum.ChecksumWriter())
            whole.append(crc, piece.memory.nbytes)
    files: dict[str, checksum.ChecksumWriter] = {}
    for stored_slice, whole in sums.items():
        if stored_slice.crc32c not in (_UNKNOWN, bundle.masked(whole.crc32c)):
            raise errors.CheckpointCorruptedError(
                f"{stored_slice.path!r} is corrupt: the checksum of the "
                f"{stored_slice.size} bytes from byte {stored_slice.offset} on differs "
                "from the checksum in the index"
            )
        file = files.setdefault(stored_slice.path, checksum.ChecksumWriter())
        if file.size == stored_slice.offset:
            file.append(whole.crc32c, whole.size)
    return tensors, {
        path: (file.size, file.crc32c)
        for path, file in files.items()
        if has_gaps and file.size == os.path.getsize(path)
    }


def _gaps(slices: Sequence[_StoredSlice]) -> list[_Part]:
    """Returns the byte ranges between tensors, and from the last tensor to the end of a
    file, with memory to read the bytes into."""
    ends = [
        _StoredSlice(path=path, offset=os.path.getsize(path), size=0, crc32c=_UNKNOWN)
        for path in {each.path for each in slices}
    ]
    gaps: list[_Part] = []
    path, end = "", 0
    for each in sorted([*slices, *ends], key=_position):
        end = end if each.path == path else 0
        path = each.path
        # A larger gap is not read; the checksum of the file then stays unknown.
        if 0 < (size := each.offset - end) <= _JOB_BYTES:
            gap = _StoredSlice(path=path, offset=end, size=size, crc32c=_UNKNOWN)
            gaps.append((gap, np.empty(size, np.uint8)))
        end = each.offset + each.size
    return gaps


def _jobs(parts: Sequence[_Part]) -> Iterator[list[_Piece]]:
    """Yields jobs: lists of pieces, in file order. A job reads from a single file.

    Args:
        parts: byte ranges, and the memory to read the bytes into.
    """
    job: list[_Piece] = []
    size = 0
    for stored_slice, memory in sorted(parts, key=lambda each: _position(each[0])):
        for start in range(0, stored_slice.size, _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
            if job and (
                size >= _JOB_BYTES or job[0].stored_slice.path != stored_slice.path
            ):
                yield job
                job, size = [], 0
            job.append(_Piece(stored_slice, stored_slice.offset + start, piece))
            size += piece.nbytes
    if job:
        yield job


def _position(stored_slice: _StoredSlice) -> tuple[str, int]:
    return stored_slice.path, stored_slice.offset


def _read_job(job: Sequence[_Piece]) -> list[int]:
    """Fills the memory of a job's pieces. Called on any thread. Returns the crc32c of
    every piece, in order."""
    path, crcs = job[0].stored_slice.path, []
    with file_reading.open_file(path) as file:
        for together in _neighbours(job):
            have = _fill(file, [each.memory for each in together], together[0].offset)
            for each in together:
                memory, offset = each.memory, each.offset
                while have < memory.nbytes:  # a read may return fewer bytes
                    if not (more := _fill(file, [memory[have:]], offset + have)):
                        raise errors.CheckpointCorruptedError(
                            f"{path!r} is incomplete: the file ends within a tensor"
                        )
                    have += more
                have -= memory.nbytes
                crcs.append(checksum.extended(0, memory))
    return crcs


def _fill(file: IO[bytes], memory: Sequence[_Bytes], offset: int) -> int:
    """Reads bytes into buffers, from an offset of the file. Returns the number of bytes
    read; 0 at the end of the file."""
    # Any: the type hints of NumPy 1 do not declare arrays as buffers.
    buffers: Any = memory
    return os.preadv(file.fileno(), buffers, offset)


def _neighbours(job: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yields groups of adjacent pieces to be read by a single call: at most as many as
    fit in the cache."""
    together: list[_Piece] = []
    size = 0
    for each in job:
        nbytes = each.memory.nbytes
        is_next = together and together[0].offset + size == each.offset
        if not is_next or size + nbytes > _PIECE_BYTES or len(together) == _MANY:
            if together:
                yield together
            together, size = [], 0
        together.append(each)
        size += nbytes
    yield together


def _allocate(sizes: Sequence[int]) -> list[_Bytes]:
    """Returns new memory for some tensors, aligned like TensorFlow's memory.

    Several tensors are slices of a single allocation, freed together with the last
    tensor. Small tensors do not share with large tensors: a small variable that is
    never assigned again would keep the large memory.

    The memory has small pages, as TensorFlow's memory has. Large pages, if available,
    are cleared five times faster. But clearing takes seven times as long if a virtual
    machine has returned the memory to its host.
    """
    spaces = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
    left, memory = sum(spaces), []
    rooms = dict.fromkeys((_SMALL_BLOCK_BYTES, _JOB_BYTES), np.empty(0, np.uint8))
    for size, space in zip(sizes, spaces, strict=True):
        is_small = size < bundle_writer.SMALL_BYTES
        block = _SMALL_BLOCK_BYTES if is_small else _JOB_BYTES
        if rooms[block].nbytes < space:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, max(space, min(left, block)), flags=flags)
            rooms[block] = np.frombuffer(pages, np.uint8)
        memory.append(rooms[block][:size])
        rooms[block], left = rooms[block][space:], left - space
    return memory


def _tensor(stored: _Stored, data: _Bytes) -> tf.Tensor:
    """Returns an eager tensor that uses the given memory without a copy."""
    is_bfloat16 = stored.dtype == tf.bfloat16  # a type unknown to NumPy
    kind = np.uint16 if is_bfloat16 else stored.dtype.as_numpy_dtype
    array = data.view(kind).reshape(stored.shape)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if is_bfloat16 else tensor
