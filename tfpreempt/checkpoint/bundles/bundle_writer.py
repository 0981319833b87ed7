"""Writes tensors with many threads: a whole checkpoint, or tensors that are added to
TensorFlow's files.

TensorFlow writes in one thread and copies every tensor first, and the checksums of
TensorFlow's files are known only after a second read. Here every thread has a separate
data file, because threads that write to the same file wait for each other. A thread
writes the memory of the tensors without a copy. The thread computes the checksum of a
piece just after the write, while the piece is in the processor's cache; a checksum
before the write would cost twice as much.

A data file contains the bytes of the tensors without gaps. If TensorFlow has written an
index, entries are added to this index; otherwise a new index is written. The name of
every data file contains the number of data files, so TensorFlow's files are renamed
when files are added. The file format is defined in tensorflow/core/util/tensor_bundle/
tensor_bundle.h and .cc.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.bundles.partitioning import (
    DenseTensor,
    Part,
    TensorSlice,
    partition,
)
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, file_reading
from tfpreempt.storage.files import Files

_log = logging.getLogger(__name__)

# Number of threads for a write (each thread writes a separate file), and for a read.
THREADS = min(4, os.cpu_count() or 1)
SMALL_BYTES = 1 << 14  # smaller tensors are left to TensorFlow, which is as fast
# If the larger tensors together have fewer bytes, TensorFlow writes all tensors.
WORTH_BYTES = 1 << 25
_PIECE_BYTES = 1 << 19  # small enough to be still in the cache after the write
_PIECE_BYTES_ASYNC = 1 << 23
"""Piece size during training. Between two pieces a thread waits for Python's lock, and
so does the training, so larger pieces cost the training less time."""
_STOP_TIMEOUT_SECONDS = 10.0  # wait for the other threads after a failure


def add(
    files: Files,
    prefix: str,
    tensors: Sequence[DenseTensor],
    threads: int,
    *,
    check: Callable[[], None] | None = None,
    is_new: bool = False,
) -> dict[str, tuple[int, int]]:
    """Adds tensors to a checkpoint that no reader uses yet.

    Args:
        files: the file operations.
        prefix: path prefix of the checkpoint's files.
        tensors: tensors to add.
        threads: number of threads, each of which writes a new data file.
        check: for a save while training continues: function called between two pieces.
            If `check` raises an error, the write stops, and the files are not a
            checkpoint. None: training waits for the save.
        is_new: whether no files exist yet, and the tensors are the whole checkpoint. If
            False, TensorFlow has written files.

    Returns:
        Size and crc32c of the new data files, by path. The new data files are synced to
        the disk; TensorFlow's files and the index are not.

    Raises:
        OSError: error of the file system.
        Exception: an exception raised by `check`.
    """
    slices = [TensorSlice(tensor=tensor) for tensor in tensors]
    shares = deal_to_threads(slices, threads)
    if is_new:
        index, shares = {b"": bundle.header(0)}, shares or [[]]
    else:
        index = _read_index(prefix)
    before = bundle.num_shards(index[b""])
    count = before + len(shares)
    paths = [data_file(prefix, shard, count) for shard in range(before, count)]
    parts = write(files, dict(zip(paths, shares, strict=True)), check=check)
    return merge(files, prefix, parts, index)


def thread_count(*, is_async: bool) -> int:
    """Returns the number of threads that write a save. If training continues during an
    asynchronous save, the save leaves half of the threads' CPUs to training."""
    return max(1, THREADS // 2) if is_async else THREADS


def deal_to_threads(
    slices: Sequence[TensorSlice], threads: int
) -> list[list[TensorSlice]]:
    """Divides tensor slices evenly between threads. Returns a list of slices for every
    thread that has something to write."""
    return [share for share in partition(slices, threads) if share]


def write(
    files: Files,
    shares: Mapping[str, Sequence[TensorSlice]],
    *,
    check: Callable[[], None] | None = None,
) -> list[Part]:
    """Writes and syncs data files, with a thread for each file.

    Args:
        files: the file operations.
        shares: for each file, by path, the tensor slices to write.
        check: function called between two pieces, or None; see `add`.

    Returns:
        The written files, in the order of `shares`.

    Raises:
        OSError: error of the file system.
        Exception: an exception raised by `check`.
    """
    failed = threading.Event()
    piece_bytes = _PIECE_BYTES if check is None else _PIECE_BYTES_ASYNC

    def check_all() -> None:
        if failed.is_set():
            # The failed thread reports its own error.
            raise errors.SaveError("another thread of this save has failed")
        if check is not None:
            check()

    return map_in_threads(
        lambda path: _write_part(files, path, shares[path], piece_bytes, check_all),
        shares,
        threads=len(shares),
        name="tfpreempt-write",
        failed=failed,
        stop_timeout=_STOP_TIMEOUT_SECONDS,
    )


def merge(
    files: Files,
    prefix: str,
    parts: Sequence[Part],
    index: dict[bytes, bytes] | None = None,
) -> dict[str, tuple[int, int]]:
    """Moves data files, which the workers have written into separate directories, into
    a checkpoint, and adds the tensors of these files to the index.

    A file that cannot be moved is written again. A file that is already in its place
    stays.

    Args:
        files: the file operations.
        prefix: path prefix of TensorFlow's files.
        parts: data files to move. The files together contain all rows of each of their
            tensors.
        index: entries of the index so far; None: the entries of TensorFlow's index.

    Returns:
        Size and crc32c of the moved data files, by path. The index is not synced to the
        disk.

    Raises:
        OSError: error of the file system.
    """
    if index is None:
        index = _read_index(prefix)
    before = bundle.num_shards(index[b""])
    count = before + len(parts)
    index[b""] = bundle.header(count)
    index.update(_entries_of_cut(each for part in parts for each in part.slices))
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


def data_file(prefix: str, shard: int, count: int) -> str:
    """Returns the path of a data file in a checkpoint.

    Args:
        prefix: path prefix of the checkpoint's files.
        shard: number of the file, from 0.
        count: number of data files in the checkpoint.
    """
    return f"{prefix}.data-{shard:05d}-of-{count:05d}"


def _read_index(prefix: str) -> dict[bytes, bytes]:
    """Returns the entries of the index file that TensorFlow has written, by key."""
    with file_reading.open_file(prefix + ".index") as file:
        return dict(bundle.entries(bundle.read(file)))


def _moved(files: Files, part: Part, path: str) -> Part:
    """Moves a data file; writes the file again at the new path if the move fails.

    The move of a file written by another machine fails if the file has vanished, or if
    this machine cannot reach the file.

    Returns:
        The data file at the new path.
    """
    try:
        files.rename(part.path, path)
    except OSError as error:
        _log.warning(
            "cannot move %s, so the file is written again; the save takes longer, but "
            "nothing is lost: %s",
            part.path,
            error,
        )
        [part] = write(files, {path: part.slices})
        return part
    return dataclasses.replace(part, path=path)


def _write_part(
    files: Files,
    path: str,
    share: Sequence[TensorSlice],
    piece_bytes: int,
    check: Callable[[], None],
) -> Part:
    """Writes and syncs a data file with a share, and calls `check`, which may stop the
    write, before every piece. Called on a separate thread for each file."""
    whole = checksum.ChecksumWriter()
    sums: list[int] = []

    def pieces() -> Iterator[memoryview]:
        for tensor_slice in share:
            crc, data = 0, tensor_slice.data
            for start in range(0, data.nbytes, piece_bytes):
                check()
                piece = data[start : start + piece_bytes]
                yield piece.data  # the write is complete when the generator resumes
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
        slices=share,
        offsets=offsets_of(share),
        sums=sums,
    )


