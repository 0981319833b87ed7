"""Reads and writes the index of a TensorFlow checkpoint, without TensorFlow.

A V2 checkpoint has an index file (`<prefix>.index`): a table with a BundleEntryProto
for each tensor, with the tensor's data file and range (tensorflow/core/util/
tensor_bundle). The entry with the empty key is the BundleHeaderProto.

If a checkpoint has no manifest (tfpreempt's list of files with checksums), the
checkpoint counts as complete if the table is intact and no data file is too short for
the tensors in the table.

The table has LevelDB's format (tensorflow/tsl `lib/io/table_builder.cc`,
`block_builder.cc` and `format.cc`): blocks of entries in key order, then an index block
with the position of every block, then a footer with the position of the index block.
TensorFlow compresses no block and appends a masked crc32c to every block, so corruption
is detected. TensorFlow may omit the prefix that a key shares with the previous key.
tfpreempt writes every key in full, which readers of the format accept.
"""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from tfpreempt import errors
from tfpreempt.storage import checksum, file_reading

_MAX_INDEX_BYTES = 1 << 30
_CORRUPT = (OSError, ValueError, IndexError, OverflowError, struct.error)

DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
}
"""NumPy's names of the dtypes that are plain memory, by number in TensorFlow's DataType
(tensorflow/core/framework/types.proto). NumPy knows the names bfloat16 and float8 from
the package ml_dtypes."""


def numpy_dtype(number: int) -> np.dtype[Any]:
    """Returns NumPy's dtype for a number in TensorFlow's DataType.

    Raises:
        KeyError: the dtype is not plain memory.
        ImportError: the dtype needs the package ml_dtypes, which is not installed.
    """
    name: Any = DTYPES[number]
    if name in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
        name = getattr(importlib.import_module("ml_dtypes"), name)
    found: np.dtype[Any] = np.dtype(name)
    return found


def check(prefix: str, root: str = "") -> None:
    """Checks the index of a checkpoint, and the lengths of the data files.

    Args:
        prefix: path prefix of the checkpoint's files.
        root: directory inside which no link is followed; see `core/contained.py`.

    Raises:
        CheckpointCorruptedError: a file is missing, too short, unreadable or a link.
    """
    try:
        shards, ends = _read(prefix, root)
        for shard in range(shards):
            path = f"{prefix}.data-{shard:05d}-of-{shards:05d}"
            with file_reading.open_inside(path, root) as file:
                size, needed = os.fstat(file.fileno()).st_size, ends.get(shard, 0)
            if size < needed:
                raise ValueError(
                    f"{path!r} has {size} bytes; expected at least {needed}"
                )
    except _CORRUPT as error:
        raise errors.CheckpointCorruptedError(
            f"The checkpoint {prefix!r} is incomplete or corrupt: {error}"
        ) from error


def num_data_files(prefix: str) -> int:
    """Returns the number of data files in the index; 0 if the index is corrupt."""
    try:
        return _read(prefix)[0]
    except _CORRUPT:
        return 0


def check_size(prefix: str) -> None:
    """Raises an error for an index file that is too large to be read into memory.

    Raises:
        OSError: the index file is larger than 1 GiB, or the storage failed.
    """
    if os.stat(prefix + ".index").st_size > _MAX_INDEX_BYTES:
        raise OSError(errno.EFBIG, "The index is larger than 1 GiB", prefix + ".index")


def _read(prefix: str, root: str = "") -> tuple[int, dict[int, int]]:
    """Reads the index. Returns the number of data files, and a dict from the number of
    a data file to its minimum length in bytes.

    Raises:
        Exception: an error in `_CORRUPT`.
    """
    check_size(prefix)
    with file_reading.open_inside(prefix + ".index", root) as file:
        data = read(file)
    shards = 1
    ends: dict[int, int] = {}
    for key, value in entries(data):
        fields = _fields(value)
        if key == b"":
            shards = fields.get(1, 1)
        elif fields.get(5):
            shard = fields.get(3, 0)
            end = fields.get(4, 0) + fields[5]
            ends[shard] = max(ends.get(shard, 0), end)
    if not 1 <= shards <= 100_000:
        raise ValueError(
            f"the index header has {shards} data files; expected 1 to 100,000"
        )
    if any(shard >= shards for shard in ends):
        raise ValueError(
            f"the index names a data file beyond the {shards} files that its header "
            "counts"
        )
    return shards, ends


def _fields(message: bytes) -> dict[int, int]:
    """Returns the varint fields of a protocol buffer message, by field number; skips
    other fields."""
    return {n: value for n, value in _each_field(message) if isinstance(value, int)}


