"""Measures the resume at batch 10**5 of files of records, beside batch 10**2.

A million small records are in TFRecord files, in memory, and are read in two ways. The
first is `tfpreempt.data.from_index` with an index of the offset of each record, which
shuffles all records. The second is TensorFlow's own `interleave`, `shuffle(1024)`,
`map` and `prefetch`, whose state has the buffer and the position in each file. Each
pipeline is read up to both batches, and the states are restored in turn, as in
position_restore.py. `save_ms` is the time to serialize the state at the near batch and
at the far batch.

The bar is for tfpreempt's row; the other row is for comparison. `ours` is the far
batch, `theirs` the near batch.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.position_restore import BAR, BUFFER, FAIL, IGNORE, measure
from benchmarks.row import MEMORY

NEAR = 10**2
FAR = 10**5
BATCH = 8
FILES = 16
RECORDS = 10**6
NUMBERS = 4  # int64, in each record
OURS = "tfpreempt.data.from_index"
THEIRS = f"TFRecordDataset.interleave.shuffle({BUFFER}).map.batch.prefetch"
HEAD = struct.Struct("<QI")  # a record's length, with its checksum
TAIL = 4  # the checksum of its bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The columns of an index: the position of each record."""

    file: Any
    offset: Any
    size: Any


def rows(rounds: int = 15) -> Iterator[dict[str, Any]]:
    """Yields a row for each way to read the files.

    Args:
        rounds: number of restores of each of the two states.
    """
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tfpreempt-bench-", dir=memory) as made:
        paths = write_files(Path(made))
        # A function of Python has no state that TensorFlow could know of.
        ours = with_index(paths), IGNORE
        theirs = with_tensorflow(paths), FAIL
        for name, (make, policy) in {OURS: ours, THEIRS: theirs}.items():
            yield measure(
                "position_in_files",
                name,
                make,
                policy,
                places=(NEAR, FAR),
                rounds=rounds,
                bar=BAR if name == OURS else None,
                records=RECORDS,
            )


def write_files(directory: Path) -> list[str]:
    """Writes the records, numbered across the files."""
    import tensorflow as tf

    paths = [str(directory / f"{number:02}.tfrecord") for number in range(FILES)]
    for path, numbers in zip(
        paths, np.array_split(np.arange(RECORDS), FILES), strict=True
    ):
        with tf.io.TFRecordWriter(path) as writer:
            for number in numbers:
                writer.write(np.full(NUMBERS, number, np.int64).tobytes())
    return paths


def index(paths: list[str]) -> Record:
    """Finds the records by their headers; a user stores the index once."""
    found = []
    for number, path in enumerate(paths):
        data, place = Path(path).read_bytes(), 0
        while place < len(data):
            size, _ = HEAD.unpack_from(data, place)
            found.append((number, place + HEAD.size, size))
            place += HEAD.size + size + TAIL
    file, offset, size = np.array(found).T
    return Record(file=file, offset=offset, size=size)


def with_index(paths: list[str]) -> Callable[[], Any]:
    """Returns the dataset that reads each record at the position in the index."""
    import tensorflow as tf

    from tfpreempt.data import from_index

    at = index(paths)
    files = [open(path, "rb") for path in paths]  # noqa: SIM115 - as long as the bench

    def read(number: Any) -> Any:
        file = files[at.file[number]].fileno()
        data = os.pread(file, int(at.size[number]), int(at.offset[number]))
        return np.frombuffer(data, np.int64)

    def load(number: Any) -> Any:
        record = tf.numpy_function(read, [number], tf.int64, stateful=False)
        return tf.ensure_shape(record, [NUMBERS])

    return lambda: from_index(load, len(at.file), batch_size=BATCH, seed=7)


def with_tensorflow(paths: list[str]) -> Callable[[], Any]:
    """Returns the dataset that reads several files at a time, from begin to end."""
    import tensorflow as tf

    def make() -> Any:
        records = tf.data.Dataset.from_tensor_slices(paths).interleave(
            tf.data.TFRecordDataset,
            cycle_length=4,
            block_length=16,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        shuffled = records.shuffle(BUFFER, seed=7)
        numbers = shuffled.map(
            lambda record: tf.io.decode_raw(record, tf.int64),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return numbers.batch(BATCH).prefetch(tf.data.AUTOTUNE)

    return make