def offsets_of(slices: Sequence[TensorSlice]) -> list[int]:
    """Returns the offsets of tensor slices in a data file that contains the slices
    without gaps.

    Args:
        slices: the tensor slices, in the order of the file.
    """
    sizes = [each.data.nbytes for each in slices]
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


# --- entries of the index ------------------------------------------------------------


def _entries(part: Part, shard: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields key and index entry (a BundleEntryProto) for every tensor slice in the
    data file with number `shard`. The entry gives the position of the slice's bytes."""
    for tensor_slice, offset, crc in zip(
        part.slices, part.offsets, part.sums, strict=True
    ):
        dtype, shape = tensor_slice.tensor.dtype, tensor_slice.tensor.shape
        if tensor_slice.rows is not None:
            shape = (tensor_slice.rows, *shape[1:])
        size = tensor_slice.data.nbytes
        entry = bundle.TensorEntry(
            dtype, shape, shard, offset, size, bundle.masked(crc)
        )
        yield _key(tensor_slice), entry.to_bytes()


def _entries_of_cut(slices: Iterable[TensorSlice]) -> dict[bytes, bytes]:
    """Returns an index entry for every tensor that is cut into slices, by key. The
    entry lists the slices; the positions of the slices are in the entries from
    `_entries`."""
    cuts: dict[str, list[tuple[tuple[int, int | None], ...]]] = {}
    tensors: dict[str, DenseTensor] = {}
    for tensor_slice in sorted(slices, key=lambda each: each.start):
        if tensor_slice.rows is not None:
            name, shape = tensor_slice.tensor.name, tensor_slice.tensor.shape
            tensors[name] = tensor_slice.tensor
            whole_axes = [(0, None)] * (len(shape) - 1)
            rows = tensor_slice.start, tensor_slice.rows
            cuts.setdefault(name, []).append((rows, *whole_axes))
    return {
        name.encode(): bundle.TensorEntry(
            tensor.dtype, tensor.shape, slices=tuple(cuts[name])
        ).to_bytes()
        for name, tensor in tensors.items()
    }


def _key(tensor_slice: TensorSlice) -> bytes:
    """Returns the index key of a tensor slice: the tensor's name if the slice is the
    whole tensor, otherwise the key from `slice_key`."""
    name, axes = tensor_slice.tensor.name, len(tensor_slice.tensor.shape)
    if tensor_slice.rows is None:
        return name.encode()
    return slice_key(name, tensor_slice.start, tensor_slice.rows, axes)


def slice_key(name: str, start: int, rows: int, axes: int) -> bytes:
    """Returns the index key of consecutive rows of a tensor along the first axis.

    TensorFlow's function `EncodeTensorNameSlice`
    (tensorflow/core/util/saved_tensor_slice_util.cc) defines the format, with numbers
    and strings encoded as in tensorflow/core/lib/strings/ordered_code.cc.

    Args:
        name: name of the tensor.
        start: first row.
        rows: number of rows.
        axes: number of the tensor's axes.
    """
    text = name.encode().replace(b"\0", b"\0\xff") + b"\0\1"
    extent = _ordered(start) + _ordered(rows)
    everything = b"\x80\x7f"  # start 0 (80), length -1 (7f): the whole axis
    return b"\0" + text + bytes([1, axes]) + extent + (axes - 1) * everything


def _ordered(number: int) -> bytes:
    """Returns a number in TensorFlow's ordered encoding, in which the first bits give
    the number of bytes."""
    size = number.bit_length() // 7 + 1
    header = (0xFF00 >> size & 0xFF) << 8 * (size - 1)
    return (header | number).to_bytes(size, "big")