def _each_field(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and value of each field of a protocol buffer message, in order.

    The value of a varint is an int; the value of any other field is its bytes.
    """
    file = io.BytesIO(message)
    while file.tell() < len(message):
        number, kind = divmod(varint(file), 8)
        if kind == 0:
            yield number, varint(file)
        elif kind in (1, 2, 5):
            yield number, file.read({1: 8, 5: 4}.get(kind) or varint(file))
        else:
            raise ValueError("an entry of the index is not a valid protocol buffer")


# --- the entries of a tensor ---------------------------------------------------------


class TensorEntry(NamedTuple):
    """A BundleEntryProto: where a tensor, or a slice of a tensor, is stored.

    Attributes:
        dtype: number in TensorFlow's DataType.
        shape: dimensions.
        shard: number of the data file.
        offset: first byte in the data file.
        size: size in bytes.
        crc32c: masked checksum of the bytes.
        slices: if the tensor is stored in slices: for each slice, (start, length) of
            every axis, with the length None for a whole axis. Empty for a tensor in a
            single piece. The bytes of a slice have a separate entry.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc32c: int = 0
    slices: tuple[tuple[tuple[int, int | None], ...], ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the entry as the bytes of a protocol buffer message."""
        where = _field(3, self.shard) + _field(4, self.offset) + _field(5, self.size)
        crc = b"\x35" + struct.pack("<I", self.crc32c) if self.crc32c else b""
        cut = (_field(7, b"".join(_extent(*axis) for axis in s)) for s in self.slices)
        return _kind(self.dtype, self.shape) + where + crc + b"".join(cut)

    @classmethod
    def parse(cls, message: bytes) -> TensorEntry:
        """Returns the entry that the bytes of a protocol buffer message contain.

        Raises:
            ValueError, TypeError, IndexError: the message is corrupt.
        """
        numbers: dict[int, Any] = {}
        cut = []
        for number, value in _each_field(message):
            if number == 7:
                cut.append(tuple(map(_parse_extent, _of_number(1, value))))
            else:
                numbers[number] = value
        dims = _of_number(2, numbers.get(2, b""))
        if len(dims) > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor in the index has {len(dims)} dimensions")
        shape = (_fields(dim).get(1, 0) for dim in dims)
        crc = numbers.get(6, bytes(4))
        return cls(
            dtype=numbers.get(1, 0),
            shape=tuple(shape),
            shard=numbers.get(3, 0),
            offset=numbers.get(4, 0),
            size=numbers.get(5, 0),
            crc32c=struct.unpack("<I", crc)[0],
            slices=tuple(cut),
        )


def header(shards: int) -> bytes:
    """Returns the header entry (a BundleHeaderProto) for a checkpoint with `shards`
    data files."""
    version = _field(3, _field(1, 1))  # VersionDef.producer: the version of the format
    return _field(1, shards) + version


def num_shards(header_entry: bytes) -> int:
    """Returns the number of data files that a header entry names."""
    return _fields(header_entry).get(1, 0)


def _field(number: int, value: int | bytes) -> bytes:
    """Returns the bytes of a field in a protocol buffer message; empty for the value 0,
    the default."""
    if isinstance(value, bytes):
        return _varint_bytes(number << 3 | 2) + _varint_bytes(len(value)) + value
    return _varint_bytes(number << 3) + _varint_bytes(value) if value else b""


@functools.lru_cache(maxsize=1 << 12)
def _kind(dtype: int, shape: tuple[int, ...]) -> bytes:
    """Returns the fields for dtype and shape. The shape field of a scalar is present,
    and has no dimensions."""
    dims = b"".join(_field(2, _field(1, size)) for size in shape)
    return _field(1, dtype) + _field(2, dims)


def _extent(start: int, length: int | None) -> bytes:
    """Returns the bytes for the extent of a slice along an axis. The length None stands
    for the whole axis."""
    if length is None:
        return _field(1, b"")
    return _field(1, _field(1, start) + b"\x10" + _varint_bytes(length))


def _parse_extent(message: bytes) -> tuple[int, int | None]:
    fields = _fields(message)
    return fields.get(1, 0), fields.get(2)


def _of_number(number: int, message: Any) -> list[bytes]:
    """Returns the bytes of the fields of `message` that have the field number
    `number`."""
    return [v for n, v in _each_field(message) if n == number and type(v) is bytes]


_MAGIC_BYTES = struct.pack("<Q", 0xDB4775248B80FB57)
_FOOTER_BYTES = 48
_BLOCK_BYTES = 1 << 18
_IS_PLAIN = b"\0"  # type byte that follows an uncompressed block
# Size of all keys of a block, as a multiple of the size of the block. TensorFlow writes
# each sixteenth key in full, so its keys are at most 16 times as large as the block.
_MOST_EXPANDED = 64
_MOST_DIMENSIONS = 254  # of a tensor of TensorFlow


def entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, in key order.

    Args:
        data: the table, which is the content of an index file.

    Raises:
        ValueError: the table is too short or corrupt.
        IndexError, OverflowError, struct.error: the table is corrupt.
    """
    if len(data) < _FOOTER_BYTES:
        raise ValueError(f"the index has only {len(data)} bytes, so it is incomplete")
    if not data.endswith(_MAGIC_BYTES):
        raise ValueError("the index does not end with the magic number of a table")
    footer = io.BytesIO(data[-_FOOTER_BYTES:])
    varint(footer), varint(footer)  # skip the handle of the metaindex block
    left = len(data)
    for _, value in _block(data, footer):
        handle = io.BytesIO(value)
        varint(handle)
        left -= varint(handle)
        if left < 0:  # a small file would have billions of entries
            raise ValueError("the blocks of the index overlap")
        handle.seek(0)
        yield from _block(data, handle)


def read(file: IO[bytes]) -> bytes:
    """Reads a whole table from a file.

    Checks the end of the file first, so that a large sparse file is not read.

    Raises:
        OSError: the storage failed.
        ValueError: the file does not end with a table's magic number.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - len(_MAGIC_BYTES)))
    if file.read() != _MAGIC_BYTES:
        raise ValueError("the index does not end with the magic number of a table")
    file.seek(0)
    return file.read()


def to_bytes(values: Mapping[bytes, bytes]) -> bytes:
    """Returns the bytes of a table with the given keys and values."""
    table = bytearray()
    index = [
        (block[-1][0], _add_block(table, block))
        for block in _in_blocks(sorted(values.items()))
    ]
    footer = _add_block(table, [])  # an empty metaindex
    footer += _add_block(table, index)
    table += footer.ljust(_FOOTER_BYTES - len(_MAGIC_BYTES), b"\0") + _MAGIC_BYTES
    return bytes(table)


def masked(crc: int) -> int:
    """Returns a crc32c in the masked form in which TensorFlow stores checksums."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(file: IO[bytes]) -> int:
    """Reads a protocol buffer varint, with seven bits of the number in every byte.

    Raises:
        IndexError: the file ends.
        ValueError: the number has more than 64 bits.
    """
    result = shift = 0
    while shift <= 63:
        byte = file.read(1)[0]
        result |= (byte & 127) << shift
        if byte < 128:
            return result
        shift += 7
    raise ValueError("a number in the index has too many bytes")


def _varint_bytes(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _block(data: bytes, handle: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values in the block of a table that a handle (offset and
    size, as varints) names."""
    offset, size = varint(handle), varint(handle)
    end = offset + size
    if end + 5 > len(data):
        raise ValueError("the index is incomplete")
    if data[end : end + 1] != _IS_PLAIN:
        raise ValueError("the index is compressed; expected an uncompressed index")
    crc = masked(checksum.of_bytes(data[offset : end + 1]))
    if crc != struct.unpack_from("<I", data, end + 1)[0]:
        raise ValueError("the checksum of a block of the index is wrong")
    restarts = struct.unpack_from("<I", data, end - 4)[0]
    key, block = b"", io.BytesIO(data[offset:end])
    left = _MOST_EXPANDED * size
    while block.tell() < size - 4 * (restarts + 1):
        shared, fresh, length = varint(block), varint(block), varint(block)
        key = key[:shared] + block.read(fresh)
        left -= len(key)
        if left < 0:
            raise ValueError("the keys of the index are longer than TensorFlow's")
        yield key, block.read(length)


def _in_blocks(
    values: Iterable[tuple[bytes, bytes]],
) -> Iterator[list[tuple[bytes, bytes]]]:
    block: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in values:
        block.append((key, value))
        size += len(key) + len(value)
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _add_block(table: bytearray, values: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Appends a block to a table. Returns the handle of the block: its offset and size,
    as varints."""
    block = bytearray()
    restarts = []  # LevelDB's restart points: offsets of keys in full, here every key
    for key, value in values:
        restarts.append(len(block))
        block += _varint_bytes(0) + _varint_bytes(len(key)) + _varint_bytes(len(value))
        block += key + value
    restarts = restarts or [0]
    block += struct.pack(f"<{len(restarts)}II", *restarts, len(restarts))
    handle = _varint_bytes(len(table)) + _varint_bytes(len(block))
    block += _IS_PLAIN
    table += block + struct.pack("<I", masked(checksum.of_bytes(bytes(block))))
    return handle
