"""Is a TensorFlow checkpoint that has no manifest complete? Read without TensorFlow.

A V2 checkpoint is a table (`<prefix>.index`) of BundleEntryProto values, which say
where in which data file each tensor lies (tensorflow/core/util/tensor_bundle). The
table shows damage; each data file must be as long as its last tensor needs.
"""

from __future__ import annotations

import errno
import io
import os
import struct

from tfpreempt import errors
from tfpreempt.checkpoint import bundle_table
from tfpreempt.storage import reading

_MAX_INDEX_BYTES = 1 << 30


def check(prefix: str) -> None:
    """Checks the index and the lengths of the data files.

    Raises:
        CheckpointDamagedError: something is missing, cut short or unreadable.
    """
    try:
        check_size(prefix)
        with reading.open_file(prefix + ".index") as file:
            data = bundle_table.read(file)
        shards, ends = _read(data)
        _check_data(prefix, shards, ends)
    except (OSError, ValueError, IndexError, OverflowError, struct.error) as error:
        raise errors.CheckpointDamagedError(
            f"The checkpoint {prefix!r} is not complete: {error}"
        ) from error


def check_size(prefix: str) -> None:
    """Refuses an index that is too large to be read.

    Raises:
        OSError: it is too large, or the storage does not answer.
    """
    if reading.stat(prefix + ".index").size > _MAX_INDEX_BYTES:
        raise OSError(errno.EFBIG, "The index is larger than 1 GiB", prefix + ".index")


def _check_data(prefix: str, shards: int, ends: dict[int, int]) -> None:
    for shard in range(shards):
        path = f"{prefix}.data-{shard:05d}-of-{shards:05d}"
        size, needed = reading.stat(path).size, ends.get(shard, 0)
        if size < needed:
            raise ValueError(f"{path!r} has {size} bytes, {needed} are needed")
    if any(shard >= shards for shard in ends):
        raise ValueError("a tensor lies in a data file that the header doesn't count")


def _read(data: bytes) -> tuple[int, dict[int, int]]:
    """Number of data files, and how long each must be at least."""
    shards = 1
    ends: dict[int, int] = {}
    for key, value in bundle_table.entries(data):
        fields = _fields(value)
        if key == b"":
            shards = fields.get(1, 1)
        elif fields.get(5):
            shard = fields.get(3, 0)
            end = fields.get(4, 0) + fields[5]
            ends[shard] = max(ends.get(shard, 0), end)
    if not 1 <= shards <= 100_000:
        raise ValueError(f"the header counts {shards} data files")
    return shards, ends


def _fields(message: bytes) -> dict[int, int]:
    """The number fields of a protocol buffer message; others are skipped."""
    found: dict[int, int] = {}
    file = io.BytesIO(message)
    while file.tell() < len(message):
        number, kind = divmod(bundle_table.varint(file), 8)
        if kind == 0:
            found[number] = bundle_table.varint(file)
        elif kind in (1, 2, 5):
            file.seek({1: 8, 5: 4}.get(kind) or bundle_table.varint(file), os.SEEK_CUR)
        else:
            raise ValueError("an entry of the index is not a protocol buffer")
    return found
