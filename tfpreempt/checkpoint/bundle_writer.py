"""Adds large tensors to a checkpoint that TensorFlow has written, by many threads.

TensorFlow writes in one thread and copies each tensor on the way, and what the sums of
its files are is known when they have been read again. Here each thread has a data file
of its own, as two that write into one wait for each other. It writes the memory of the
tensors as it is, a piece at a time, and sums up a piece just before, which brings it
into the processor's cache.

A data file is the bytes of its tensors, one behind the other. The index is TensorFlow's
with more entries, and the names of the files count all of them. The format's source is
tensorflow/core/util/tensor_bundle/tensor_bundle.h and .cc.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint import bundle_table
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.files import Files

_PIECE_BYTES = 1 << 19  # so that it is in the cache still when it is written
_PATIENCE_SECONDS = 10.0  # for the other threads to leave, where one has failed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """A tensor that is its memory: all but strings, resources and variants.

    Attributes:
        name: its key in the checkpoint.
        dtype: a number of TensorFlow's DataType.
        shape: its dimensions.
        data: its bytes, one after the other; nobody changes them.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


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
    files: Files, prefix: str, tensors: Sequence[DenseTensor], threads: int
) -> dict[str, tuple[int, int]]:
    """Adds tensors to the checkpoint at a prefix, which nobody reads yet.

    Args:
        files: the file operations.
        prefix: TensorFlow's, a path.
        tensors: what is added.
        threads: how many write, and how many data files there will be more.

    Returns:
        Size and crc32c of the new data files, by path. They are on the disk; what
        TensorFlow wrote, and the index, are not.

    Raises:
        OSError: as the file system says.
    """
    with open(prefix + ".index", "rb") as file:
        index = dict(bundle_table.entries(file.read()))
    header = seams.tensor_bundle.BundleHeaderProto.FromString(index[b""])
    shares = _shares(tensors, threads)
    before = header.num_shards
    header.num_shards = count = before + len(shares)
    index[b""] = header.SerializeToString()
    is_over = threading.Event()

    def write(shard: int) -> _Part:
        path = data_file(prefix, shard, count)
        return _write_part(files, path, shard, shares[shard - before], is_over)

    parts = map_in_threads(
        write,
        range(before, count),
        threads=len(shares),
        name="tfpreempt-write",
        failed=is_over,
        patience=_PATIENCE_SECONDS,
    )
    for part in parts:
        index.update(part.entries)
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


def _shares(tensors: Sequence[DenseTensor], count: int) -> list[list[DenseTensor]]:
    """Deals tensors out so that each thread has about as many bytes to write."""
    shares: list[list[DenseTensor]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor in sorted(tensors, key=lambda each: each.data.nbytes, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(tensor)
        sizes[least] += tensor.data.nbytes
    return [share for share in shares if share]


def _write_part(
    files: Files,
    path: str,
    shard: int,
    tensors: Sequence[DenseTensor],
    is_over: threading.Event,
) -> _Part:
    """Writes and syncs one data file; in a thread of its own."""
    whole = checksum.Sum()
    entries: dict[bytes, bytes] = {}

    def pieces() -> Iterator[memoryview]:
        for tensor in tensors:
            crc = 0
            for start in range(0, tensor.data.nbytes, _PIECE_BYTES):
                if is_over.is_set():
                    return  # another thread has failed, and all this goes
                piece = tensor.data[start : start + _PIECE_BYTES]
                crc = checksum.extended(crc, piece)
                yield piece.data
            entries[tensor.name.encode()] = _entry(tensor, shard, whole.size, crc)
            whole.append(crc, tensor.data.nbytes)

    files.write_pieces(path, pieces())
    files.sync_file(path)
    return _Part(size=whole.size, crc32c=whole.crc32c, entries=entries)


def _entry(tensor: DenseTensor, shard: int, offset: int, crc: int) -> bytes:
    """What the index says of a tensor: a BundleEntryProto."""
    entry = seams.tensor_bundle.BundleEntryProto(
        dtype=tensor.dtype,
        shard_id=shard,
        offset=offset,
        size=tensor.data.nbytes,
        crc32c=bundle_table.masked(crc),
    )
    entry.shape.SetInParent()  # a scalar's is empty, and there
    for size in tensor.shape:
        entry.shape.dim.add(size=size)
    data: bytes = entry.SerializeToString()
    return data
