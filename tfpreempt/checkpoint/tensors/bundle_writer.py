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
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.state import bundle
from tfpreempt.checkpoint.state.partitioning import DenseTensor, Part, Stretch, deal
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.files import Files

_log = logging.getLogger(__name__)

THREADS = min(4, os.cpu_count() or 1)  # that write, each a file of its own, or read
SMALL_BYTES = 1 << 14  # of a tensor that TensorFlow writes and reads as fast
WORTH_BYTES = 1 << 25  # of all larger ones: less is not worth threads of their own
_PIECE_BYTES = 1 << 19  # so that it is in the cache still when it was written
_PIECE_BYTES_ASYNC = 1 << 23
"""While training goes on. Between two pieces a thread needs Python's lock, for which it
and the training wait in turn, so there are fewer pieces."""
_PATIENCE_SECONDS = 10.0  # for the other threads to leave, where one has failed


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
    index, header = _read_index(prefix)
    shares = deal_to_threads([Stretch(tensor=tensor) for tensor in tensors], threads)
    before = header.num_shards
    count = before + len(shares)
    paths = [data_file(prefix, shard, count) for shard in range(before, count)]
    parts = write(files, dict(zip(paths, shares, strict=True)), check=check)
    return _merge(files, prefix, parts, index, header)


def deal_to_threads(stretches: Sequence[Stretch], threads: int) -> list[list[Stretch]]:
    """A share for each thread that has something to write."""
    return [share for share in deal(stretches, threads) if share]


def write(
    files: Files,
    shares: Mapping[str, Sequence[Stretch]],
    *,
    check: Callable[[], None] | None = None,
) -> list[Part]:
    """Writes and syncs data files, each by a thread of its own.

    Args:
        files: the file operations.
        shares: what goes into each file, by its path.
        check: see `add`.

    Returns:
        The files, in the order of their paths.

    Raises:
        OSError: as the file system says.
    """
    failed = threading.Event()
    piece_bytes = _PIECE_BYTES if check is None else _PIECE_BYTES_ASYNC

    def check_all() -> None:
        if failed.is_set():
            raise errors.SaveError("another thread has failed")  # which is what is told
        if check is not None:
            check()

    return map_in_threads(
        lambda path: _write_part(files, path, shares[path], piece_bytes, check_all),
        shares,
        threads=len(shares),
        name="tfpreempt-write",
        failed=failed,
        patience=_PATIENCE_SECONDS,
    )


def merge(
    files: Files, prefix: str, parts: Sequence[Part]
) -> dict[str, tuple[int, int]]:
    """Makes data files that lie elsewhere a part of the checkpoint at a prefix.

    One that cannot be moved is written anew.

    Args:
        files: the file operations.
        prefix: TensorFlow's, a path.
        parts: what is moved there; of each tensor all of it, or nothing.

    Returns:
        See `add`.

    Raises:
        OSError: as the file system says.
    """
    return _merge(files, prefix, parts, *_read_index(prefix))


def data_file(prefix: str, shard: int, count: int) -> str:
    """The path of one of so many data files."""
    return f"{prefix}.data-{shard:05d}-of-{count:05d}"


def _read_index(prefix: str) -> tuple[dict[bytes, bytes], Any]:
    """TensorFlow's entries by key, and the header that is one of them."""
    with open(prefix + ".index", "rb") as file:
        index = dict(bundle.entries(file.read()))
    return index, seams.tensor_bundle.BundleHeaderProto.FromString(index[b""])


def _merge(
    files: Files,
    prefix: str,
    parts: Sequence[Part],
    index: dict[bytes, bytes],
    header: Any,
) -> dict[str, tuple[int, int]]:
    before = header.num_shards
    header.num_shards = count = before + len(parts)
    index[b""] = header.SerializeToString()
    index.update(_entries_of_cut(each for part in parts for each in part.stretches))
    for shard in range(before):
        old = data_file(prefix, shard, before)
        files.rename(old, data_file(prefix, shard, count))
    sums = {}
    for shard, found in enumerate(parts, before):
        path = data_file(prefix, shard, count)
        part = found if found.path == path else _moved(files, found, path)
        index.update(_entries(part, shard))
        sums[path] = (part.size, part.crc32c)
    files.write(prefix + ".index", [bundle.to_bytes(index)])
    return sums


def _moved(files: Files, part: Part, path: str) -> Part:
    """The same at its place; written anew where it cannot be moved there.

    What another machine has written may be gone, or be out of reach of this one.
    """
    try:
        files.rename(part.path, path)
    except OSError as error:
        _log.warning(
            "tfpreempt: %s cannot be moved, so it is written anew, which takes longer "
            "and loses nothing: %s",
            part.path,
            error,
        )
        [part] = write(files, {path: part.stretches})
        return part
    return dataclasses.replace(part, path=path)


def _write_part(
    files: Files,
    path: str,
    share: Sequence[Stretch],
    piece_bytes: int,
    check: Callable[[], None],
) -> Part:
    """Writes and syncs one data file; in a thread of its own."""
    whole = checksum.Sum()
    sums: list[int] = []

    def pieces() -> Iterator[memoryview]:
        for stretch in share:
            crc, data = 0, stretch.data
            for start in range(0, data.nbytes, piece_bytes):
                check()
                piece = data[start : start + piece_bytes]
                yield piece.data  # and behind this it was written
                crc = checksum.extended(crc, piece)
            sums.append(crc)
            whole.append(crc, data.nbytes)

    files.write(path, pieces())
    check()
    files.sync_file(path)
    return Part(
        path=path,
        size=whole.size,
        crc32c=whole.crc32c,
        stretches=share,
        offsets=offsets_of(share),
        sums=sums,
    )


def offsets_of(stretches: Sequence[Stretch]) -> list[int]:
    """Where each begins in a data file that has one behind the other."""
    sizes = [each.data.nbytes for each in stretches]
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


# --- what the index says -------------------------------------------------------------


def _entries(part: Part, shard: int) -> Iterator[tuple[bytes, bytes]]:
    """The key of each stretch in a data file, and its BundleEntryProto.

    A BundleEntryProto says where some rows of a tensor are, or all.
    """
    entries: dict[tuple[int, tuple[int, ...]], Any] = {}  # by type and shape
    for stretch, offset, crc in zip(
        part.stretches, part.offsets, part.sums, strict=True
    ):
        dtype, shape = stretch.tensor.dtype, stretch.tensor.shape
        if stretch.rows is not None:
            shape = (stretch.rows, *shape[1:])
        entry = entries.get((dtype, shape))
        if entry is None:
            entries[dtype, shape] = entry = _proto(stretch.tensor, shape)
        entry.shard_id = shard
        entry.offset = offset
        entry.size = stretch.data.nbytes
        entry.crc32c = bundle.masked(crc)
        yield _key(stretch), entry.SerializeToString()


def _entries_of_cut(stretches: Iterable[Stretch]) -> dict[bytes, bytes]:
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


def _proto(tensor: DenseTensor, shape: tuple[int, ...]) -> Any:
    entry = seams.tensor_bundle.BundleEntryProto(dtype=tensor.dtype)
    entry.shape.SetInParent()  # a scalar's is empty, and there
    for size in shape:
        entry.shape.dim.add(size=size)
    return entry


def _key(stretch: Stretch) -> bytes:
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
