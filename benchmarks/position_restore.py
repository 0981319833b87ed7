"""Measures the resume at batch 10**6 of an epoch, beside the resume at batch 10**2.

There are three pipelines over the same number of samples: `tfpreempt.data`, a seeded
shuffle with a buffer, and arrays as Keras 3 passes them to `fit`. Each pipeline is read
up to both batches once, which takes minutes, and the state of its iterator is kept.
Then the two states are restored in turn: a new dataset, its iterator, the state, the
first batch. The dataset is created before the timing starts: its creation costs the
same at every batch, and would hide the growth of the other costs. The row has this
time, too.

`exact` is whether every first batch was the batch that came next when the state was
saved. The bar is for tfpreempt's row; the other rows are for comparison. `ours` is the
far batch, `theirs` the near batch.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.row import compare

NEAR = 10**2
FAR = 10**6
BATCH = 32
SAMPLES = 33 * 10**6
BUFFER = 1024
BAR = 1.2
SAVES = 5
OURS = "tfpreempt.data.from_arrays"
IGNORE, FAIL = 1, 2
"""External state policies; what permutes in Keras is a random op, to be ignored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A saved state, the batch that came next, and the seconds that a save takes."""

    state: Any
    batch: Any
    save: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Durations of one restore, in seconds."""

    dataset: float
    position: float
    is_exact: bool


def rows(rounds: int = 15) -> Iterator[dict[str, Any]]:
    """Yields a row for each pipeline.

    Args:
        rounds: number of restores of each of the two states.
    """
    for name, (make, policy) in pipelines().items():
        yield measure(
            "position_restore",
            name,
            make,
            policy,
            places=(NEAR, FAR),
            rounds=rounds,
            bar=BAR if name == OURS else None,
        )


def measure(
    bench: str,
    pipeline: str,
    make: Callable[[], Any],
    policy: int,
    *,
    places: tuple[int, int],
    rounds: int,
    bar: float | None,
    **more: Any,
) -> dict[str, Any]:
    """Returns the row of one pipeline.

    Args:
        bench: name of the bench.
        pipeline: name of the pipeline.
        make: function that creates the dataset.
        policy: policy with which the state can be saved.
        places: numbers of the near batch and of the far batch.
        rounds: number of restores of each of the two states.
        bar: largest accepted ratio, see `row.compare`.
        **more: further facts for the row.
    """
    near, far = reach(make(), policy, places)
    found: list[tuple[Restore, Restore]] = []
    for number in range(rounds + 1):
        pair = restore(make, near), restore(make, far)
        if number:  # the first is a warm-up
            found.append(pair)
    both = [each for pair in found for each in pair]
    sizes = [sum(len(part) for part in packed(each.state)) for each in (near, far)]
    return compare(
        bench,
        [1e3 * far.position for _, far in found],
        [1e3 * near.position for near, _ in found],
        unit="ms",
        bar=bar,
        pipeline=pipeline,
        batches=[*places],
        exact=all(each.is_exact for each in both),
        state_bytes=sizes[1],
        state_bytes_near=sizes[0],
        save_ms=[round(1e3 * each.save, 3) for each in (near, far)],
        dataset_ms=round(1e3 * statistics.median(r.dataset for r in both), 3),
        **more,
    )


def pipelines() -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns a function that creates each dataset, and the policy of its state."""
    import numpy as np
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    from tfpreempt import data

    samples = np.arange(SAMPLES, dtype=np.int32)

    def ours() -> Any:
        return data.from_arrays(samples, batch_size=BATCH, seed=7)

    def shuffled() -> Any:
        return tf.data.Dataset.range(SAMPLES).shuffle(BUFFER, seed=7).batch(BATCH)

    def keras() -> Any:
        return ArrayDataAdapter(
            samples, batch_size=BATCH, shuffle=True
        ).get_tf_dataset()

    return {
        OURS: (ours, FAIL),
        f"Dataset.range.shuffle({BUFFER}).batch": (shuffled, FAIL),
        "arrays in Keras": (keras, IGNORE),
    }


def reach(
    dataset: Any, policy: int, places: tuple[int, int]
) -> tuple[Position, Position]:
    """Reads up to both batches."""
    import tensorflow as tf
    from tensorflow.python.ops import gen_dataset_ops

    @tf.function
    def read(iterator: Any, count: Any) -> None:
        for _ in tf.range(count):
            next(iterator)

    found = []
    iterator, done = iter(dataset), 0
    for goal in places:
        read(iterator, tf.constant(goal - done))
        took = []
        for _ in range(SAVES):
            began = time.perf_counter()
            resource = iterator._iterator_resource
            state = gen_dataset_ops.serialize_iterator(resource, policy)
            took.append(time.perf_counter() - began)
        save, batch = statistics.median(took), values(next(iterator))
        found.append(Position(state=state, batch=batch, save=save))
        done = goal + 1
    return found[0], found[1]


def restore(make: Callable[[], Any], to: Position) -> Restore:
    """Restores a state, as a restarted program does."""
    from tensorflow.python.ops import gen_dataset_ops

    began = time.perf_counter()
    dataset = make()
    made = time.perf_counter()
    iterator = iter(dataset)
    gen_dataset_ops.deserialize_iterator(iterator._iterator_resource, to.state)
    batch = values(next(iterator))
    ended = time.perf_counter()
    return Restore(
        dataset=made - began,
        position=ended - made,
        is_exact=bool((batch == to.batch).all()),
    )


def values(element: Any) -> Any:
    """Returns the samples of a batch."""
    return (element[0] if isinstance(element, tuple) else element).numpy()


def packed(state: Any) -> list[bytes]:
    """Returns the state in the saved form."""
    from tfpreempt.checkpoint.tensors.iterator_state import pack

    return pack(state)
