"""The large tensors of a checkpoint, read by many threads where TensorFlow has one.

TensorFlow's RestoreV2 reads one tensor after the other into memory of small pages. Here
each thread reads stretches of the files into memory of large pages, which is dear to
get otherwise, and sums up each piece while it is in the processor's cache. A variable
then takes that memory as it is. What is small or special is left to TensorFlow.

Nothing is given back before all of it was read and its checksums were right, so nothing
of a damaged file is assigned. The format's source is the same as in `bundle_writer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state import bundle
from tfpreempt.checkpoint.tensors import bundle_writer
from tfpreempt.checkpoint.tensors.bundle_writer import data_file, slice_key
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, reading

_PIECE_BYTES = 1 << 19  # so that it is in the cache still when it was read
_JOB_BYTES = 1 << 24  # so that one large tensor keeps all threads busy
_ALIGNED_BYTES = 64  # as TensorFlow's own memory (EIGEN_MAX_ALIGN_BYTES)

_WHOLE = (tf.int8, tf.int16, tf.int32, tf.int64)
_NATURAL = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_KINDS = (*_WHOLE, *_NATURAL, *_FLOATS, tf.complex64, tf.complex128)
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in the files: its stretches, one behind the other, are its memory."""

    dtype: tf.DType
    shape: tuple[int, ...]
    stretches: tuple[_Stretch, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(stretch.size for stretch in self.stretches)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Some bytes of a stretch, and the memory that they are read into."""

    stretch: _Stretch
    start: int
    memory: _Bytes


@contextlib.contextmanager
def reading_in_threads(path: str) -> Iterator[None]:
    """What is restored from these files in the body is read by many threads.

    Main thread. What other threads restore meanwhile, from other files, is read as
    ever, and so is all that a graph reads, or another machine.

    Args:
        path: the prefix of TensorFlow's files.

    Raises:
        CheckpointDamagedError: out of the body. A file cannot be read, or its bytes
            are not those that were written; nothing of it was assigned.
    """
    data = glob.iglob(glob.escape(path) + ".data-*")
    if sum(map(os.path.getsize, data)) < bundle_writer.WORTH_BYTES:
        yield
        return
    restore_v2 = seams.io_ops.restore_v2

    @functools.cache  # TensorFlow may ask for tensors one by one
    def index() -> _Index:
        return _Index(path)

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
        large = {
            i: found
            for i in everything
            if not shape_and_slices[i]
            and (found := where.find(tensor_names[i])) is not None
            and found.dtype == dtypes[i]
            and found.size >= bundle_writer.SMALL_BYTES
        }
        if sum(each.size for each in large.values()) < bundle_writer.WORTH_BYTES:
            return by_tensorflow(everything)
        rest = [i for i in everything if i not in large]
        tensors = dict(zip(rest, by_tensorflow(rest), strict=True)) if rest else {}
        with _damage_told(path):
            tensors.update(zip(large, _read(list(large.values())), strict=True))
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


def _read(stored: Sequence[_Stored]) -> list[tf.Tensor]:
    """The tensors, once all of them were read and are right.

    Raises:
        CheckpointDamagedError: they are not.
    """
    memory = [_aligned(each.size) for each in stored]
    jobs = []
    for tensor, data in zip(stored, memory, strict=True):
        begin = 0
        for stretch in tensor.stretches:
            part = data[begin:][: stretch.size]
            jobs += [
                _Job(stretch=stretch, start=start, memory=part[start:][:_JOB_BYTES])
                for start in range(0, stretch.size, _JOB_BYTES)
            ]
            begin += stretch.size
    threads = bundle_writer.THREADS
    crcs = map_in_threads(_read_job, jobs, threads=threads, name="tfpreempt-read")
    sums: dict[_Stretch, checksum.Sum] = {}
    for job, crc in zip(jobs, crcs, strict=True):
        sums.setdefault(job.stretch, checksum.Sum()).append(crc, job.memory.nbytes)
    for stretch, whole in sums.items():
        if bundle.masked(whole.crc32c) != stretch.crc32c:
            raise errors.CheckpointDamagedError(
                f"{stretch.path!r} is damaged: the {stretch.size} bytes from byte "
                f"{stretch.offset} on have another checksum than the index says"
            )
    return [_tensor(each, data) for each, data in zip(stored, memory, strict=True)]


def _read_job(job: _Job) -> int:
    """Fills the memory; returns the crc32c of what was read. Any thread."""
    crc, path = 0, job.stretch.path
    with open(path, "rb", buffering=0) as file:
        file.seek(job.stretch.offset + job.start)
        for start in range(0, job.memory.nbytes, _PIECE_BYTES):
            piece = job.memory[start:][:_PIECE_BYTES]
            have = 0
            while have < piece.nbytes:
                if not (count := file.readinto(piece[have:].data)):
                    raise errors.CheckpointDamagedError(
                        f"{path!r} is damaged: it ends within a tensor"
                    )
                have += count
            crc = checksum.extended(crc, piece)
    return crc


def _aligned(size: int) -> _Bytes:
    """Fresh memory; NumPy asks for large pages where it is large."""
    memory = np.empty(size + _ALIGNED_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNED_BYTES
    return memory[start : start + size]


def _tensor(stored: _Stored, data: _Bytes) -> tf.Tensor:
    """A tensor with this memory, which nobody else has."""
    is_bfloat16 = stored.dtype == tf.bfloat16  # which NumPy doesn't have
    kind = np.uint16 if is_bfloat16 else stored.dtype.as_numpy_dtype
    array = data.view(kind).reshape(stored.shape)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if is_bfloat16 else tensor
