"""Adds large tensors to a checkpoint that TensorFlow has written, by many threads.

TensorFlow writes in one thread and copies each tensor on the way, and what the sums of
its files are is known when they have been read again. Here each thread has a data file
of its own, as two that write into one wait for each other. It writes the memory of the
tensors as it is, and sums up each piece just after it has written that, when it is in
the processor's cache: this costs half of what it does before.

A data file is the bytes of its tensors, one behind the other. The index is TensorFlow's
with more entries, and the names of the files count all of them. The format's source is
tensorflow/core/util/tensor_bundle/tensor_bundle.h and .cc.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint import bundle_table
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.files import Files

THREADS = min(4, os.cpu_count() or 1)  # that write, each a file of its own, or read
SMALL_BYTES = 1 << 14  # of a tensor that TensorFlow writes and reads as fast
WORTH_BYTES = 1 << 25  # of all larger ones: less is not worth threads of their own
_PIECE_BYTES = 1 << 19  # so that it is in the cache still when it was written
_PIECE_BYTES_ASYNC = 1 << 23
"""While training goes on. Between two pieces a thread needs Python's lock, for which it
and the training wait in turn, so there are fewer pieces."""
_UNEVEN = 0.05  # of a share: less than that is worth no cut
_PATIENCE_SECONDS = 10.0  # for the other threads to leave, where one has failed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """A tensor that is its memory: all but strings, resources and variants.

    Attributes:
        name: its key in the checkpoint.
        dtype: a number of TensorFlow's DataType.
        shape: its dimensions.
        data: its bytes, one after the other; nobody changes them.
        can_be_cut: whether TensorFlow puts it together again if it lies in slices.
        is_shared: whether something else may have the same memory.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    can_be_cut: bool
    is_shared: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Some rows of a tensor, along its first axis; mostly all of it.

    Attributes:
        tensor: the tensor.
        start: its first row.
        rows: how many; None for all of a tensor that is not cut.
    """

    tensor: DenseTensor
    start: int = 0
    rows: int | None = None

    @property
    def data(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self.rows is None:
            return self.tensor.data
        row_bytes = self.tensor.data.nbytes // self.tensor.shape[0]
        return self.tensor.data[self.start * row_bytes :][: self.rows * row_bytes]

    def cut(self, nbytes: int) -> list[_Stretch]:
        """In two, the first of which has so many bytes, about; or as it is."""
        if not self.tensor.can_be_cut or not self.tensor.shape or not self.data.nbytes:
            return [self]
        have = self.tensor.shape[0] if self.rows is None else self.rows
        rows = nbytes * have // self.data.nbytes
        if not 0 < rows < have:
            return [self]
        return [
            dataclasses.replace(self, rows=rows),
            dataclasses.replace(self, start=self.start + rows, rows=have - rows),
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A data file that is on the disk.

    Attributes:
        size: bytes.
        crc32c: of all of them.
        entries: what the index says of each tensor, by its key.
    """

    size: int
    crc32c: int
    entries: dict[bytes, bytes]


def add(
    files: Files,
    prefix: str,
    tensors: Sequence[DenseTensor],
    threads: int,
    *,
    check: Callable[[], None] | None = None,
) -> dict[str, tuple[int, int]]:
    """Adds tensors to the checkpoint at a prefix, which nobody reads yet.

    Args:
        files: the file operations.
        prefix: TensorFlow's, a path.
        tensors: what is added.
        threads: how many write, and how many data files there will be more.
        check: given where training goes on meanwhile; called between two pieces: once
            it raises, nothing more is written or synced, and what there is is no
            checkpoint.

    Returns:
        Size and crc32c of the new data files, by path. They are on the disk; what
        TensorFlow wrote, and the index, are not.

    Raises:
        OSError: as the file system says.
        Exception: what `check` has raised.
    """
    with open(prefix + ".index", "rb") as file:
        index = dict(bundle_table.entries(file.read()))
    header = seams.tensor_bundle.BundleHeaderProto.FromString(index[b""])
    shares = _shares(tensors, threads)
    before = header.num_shards
    header.num_shards = count = before + len(shares)
    index[b""] = header.SerializeToString()
    failed = threading.Event()
    piece_bytes = _PIECE_BYTES if check is None else _PIECE_BYTES_ASYNC

    def check_all() -> None:
        if failed.is_set():
            raise errors.SaveError("another thread has failed")  # which is what is told
        if check is not None:
            check()

    def write(shard: int) -> _Part:
        path = data_file(prefix, shard, count)
        share = shares[shard - before]
        return _write_part(files, path, shard, share, piece_bytes, check_all)

    parts = map_in_threads(
        write,
        range(before, count),
        threads=len(shares),
        name="tfpreempt-write",
        failed=failed,
        patience=_PATIENCE_SECONDS,
    )
    for part in parts:
        index.update(part.entries)
    index.update(_entries_of_cut(stretch for share in shares for stretch in share))
    for shard in range(before):
        old = data_file(prefix, shard, before)
        files.rename(old, data_file(prefix, shard, count))
    files.write(prefix + ".index", bundle_table.to_bytes(index))
    return {
        data_file(prefix, shard, count): (part.size, part.crc32c)
        for shard, part in enumerate(parts, before)
    }


