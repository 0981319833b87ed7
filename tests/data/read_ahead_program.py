"""Results of `distribute` if batches are copied to the devices before the step.

Two logical devices of the CPU, one of which is not the host's device, stand for GPUs.
Prints the results as JSON, by the name of each function below.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.data.cases import symbolic
from tests.multiprocess.harness import wait_until
from tfpreempt import data

SIZE, BATCH = 48, 8
HOST_AHEAD = 2  # that the host reads ahead itself
FOUND = {}


def found(function: Any) -> Any:
    """Records the result of the function."""
    FOUND[function.__name__] = function
    return function


@functools.cache
def strategy() -> Any:
    """Two replicas."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def numbers() -> Any:
    """Shuffled."""
    return data.from_arrays(np.arange(SIZE), batch_size=BATCH, seed=1)


def distributed(dataset: Any = None) -> Any:
    """An iterator."""
    dataset = numbers() if dataset is None else dataset
    return data.distribute(dataset, strategy(), tf.distribute.InputOptions())


@tf.function
def take(iterator: Any) -> Any:
    """A step."""
    return strategy().experimental_local_results(next(iterator))


def whole(slices: Any) -> list[int]:
    """A global batch."""
    return [int(each) for part in slices for each in part]


def rest(iterator: Any) -> list[list[int]]:
    """Returns all remaining global batches."""
    left = (strategy().experimental_local_results(each) for each in iterator)
    return [*map(whole, left)]


@found
def devices() -> list[str]:
    slices = strategy().experimental_local_results(next(distributed()))
    return [each.device[-5:] for each in slices]


@found
def devices_of_what_nobody_asked_for() -> list[str]:
    slices = next(data.distribute(numbers(), strategy()))
    return [each.device[-5:] for each in strategy().experimental_local_results(slices)]


@found
def place_behind_what_was_read() -> dict[str, Any]:
    read: list[int] = []

    def load(number: Any) -> Any:
        read.append(int(number))
        return number

    def count(number: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(load, [number], tf.int64), [])

    dataset = symbolic(tf.data.Dataset.range(SIZE).map(count).batch(1))
    iterator = distributed(dataset.map(lambda number: tf.repeat(number, 2)))
    taken = [whole(take(iterator)) for _ in range(3)]
    enough = len(taken) + HOST_AHEAD + 2
    wait_until(lambda: len(read) >= enough, "batches are read ahead")
    checkpoint = tf.train.Checkpoint(data=iterator)
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoint.write(str(Path(directory) / "ckpt"))
        taken += [whole(take(iterator))]
        checkpoint.read(path).assert_consumed()
        return {"taken": taken, "again": whole(take(iterator))}


@found
def function_that_holds_the_iterator() -> dict[str, Any]:
    """A traced function continues from the restored position, also from the end."""
    iterator = distributed()
    step = tf.function(lambda: strategy().experimental_local_results(next(iterator)))
    taken = [whole(step()) for _ in range(2)]
    checkpoint = tf.train.Checkpoint(data=iterator)
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoint.write(str(Path(directory) / "ckpt"))
        first = rest(iterator)
        checkpoint.read(path).assert_consumed()
        second = [whole(step()) for _ in first]
    return {"taken": taken, "first": first, "second": second}


@found
def expected() -> list[list[int]]:
    return [batch.numpy().tolist() for batch in numbers()]


@found
def places_by_any_iterator() -> list[list[int]]:
    """A position of two devices is restored on one device, and vice versa."""
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    taken = []
    with tempfile.TemporaryDirectory() as directory:
        path = None
        for number, each in enumerate([strategy(), one, strategy(), one]):
            iterator = data.distribute(numbers(), each, tf.distribute.InputOptions())
            checkpoint = tf.train.Checkpoint(data=iterator)
            if path is not None:
                checkpoint.read(path).assert_consumed()
            taken.append(whole(each.experimental_local_results(next(iterator))))
            path = checkpoint.write(str(Path(directory) / f"ckpt-{number}"))
    return taken


@found
def error() -> dict[str, Any]:
    """The error occurs long before the earlier batches are used."""
    is_met = threading.Event()

    def load(number: Any) -> Any:
        if number == 2 * BATCH:
            is_met.set()
            raise ValueError("a broken record")
        return number

    def sample(number: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(load, [number], tf.int64), [])

    iterator = distributed(
        data.from_index(
            sample, SIZE, batch_size=BATCH, shuffle=False, num_parallel_calls=1
        )
    )
    taken = [whole(take(iterator))]
    assert is_met.wait(60)
    taken.append(whole(take(iterator)))
    try:
        take(iterator)
    except tf.errors.OpError as raised:
        return {"taken": taken, "raised": raised.message}
    return {"taken": taken}


@found
def optional_and_loop() -> list[Any]:
    """Returns sums of the first two batches, and of all later batches in one call."""

    @tf.function
    def one(iterator: Any) -> Any:
        return iterator.get_next_as_optional()

    @tf.function
    def others(iterator: Any) -> Any:
        added = tf.constant(0, tf.int64)
        for batch in iterator:
            part = strategy().run(tf.reduce_sum, (batch,))
            added += strategy().reduce("SUM", part, axis=None)
        return added

    iterator = distributed()
    taken = [one(iterator).get_value() for _ in range(2)]
    slices = map(strategy().experimental_local_results, taken)
    sums = [*map(sum, map(whole, slices)), int(others(iterator))]
    return [*sums, bool(one(iterator).has_value())]


@found
def traces() -> int:
    """Counts traces, with an iterator for each epoch."""
    step = tf.function(take.python_function)
    for _ in range(3):
        step(distributed())
    return step.experimental_get_tracing_count()


@found
def threads_left() -> int:
    """Counts threads of deleted iterators, without the garbage collector."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    gc.disable()
    try:
        next(distributed())
        before = threads()
        for _ in range(3):
            next(distributed())
        return threads() - before
    finally:
        gc.enable()


if __name__ == "__main__":
    print(json.dumps({name: function() for name, function in FOUND.items()}))
