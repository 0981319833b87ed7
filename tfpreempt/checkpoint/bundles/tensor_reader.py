"""Reads the tensors of a checkpoint with many threads; needs no TensorFlow.

Several threads read the data files in pieces, and compute the checksum of a piece while
the piece is still in the processor's cache. Tensors are returned only after every byte
was read and all checksums matched. `bundle_writer.py` names the definition of the file
format.
"""

from __future__ import annotations

import glob
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle, bundle_writer
from tfpreempt.checkpoint.bundles.bundle import TensorEntry
from tfpreempt.checkpoint.bundles.bundle_writer import data_file, slice_key
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, file_reading

_PIECE_BYTES = 1 << 19  # small enough to be still in the cache for its checksum
# Bytes that a thread reads in one job. A large tensor is divided into many jobs.
_JOB_BYTES = 1 << 24
_SMALL_BLOCK_BYTES = 1 << 16  # bytes of a memory block shared by small tensors
UNREADABLE = (OSError, ValueError, LookupError, TypeError, OverflowError, struct.error)
"""Errors raised for a corrupt index or an unreadable file."""
_UNKNOWN = -1  # the index has no crc32c for the bytes between tensors
_MANY = 512  # buffers filled by a single preadv() call; the kernel allows 1,024
_ALIGNED_BYTES = 64  # alignment of TensorFlow's own memory (EIGEN_MAX_ALIGN_BYTES)
_HALF = 2  # bytes of a bfloat16, a type unknown to NumPy alone

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _item_size(dtype: int) -> int | None:
    """Returns the size of an element in bytes; None if the dtype is not plain memory.

    Args:
        dtype: number in TensorFlow's DataType.
    """
    if (name := bundle.DTYPES.get(dtype)) is None:
        return None
    if name.startswith("float8"):
        return 1
    return _HALF if name == "bfloat16" else np.dtype(name).itemsize


class _StoredSlice(NamedTuple):
    """A range of bytes in a data file: a whole tensor, some rows of a tensor, or bytes
    between two tensors.

    Attributes:
        path: path of the data file.
        offset: offset of the first byte in the file.
        size: size in bytes.
        crc32c: masked checksum of the bytes, from the index; `_UNKNOWN` for bytes
            between tensors.
    """

    path: str
    offset: int
    size: int
    crc32c: int


class Stored(NamedTuple):
    """The location of a tensor: byte ranges in the data files of a checkpoint.

    Attributes:
        dtype: number in TensorFlow's DataType.
        shape: dimensions of the tensor.
        slices: the byte ranges; joined in this order, they are the tensor's bytes.
    """

    dtype: int
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
    """A piece of a byte range in a file, and the memory for the bytes of the piece.

    Attributes:
        stored_slice: the byte range to which the piece belongs.
        offset: offset of the first byte of the piece in the file.
        memory: memory into which the bytes are read; as large as the piece.
    """

    stored_slice: _StoredSlice
    offset: int
    memory: Bytes


_Key = TypeVar("_Key")

_Part = tuple[_StoredSlice, Bytes]
"""A byte range of a file, and the memory into which its bytes are read."""


def data_size(prefix: str) -> int:
    """Returns the total size of a checkpoint's data files in bytes."""
    return sum(map(os.path.getsize, glob.iglob(glob.escape(prefix) + ".data-*")))


class Index:
    """The index of a checkpoint, which gives the position of each tensor in the files.

    Args:
        prefix: path prefix of the checkpoint's files; reads `<prefix>.index`.

    Raises:
        OSError: the index cannot be read.
    """

    def __init__(self, prefix: str) -> None:
        with file_reading.open_file(prefix + ".index") as file:
            self._entries = dict(bundle.entries(bundle.read(file)))
        self._prefix = prefix
        self._files = bundle.num_shards(self._entries[b""])

    def names(self) -> Iterator[str]:
        """Yields the names of the tensors."""
        for key in self._entries:
            if key and not key.startswith(b"\0"):  # skip the header and the slices
                yield key.decode()

    def find(self, name: str) -> Stored | None:
        """Returns the location of a tensor. None if the tensor is missing, or if its
        stored bytes are not the bytes of the tensor in memory (strings, variants,
        slices without full rows).

        Args:
            name: name of the tensor.
        """
        if (entry := self._entry(name.encode())) is None:
            return None
        parts = self._slices(name, entry) if entry.slices else [entry]
        found = Stored(
            dtype=entry.dtype,
            shape=entry.shape,
            slices=tuple(map(self._stored_slice, parts)),
        )
        item = _item_size(entry.dtype)
        is_plain = item is not None and found.size == math.prod(entry.shape) * item
        return found if is_plain else None

    def _slices(self, name: str, entry: TensorEntry) -> list[TensorEntry]:
        """Returns the index entries of a tensor's slices, in row order. Leaves out a
        slice without full rows, and a slice after a gap: the result then has fewer
        bytes than the tensor, and `find` returns None."""
        parts, rows = [], 0
        for (start, length), *others in sorted(
            entry.slices, key=lambda axes: axes[0][0]
        ):
            has_full_rows = all(size is None for _, size in others)
            if start != rows or length is None or not has_full_rows:
                continue
            key = slice_key(name, start, length, 1 + len(others))
            if (part := self._entry(key)) is not None:
                parts.append(part)
                rows += length
        return parts

    def _entry(self, key: bytes) -> TensorEntry | None:
        value = self._entries.get(key)
        return None if value is None else TensorEntry.parse(value)

    def _stored_slice(self, entry: TensorEntry) -> _StoredSlice:
        return _StoredSlice(
            path=data_file(self._prefix, entry.shard, self._files),
            offset=entry.offset,
            size=entry.size,
            crc32c=entry.crc32c,
        )


