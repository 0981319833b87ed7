"""Reads the tensors of a checkpoint with many threads; needs no TensorFlow.

Several threads read the data files in pieces, and compute the checksum of a piece while
the piece is still in the processor's cache. Tensors are returned only after every byte
was read and all checksums matched. `bundle_writer` names the source of the file format.
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
    """Returns the bytes of a number of a dtype; None if the dtype is not plain memory.

    Args:
        dtype: number in TensorFlow's DataType.
    """
    if (name := bundle.DTYPES.get(dtype)) is None:
        return None
    if name.startswith("float8"):
        return 1
    return _HALF if name == "bfloat16" else np.dtype(name).itemsize


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


class Stored(NamedTuple):
    """A tensor stored in the checkpoint files, as byte ranges.

    Attributes:
        dtype: number in TensorFlow's DataType.
        shape: dimensions.
        slices: the ranges; joined in order, they are the bytes of the tensor.
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
    """Some bytes of a stored range, and the memory to read the bytes into.

    Attributes:
        stored_slice: the range of the file to which the piece belongs.
        offset: first byte of the piece in the file.
        memory: destination of the bytes.
    """

    stored_slice: _StoredSlice
    offset: int
    memory: Bytes


_Key = TypeVar("_Key")

_Part = tuple[_StoredSlice, Bytes]
"""A tensor slice, and the memory for the bytes of the slice."""


def data_size(prefix: str) -> int:
    """Returns the total size of a checkpoint's data files in bytes."""
    return sum(map(os.path.getsize, glob.iglob(glob.escape(prefix) + ".data-*")))


class Index:
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
        self._files = bundle.num_shards(self._entries[b""])

    def names(self) -> Iterator[str]:
        """Yields the names of the tensors."""
        for key in self._entries:
            if key and not key.startswith(b"\0"):  # skip the header and the slices
                yield key.decode()

    def find(self, name: str) -> Stored | None:
        """Returns where a tensor is stored. None if the tensor is missing, or its byte
        ranges do not join to the tensor's memory (strings, variants, slices without
        full rows).

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
        """Returns the index entries of a tensor's slices, in row order. A slice without
        full rows, or with a gap before it, is left out, so `find` notices missing
        bytes."""
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


def read(
    stored: Mapping[_Key, Stored], *, has_gaps: bool = False
) -> tuple[dict[_Key, tuple[Stored, Bytes]], dict[str, tuple[int, int]]]:
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


def _fill(file: IO[bytes], memory: Sequence[Bytes], offset: int) -> int:
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


def _allocate(sizes: Sequence[int]) -> list[Bytes]:
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
