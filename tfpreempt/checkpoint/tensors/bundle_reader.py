"""The large tensors of a checkpoint, read by many threads where TensorFlow has one.

TensorFlow's RestoreV2 reads one tensor after the other. Here each thread reads
stretches of the files, and sums up each piece while it is in the processor's cache. A
variable then takes that memory as it is. What is small or special is left to
TensorFlow.

Nothing is given back before all of it was read and its checksums were right, so nothing
of a damaged file is assigned. A chief that verifies a commit keeps the tensors until
the restore (`read_ahead`), so that the files are read once. The format's source is the
same as in `bundle_writer`.
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
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, reading

_PIECE_BYTES = 1 << 19  # so that it is in the cache still when it was read
_JOB_BYTES = 1 << 24  # so that one large tensor keeps all threads busy
_SMALL_BLOCK_BYTES = 1 << 16  # of memory that small tensors share
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, OverflowError),
    *(struct.error, DecodeError),
)
"""What an index that is damaged, and a file that cannot be read, may raise."""
_UNKNOWN = -1  # the crc32c of bytes that are no tensor which is read here
_MANY = 512  # buffers that one call fills; the limit of the kernel is 1,024
_ALIGNED_BYTES = 64  # as TensorFlow's own memory (EIGEN_MAX_ALIGN_BYTES)

_WHOLE = (tf.int8, tf.int16, tf.int32, tf.int64)
_NATURAL = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_KINDS = (*_WHOLE, *_NATURAL, *_FLOATS, tf.complex64, tf.complex128)
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Stretch(NamedTuple):
    """A part of a tensor, in the file.

    Attributes:
        path: the data file.
        offset: where in it the stretch begins, in bytes.
        size: in bytes.
        crc32c: of its bytes, as the index has it.
    """

    path: str
    offset: int
    size: int
    crc32c: int


class _Stored(NamedTuple):
    """A tensor in the files: its stretches, one behind the other, are its memory."""

    dtype: tf.DType
    shape: tuple[int, ...]
    stretches: tuple[_Stretch, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(stretch.size for stretch in self.stretches)

    @property
    def first_position(self) -> tuple[str, int]:
        """The file and the offset of the first stretch."""
        return _position(self.stretches[0]) if self.stretches else ("", 0)


class _Piece(NamedTuple):
    """Some bytes of a stretch, and the memory that they are read into.

    Attributes:
        stretch: the stretch.
        offset: of the piece, in the file.
        memory: of the piece.
    """

    stretch: _Stretch
    offset: int
    memory: _Bytes


_Key = TypeVar("_Key")

_Part = tuple[_Stretch, _Bytes]
"""A stretch, and the memory that it is read into."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """The numeric tensors of a checkpoint, read before the restore.

    Attributes:
        prefix: of TensorFlow's files.
        index: of the checkpoint.
        tensors: each tensor and its memory, by name; a restore takes them out.
        sums: size and crc32c of the data files of which all bytes were read, by path.
    """

    prefix: str
    index: _Index
    tensors: dict[str, tuple[_Stored, _Bytes]]
    sums: Mapping[str, tuple[int, int]]


def read_ahead(prefix: str) -> ReadAhead | None:
    """Reads the numeric tensors of a checkpoint, and all bytes around them.

    Returns:
        The tensors and the sums of the files. None if the tensors are too few to be
        worth it, or if they cannot be read: a verification of the files says why.
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
        # An index that is not verified may claim any number of bytes.
        size = sum(each.size for each in stored.values())
        if not bundle_writer.WORTH_BYTES <= size <= _size(prefix):
            return None
        names = sorted(stored, key=lambda name: stored[name].first_position)
        stored = {name: stored[name] for name in names}  # neighbours share memory
        tensors, sums = _read(stored, has_gaps=True)
    except (*_UNREADABLE, errors.CheckpointError):
        return None
    return ReadAhead(prefix=prefix, index=index, tensors=tensors, sums=sums)


def _size(prefix: str) -> int:
    """Bytes of all data files."""
    return sum(map(os.path.getsize, glob.iglob(glob.escape(prefix) + ".data-*")))