def read_all(
    prefix: str,
) -> tuple[Index, dict[str, tuple[Stored, Bytes]], dict[str, tuple[int, int]]]:
    """Reads every tensor of a checkpoint that is plain memory, and compares the
    checksums with the index. Skips strings, variants, and slices without full rows.

    Args:
        prefix: path prefix of the checkpoint's files.

    Returns:
        The index; and the two dicts of `read`, the first one by names of tensors.

    Raises:
        CheckpointCorruptedError: the bytes of a tensor do not match the index.
        Exception: one of `UNREADABLE`: a file cannot be read, or the index is corrupt.
    """
    bundle.check_size(prefix)
    index = Index(prefix)
    found = [(name, index.find(name)) for name in index.names()]
    stored = [(name, tensor) for name, tensor in found if tensor is not None]
    # Check the size: an unverified index may claim any number of bytes.
    if sum(tensor.size for _, tensor in stored) > data_size(prefix):
        raise ValueError("the index claims more bytes than the data files have")
    # Sort in file order: neighbours in a file then become neighbours in memory.
    stored.sort(key=lambda each: each[1].first_position)
    return index, *read(dict(stored), has_gaps=True)


def read(
    stored: Mapping[_Key, Stored], *, has_gaps: bool = False
) -> tuple[dict[_Key, tuple[Stored, Bytes]], dict[str, tuple[int, int]]]:
    """Reads tensors into new memory, and compares the checksums with the index.

    Args:
        stored: locations of the tensors, by any keys.
        has_gaps: whether to read the bytes between tensors as well, so that the
            checksums of whole files are known.

    Returns:
        Two dicts. The first has the keys of `stored`: the location and the bytes of
        each tensor. The second has the paths of the files that were read completely:
        size and crc32c of each file; it is empty without `has_gaps`.

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
    """Returns the byte ranges between tensors (`slices`), and from the last tensor to
    the end of the file, with new memory for the bytes."""
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
    """Yields jobs. A job is a list of pieces of a single file, in the order of the
    file; a single thread reads the job.

    Args:
        parts: byte ranges, and the memory for the bytes.
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
    """Reads the pieces of a job into memory. Called on any thread. Returns the crc32c
    of every piece, in the order of the pieces."""
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


def _fill(file: IO[bytes], memory: Sequence[Bytes], offset: int) -> int:
    """Reads bytes of a file, from `offset` on, into several buffers in order. Returns
    the number of bytes read, which may be fewer than the buffers hold; 0 at the end of
    the file."""
    # Any: the type hints of NumPy 1 do not declare arrays as buffers.
    buffers: Any = memory
    return os.preadv(file.fileno(), buffers, offset)


def _neighbours(job: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yields groups of adjacent pieces. A single system call reads a group, and the
    bytes of a group fit in the processor's cache."""
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


def _allocate(sizes: Sequence[int]) -> list[Bytes]:
    """Returns new memory for each of some tensors, aligned like TensorFlow's memory.

    Several tensors use a single allocation, which is freed when the last of the tensors
    is freed. Small tensors never share an allocation with large tensors: otherwise a
    small variable that is never assigned again would keep the whole allocation.

    The memory has small pages, like TensorFlow's memory. The kernel clears large pages,
    if available, five times faster; but if a virtual machine has returned the memory to
    the host, clearing large pages takes seven times as long.
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
