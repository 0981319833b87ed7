"""Datasets and functions that `distribute` is compared with TensorFlow on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.data import from_arrays, from_index

SIZE, BATCH = 50, 8
POLICIES = ("OFF", "DATA", "FILE", "AUTO")


def sharded(dataset: Any, policy: str) -> Any:
    """Data with a sharding policy."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    return dataset.with_options(options)


def symbolic(dataset: Any) -> Any:
    """Data whose state is a few numbers."""
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = True
    return dataset.with_options(options)


def plain(batch: int = BATCH, drop_remainder: bool = False) -> Any:
    """Numbers in order."""
    return tf.data.Dataset.range(SIZE).batch(batch, drop_remainder)


def of_files(directory: Path) -> Any:
    """Lines of six text files."""
    paths = []
    for number in range(6):
        path = directory / f"lines-{number}"
        path.write_text("".join(f"{number * 100 + i}\n" for i in range(7)))
        paths.append(str(path))
    files = tf.data.Dataset.from_tensor_slices(paths)
    return files.interleave(tf.data.TextLineDataset, cycle_length=2).batch(BATCH)


def nested() -> Any:
    """Dicts in tuples, of several dtypes."""

    def more(number: Any) -> Any:
        return {"a": number, "b": (tf.cast(number, tf.float32), [number])}, number

    return plain().map(more)


def ragged() -> Any:
    """Row i has i % 4 numbers."""
    rows = tf.RaggedTensor.from_row_lengths(
        np.arange(sum(i % 4 for i in range(SIZE))), [i % 4 for i in range(SIZE)]
    )
    return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)


def sparse() -> Any:
    """Row i has one number in five columns; TensorFlow can cut no empty slice."""
    size = SIZE // BATCH * BATCH
    where = [[i, i % 5] for i in range(size)]
    whole = tf.SparseTensor(where, np.arange(size), [size, 5])
    return tf.data.Dataset.from_tensor_slices(whole).batch(BATCH)


def shuffled() -> Any:
    """In an order of its own, twice."""
    return tf.data.Dataset.range(SIZE).shuffle(20, seed=3).batch(BATCH).repeat(2)


def by_worker(context: Any) -> Any:
    """Returns the data that each worker makes for itself."""
    size = context.get_per_replica_batch_size(12)
    numbers = tf.data.Dataset.range(SIZE)
    return numbers.shard(context.num_input_pipelines, context.input_pipeline_id).batch(
        size
    )


def make_cases(directory: Path) -> dict[str, Callable[[], Any]]:
    """Returns the cases by name, newly created in every call."""
    numbers = np.arange(SIZE)
    return {
        "arrays": lambda: from_arrays(numbers, batch_size=BATCH, seed=1),
        "arrays_dropped": lambda: from_arrays(
            (numbers, numbers / 2), batch_size=12, seed=1, drop_remainder=True
        ),
        "index": lambda: from_index(lambda i: (i, 2 * i), SIZE, batch_size=10, seed=2),
        "endless": lambda: plain(12, drop_remainder=True).repeat(),
        "uneven_DATA": lambda: sharded(plain(10, drop_remainder=True), "DATA"),
        "uneven_OFF": lambda: sharded(plain(10, drop_remainder=True), "OFF"),
        "last_row": lambda: sharded(plain(7), "DATA"),  # 50 = 7 * 7 + 1
        "by_worker": lambda: by_worker,
        **{
            f"{make.__name__}_{policy}": lambda make=make, policy=policy: sharded(
                make(), policy
            )
            for make, policies in (
                (plain, POLICIES),
                (shuffled, POLICIES),
                (nested, ("DATA",)),
                (ragged, ("DATA", "AUTO")),
                (sparse, ("DATA", "AUTO")),
            )
            for policy in policies
        },
        **{
            f"{make.__name__}_ahead": lambda make=make: symbolic(
                sharded(make(), "DATA")
            )
            for make in (plain, nested, ragged, sparse)
        },
        **{
            f"files_{policy}": lambda policy=policy: sharded(
                of_files(directory), policy
            )
            for policy in POLICIES
        },
    }


def read(strategy: Any, iterator: Any, most: int = 15) -> list[Any]:
    """Returns the values of each batch, component and replica here."""
    found = []
    for _ in range(most):
        try:
            batch = next(iterator)
        except StopIteration:
            break
        found.append([*map(shown, per_replica(strategy, batch))])
    return found


def per_replica(strategy: Any, batch: Any) -> Sequence[Any]:
    """Returns the values of each replica of this process."""
    return strategy.experimental_local_results(batch)  # type: ignore[no-any-return]


def shown(value: Any) -> Any:
    """JSON of any structure of tensors."""
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [*map(shown, value)]
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value, default_value=-1)
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    return [str(value.dtype), value.numpy().astype(str).tolist()]