def data_file(prefix: str, shard: int, count: int) -> str:
    """The path of one of so many data files."""
    return f"{prefix}.data-{shard:05d}-of-{count:05d}"


def _shares(tensors: Sequence[DenseTensor], count: int) -> list[list[_Stretch]]:
    """Deals tensors out so that each thread has about as many bytes to write.

    The largest come first, each to who has least. Where a share is still too large, as
    one tensor may be larger than all others, a part of it goes to who has least.
    TensorFlow reads a cut tensor slower than a whole one, so as few as need be are cut.
    """
    shares: list[list[_Stretch]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor in sorted(tensors, key=lambda each: each.data.nbytes, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(_Stretch(tensor=tensor))
        sizes[least] += tensor.data.nbytes
    mean = sum(sizes) / count
    for _ in range(count - 1):  # each cut brings one share to the mean
        most, least = sizes.index(max(sizes)), sizes.index(min(sizes))
        excess = int(min(sizes[most] - mean, mean - sizes[least]))
        if excess <= mean * _UNEVEN:
            break
        largest = max(shares[most], key=lambda each: each.data.nbytes)
        given, *kept = largest.cut(excess)
        if not kept:
            break
        shares[most].remove(largest)
        shares[most] += kept
        shares[least].append(given)
        sizes[most] -= given.data.nbytes
        sizes[least] += given.data.nbytes
    return [share for share in shares if share]


def _write_part(
    files: Files,
    path: str,
    shard: int,
    share: Sequence[_Stretch],
    piece_bytes: int,
    check: Callable[[], None],
) -> _Part:
    """Writes and syncs one data file; in a thread of its own."""
    whole = checksum.Sum()
    entries: dict[bytes, bytes] = {}

    def pieces() -> Iterator[memoryview]:
        for stretch in share:
            crc, data = 0, stretch.data
            for start in range(0, data.nbytes, piece_bytes):
                check()
                piece = data[start : start + piece_bytes]
                yield piece.data  # and behind this it was written
                crc = checksum.extended(crc, piece)
            entries[_key(stretch)] = _entry(stretch, shard, whole.size, crc)
            whole.append(crc, data.nbytes)

    files.write_pieces(path, pieces())
    check()
    files.sync_file(path)
    return _Part(size=whole.size, crc32c=whole.crc32c, entries=entries)


# --- what the index says -------------------------------------------------------------


def _entry(stretch: _Stretch, shard: int, offset: int, crc: int) -> bytes:
    """Where some rows of a tensor are, or all: a BundleEntryProto."""
    shape = stretch.tensor.shape
    entry = _proto(
        stretch.tensor,
        shape if stretch.rows is None else (stretch.rows, *shape[1:]),
        shard_id=shard,
        offset=offset,
        size=stretch.data.nbytes,
        crc32c=bundle_table.masked(crc),
    )
    data: bytes = entry.SerializeToString()
    return data


def _entries_of_cut(stretches: Iterable[_Stretch]) -> dict[bytes, bytes]:
    """Which slices there are of each tensor that was cut, by its key."""
    entries: dict[str, Any] = {}
    for stretch in sorted(stretches, key=lambda each: each.start):
        if stretch.rows is not None:
            name, shape = stretch.tensor.name, stretch.tensor.shape
            entry = entries.setdefault(name, _proto(stretch.tensor, shape))
            extents = entry.slices.add().extent
            extents.add(start=stretch.start, length=stretch.rows)
            for _ in shape[1:]:
                extents.add()  # all of it
    return {name.encode(): each.SerializeToString() for name, each in entries.items()}


def _proto(tensor: DenseTensor, shape: tuple[int, ...], **fields: int) -> Any:
    entry = seams.tensor_bundle.BundleEntryProto(dtype=tensor.dtype, **fields)
    entry.shape.SetInParent()  # a scalar's is empty, and there
    for size in shape:
        entry.shape.dim.add(size=size)
    return entry


def _key(stretch: _Stretch) -> bytes:
    """The key of a tensor is its name; that of a slice says also which it is."""
    name, axes = stretch.tensor.name, len(stretch.tensor.shape)
    if stretch.rows is None:
        return name.encode()
    return slice_key(name, stretch.start, stretch.rows, axes)


def slice_key(name: str, start: int, rows: int, axes: int) -> bytes:
    """The key of some rows of a tensor, along its first axis.

    As `EncodeTensorNameSlice` (tensorflow/core/util/saved_tensor_slice_util.cc) makes
    it, with the numbers and strings of tensorflow/core/lib/strings/ordered_code.cc.

    Args:
        name: of the tensor.
        start: its first row.
        rows: how many.
        axes: how many the tensor has.
    """
    text = name.encode().replace(b"\0", b"\0\xff") + b"\0\1"
    extent = _ordered(start) + _ordered(rows)
    everything = b"\x80\x7f"  # from 0 on, and -1 long
    return b"\0" + text + bytes([1, axes]) + extent + (axes - 1) * everything


def _ordered(number: int) -> bytes:
    """A number from 0 on; the bits that it begins with say how many bytes it has."""
    size = number.bit_length() // 7 + 1
    header = (0xFF00 >> size & 0xFF) << 8 * (size - 1)
    return (header | number).to_bytes(size, "big")
