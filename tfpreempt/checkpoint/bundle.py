"""Is a TensorFlow checkpoint that has no manifest complete? Read without TensorFlow.

A V2 checkpoint is a LevelDB table (`<prefix>.index`) of BundleEntryProto values, which
say where in which data file each tensor lies (tensorflow/core/util/tensor_bundle).
TensorFlow writes the table without compression and puts a masked crc32c behind every
block, so damage shows. Each data file must be as long as its last tensor needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
    except (OSError, ValueError, IndexError, struct.error) as error:
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
    footer = data[-_FOOTER_BYTES:]
    if struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("the index doesn't end with a table's magic number")
    position = _varint(footer, _varint(footer, 0)[1])[1]  # skips the metaindex handle
    shards = 1
    ends: dict[int, int] = {}
    for _, handle in _block(data, *_handle(footer, position)):
        for key, value in _block(data, *_handle(handle, 0)):
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


def _handle(data: bytes, position: int) -> tuple[int, int]:
    offset, position = _varint(data, position)
    size, _ = _varint(data, position)
    return offset, size


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one table block, prefix compression undone."""
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
    end -= 4 * (restarts + 1)
    key, position = b"", offset
    while position < end:
        shared, position = _varint(data, position)
        fresh, position = _varint(data, position)
        length, position = _varint(data, position)
        key = key[:shared] + data[position : position + fresh]
        position += fresh
        yield key, data[position : position + length]
        position += length


def _fields(message: bytes) -> dict[int, int]:
    """The number fields of a protocol buffer message; others are skipped."""
    found: dict[int, int] = {}
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            found[tag >> 3], position = _varint(message, position)
        elif kind == 2:
            length, position = _varint(message, position)
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise ValueError("an entry of the index is not a protocol buffer")
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("a number in the index is too long")