@contextlib.contextmanager
def reading_in_threads(path: str, ahead: ReadAhead | None = None) -> Iterator[None]:
    """What is restored from these files in the body is read by many threads.

    Main thread. What other threads restore meanwhile, from other files, is read as
    ever, and so is all that a graph reads, or another machine.

    Args:
        path: the prefix of TensorFlow's files.
        ahead: the tensors of these files that were read before; they are taken out.

    Raises:
        CheckpointDamagedError: out of the body. A file cannot be read, or its bytes
            are not those that were written; nothing of it was assigned.
    """
    if _size(path) < bundle_writer.WORTH_BYTES:
        yield
        return
    restore_v2 = seams.io_ops.restore_v2

    @functools.cache  # TensorFlow may ask for tensors one by one
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
                if found[0].dtype == dtypes[i]:  # as an eager tensor, once
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

    seams.io_ops.restore_v2 = restore
    try:
        yield
    finally:
        seams.io_ops.restore_v2 = restore_v2


@contextlib.contextmanager
def _damage_told(path: str) -> Iterator[None]:
    """What the body cannot read is damage of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise errors.CheckpointDamagedError(
            f"{path!r} could not be read: {error}"
        ) from error


def _is_here() -> bool:
    """Whether what is made now is made at once, and in the memory of this process."""
    if not tf.executing_eagerly():
        return False
    host = seams.eager_context.context().host_address_space()
    device: str = tf.constant(0).device
    return device.startswith(f"{host}/device:CPU:")


class _Index:
    """What the index of a checkpoint says of its tensors.

    Args:
        prefix: of TensorFlow's files.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, prefix: str) -> None:
        with reading.open_file(prefix + ".index") as file:
            self._entries = dict(bundle.entries(bundle.read(file)))
        self._prefix = prefix
        header = seams.tensor_bundle.BundleHeaderProto.FromString(self._entries[b""])
        self._files = header.num_shards

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        for key in self._entries:
            if key and not key.startswith(b"\0"):  # the header, and slices
                yield key.decode()

    def find(self, name: str) -> _Stored | None:
        """Where a tensor lies; None if its stretches are not its memory, in order."""
        if (entry := self._entry(name.encode())) is None:
            return None
        dtype = tf.as_dtype(entry.dtype)
        shape = tuple(dim.size for dim in entry.shape.dim)
        parts = self._slices(name, entry) if entry.slices else [entry]
        found = _Stored(
            dtype=dtype, shape=shape, stretches=tuple(map(self._stretch, parts))
        )
        is_plain = dtype in _KINDS and found.size == math.prod(shape) * dtype.size
        return found if is_plain else None

    def _slices(self, name: str, entry: Any) -> list[Any]:
        """The entries of its slices; fewer than all if one is no stretch of rows."""
        parts, rows = [], 0
        for extents in sorted(
            (each.extent for each in entry.slices), key=lambda each: each[0].start
        ):
            first, *others = extents
            key = slice_key(name, first.start, first.length, len(extents))
            is_whole = not any(each.HasField("length") for each in others)
            if first.start == rows and is_whole and (part := self._entry(key)):
                parts.append(part)
                rows += first.length
        return parts

    def _entry(self, key: bytes) -> Any:
        if (value := self._entries.get(key)) is None:
            return None
        return seams.tensor_bundle.BundleEntryProto.FromString(value)

    def _stretch(self, entry: Any) -> _Stretch:
        return _Stretch(
            path=data_file(self._prefix, entry.shard_id, self._files),
            offset=entry.offset,
            size=entry.size,
            crc32c=entry.crc32c,
        )


def _read(
    stored: Mapping[_Key, _Stored], *, has_gaps: bool = False
) -> tuple[dict[_Key, tuple[_Stored, _Bytes]], dict[str, tuple[int, int]]]:
    """Reads tensors.

    Args:
        stored: the tensors, by any keys.
        has_gaps: whether to read also the bytes between the tensors, for the sums.

    Returns:
        The tensors, whose checksums are right, and their memory. Size and crc32c of the
        files of which all bytes were read, by path.

    Raises:
        CheckpointDamagedError: a tensor is not as the index says.
    """
    memory = _allocate([each.size for each in stored.values()])
    tensors = dict(zip(stored, zip(stored.values(), memory, strict=True), strict=True))
    parts: list[_Part] = []
    for tensor, data in tensors.values():
        begin = 0
        for stretch in tensor.stretches:
            parts.append((stretch, data[begin : begin + stretch.size]))
            begin += stretch.size
    if has_gaps:
        parts += _gaps([stretch for stretch, _ in parts])
    jobs = list(_jobs(parts))
    threads = bundle_writer.THREADS
    crcs = map_in_threads(_read_job, jobs, threads=threads, name="tfpreempt-read")
    sums: dict[_Stretch, checksum.Sum] = {}
    for job, found in zip(jobs, crcs, strict=True):
        for piece, crc in zip(job, found, strict=True):
            whole = sums.setdefault(piece.stretch, checksum.Sum())
            whole.append(crc, piece.memory.nbytes)
    files: dict[str, checksum.Sum] = {}
    for stretch, whole in sums.items():
        if stretch.crc32c not in (_UNKNOWN, bundle.masked(whole.crc32c)):
            raise errors.CheckpointDamagedError(
                f"{stretch.path!r} is damaged: the {stretch.size} bytes from byte "
                f"{stretch.offset} on have another checksum than the index says"
            )
        file = files.setdefault(stretch.path, checksum.Sum())
        if file.size == stretch.offset:
            file.append(whole.crc32c, whole.size)
    return tensors, {
        path: (file.size, file.crc32c)
        for path, file in files.items()
        if has_gaps and file.size == os.path.getsize(path)
    }


