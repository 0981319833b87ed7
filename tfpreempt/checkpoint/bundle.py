"""Is a TensorFlow checkpoint that has no manifest complete? Read without TensorFlow.

A V2 checkpoint is a LevelDB table (`<prefix>.index`) of BundleEntryProto values, which
say where in which data file each tensor lies (tensorflow/core/util/tensor_bundle).
TensorFlow writes the table without compression and puts a masked crc32c behind every
block, so damage shows. Each data file must be as long as its last tensor needs.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from typing import IO

import google_crc32c

from tfpreempt import errors
from tfpreempt.storage import reading

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_MAX_INDEX_BYTES = 1 << 30


def check(prefix: str) -> None:
    """Checks the index and the lengths of the data files.

    Raises:
        CheckpointDamagedError: something is missing, cut short or unreadable.
    """
    try:
        if reading.stat(prefix + ".index").size > _MAX_INDEX_BYTES:
            raise ValueError("the index is larger than 1 GiB")
        with reading.open_file(prefix + ".index") as file:
            data = file.read()
        shards, ends = _read(data)
        _check_data(prefix, shards, ends)
    except (OSError, ValueError, IndexError, OverflowError, struct.error) as error:
        raise errors.CheckpointDamagedError(
            f"The checkpoint {prefix!r} is not complete: {error}"
        ) from error


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
    if len(data) < _FOOTER_BYTES:
        raise ValueError(f"the index has {len(data)} bytes, too few for its footer")
    if struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("the index doesn't end with a table's magic number")
    footer = io.BytesIO(data[-_FOOTER_BYTES:])
    _varint(footer), _varint(footer)  # where the metaindex is
    shards = 1
    ends: dict[int, int] = {}
    for _, handle in _block(data, footer):
        for key, value in _block(data, io.BytesIO(handle)):
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


def _block(data: bytes, handle: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the table block at a handle, prefix compression undone."""
    offset, size = _varint(handle), _varint(handle)
    end = offset + size
    if end + 5 > len(data):
        raise ValueError("the index is cut short")
    if data[end] != 0:
        raise ValueError("the index is compressed, which TensorFlow never does")
    crc = google_crc32c.value(data[offset : end + 1])
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    if masked != struct.unpack_from("<I", data, end + 1)[0]:
        raise ValueError("a block of the index has another checksum")
    restarts = struct.unpack_from("<I", data, end - 4)[0]
    key, block = b"", io.BytesIO(data[offset:end])
    while block.tell() < size - 4 * (restarts + 1):
        shared, fresh, length = _varint(block), _varint(block), _varint(block)
        key = key[:shared] + block.read(fresh)
        yield key, block.read(length)


def _fields(message: bytes) -> dict[int, int]:
    """The number fields of a protocol buffer message; others are skipped."""
    found: dict[int, int] = {}
    file = io.BytesIO(message)
    while file.tell() < len(message):
        number, kind = divmod(_varint(file), 8)
        if kind == 0:
            found[number] = _varint(file)
        elif kind in (1, 2, 5):
            file.seek({1: 8, 5: 4}.get(kind) or _varint(file), os.SEEK_CUR)
        else:
            raise ValueError("an entry of the index is not a protocol buffer")
    return found


def _varint(file: IO[bytes]) -> int:
    result = shift = 0
    while shift <= 63:
        byte = file.read(1)[0]
        result |= (byte & 127) << shift
        if byte < 128:
            return result
        shift += 7
    raise ValueError("a number in the index is too long")