def _gaps(stretches: Sequence[_Stretch]) -> list[_Part]:
    """What lies between some stretches, and behind them to the end of the files."""
    ends = [
        _Stretch(path=path, offset=os.path.getsize(path), size=0, crc32c=_UNKNOWN)
        for path in {each.path for each in stretches}
    ]
    gaps: list[_Part] = []
    path, end = "", 0
    for each in sorted([*stretches, *ends], key=_position):
        end = end if each.path == path else 0
        path = each.path
        if 0 < (size := each.offset - end) <= _JOB_BYTES:  # else the sum is not known
            gap = _Stretch(path=path, offset=end, size=size, crc32c=_UNKNOWN)
            gaps.append((gap, np.empty(size, np.uint8)))
        end = each.offset + each.size
    return gaps


def _jobs(parts: Sequence[_Part]) -> Iterator[list[_Piece]]:
    """The pieces of all stretches, in the order of the files, job by job.

    Args:
        parts: stretches, and the memory that they are read into.
    """
    job: list[_Piece] = []
    size = 0
    for stretch, memory in sorted(parts, key=lambda each: _position(each[0])):
        for start in range(0, stretch.size, _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
            if job and (size >= _JOB_BYTES or job[0].stretch.path != stretch.path):
                yield job
                job, size = [], 0
            job.append(_Piece(stretch, stretch.offset + start, piece))
            size += piece.nbytes
    if job:
        yield job


def _position(stretch: _Stretch) -> tuple[str, int]:
    return stretch.path, stretch.offset


def _read_job(job: Sequence[_Piece]) -> list[int]:
    """Fills the memory; returns the crc32c of each piece. Any thread."""
    path, crcs = job[0].stretch.path, []
    with reading.open_file(path) as file:
        for together in _neighbours(job):
            have = _fill(file, [each.memory for each in together], together[0].offset)
            for each in together:
                memory, offset = each.memory, each.offset
                while have < memory.nbytes:  # a file system may give less than it has
                    if not (more := _fill(file, [memory[have:]], offset + have)):
                        raise errors.CheckpointDamagedError(
                            f"{path!r} is damaged: it ends within a tensor"
                        )
                    have += more
                have -= memory.nbytes
                crcs.append(checksum.extended(0, memory))
    return crcs


def _fill(file: IO[bytes], memory: Sequence[_Bytes], offset: int) -> int:
    """Reads from an offset on; returns the number of bytes, 0 at the file's end."""
    buffers: Any = memory  # the types of NumPy 1 don't say that an array is a buffer
    return os.preadv(file.fileno(), buffers, offset)


def _neighbours(job: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that lie one behind the other, so many as the cache holds."""
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
    """Fresh memory for each size, aligned as TensorFlow's.

    Tensors share an allocation, which is freed with the last of them; small tensors
    share a small allocation, as a variable that is never assigned again keeps it. The
    memory has small pages, as TensorFlow's: the kernel clears large pages in a fifth of
    the time if it has some, and in seven times the time if a virtual machine has given
    the memory back to its host.
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
    """A tensor with this memory, which nobody else has."""
    is_bfloat16 = stored.dtype == tf.bfloat16  # which NumPy doesn't have
    kind = np.uint16 if is_bfloat16 else stored.dtype.as_numpy_dtype
    array = data.view(kind).reshape(stored.shape)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if is_bfloat16 else tensor
