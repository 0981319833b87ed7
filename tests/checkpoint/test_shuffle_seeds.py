"""An iterator's state holds the seeds of its shuffles: every later pass has its order.

TensorFlow's own state lacks the seeds of shuffles whose elements are all taken, while
some of the elements wait in a batch, a prefetch or another shuffle.
"""

from __future__ import annotations

import gc
import io
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tfpreempt.checkpoint.tensors.iterator_state import keep_seeds  # noqa: E402
from tfpreempt.checkpoint.tensors.shuffle_seeds import seeds_of  # noqa: E402
from tfpreempt.data import from_index  # noqa: E402
from tfpreempt.states import DatasetIteratorState  # noqa: E402

Dataset = tf.data.Dataset
STEPS = 16  # at least two passes over twelve numbers, two in a batch


def numbers(count: int = 12) -> Any:
    return Dataset.range(count)


def shuffled(size: int = 8) -> Any:
    return numbers().shuffle(size, seed=3)


def files() -> Any:
    return (
        Dataset.range(4)
        .shuffle(4, seed=3)
        .interleave(
            lambda name: Dataset.range(3 * name, 3 * name + 3),
            cycle_length=2,
            block_length=1,
        )
    )


def halves() -> list[Any]:
    return [
        each.shuffle(6, seed=3).repeat() for each in (numbers(6), Dataset.range(6, 12))
    ]


def also_cached(data: Any) -> Any:
    return Dataset.zip(data.cache(), data).map(lambda one, other: 100 * one + other)


PIPELINES: dict[str, Callable[[], Any]] = {
    "repeated last": lambda: shuffled().batch(2).prefetch(2).repeat(),
    "read ahead twice": lambda: shuffled().batch(2).prefetch(2).repeat().prefetch(4),
    "repeated before the batch": lambda: shuffled().repeat().batch(2).prefetch(2),
    "batches over the end": lambda: shuffled().repeat().batch(5).prefetch(2),
    "mapped in parallel": lambda: (
        shuffled().map(lambda each: each, num_parallel_calls=2).batch(2).repeat()
    ),
    "repeated first": lambda: numbers().repeat().shuffle(8, seed=3).batch(2),
    "two shuffles": lambda: shuffled(12).shuffle(5, seed=3).batch(2).repeat(),
    "batches shuffled": lambda: (
        shuffled(12).batch(3).shuffle(4, seed=3).unbatch().batch(2).repeat()
    ),
    "files": lambda: files().shuffle(5, seed=3).batch(2).repeat(),
    "files in order": lambda: files().batch(2).prefetch(1).repeat(),
    "repeated three times": lambda: shuffled().batch(2).prefetch(2).repeat(3),
    "a repeat of a repeat": lambda: shuffled().repeat(2).batch(2).repeat(),
    "cached": lambda: shuffled().cache().batch(2).repeat(),
    "cached twice in a pass": lambda: shuffled().repeat(2).batch(4).cache().repeat(),
    "never cached completely": lambda: shuffled(12).cache().take(10).batch(2).repeat(),
    "cached and not cached": lambda: also_cached(shuffled()).batch(2).repeat(),
    "beside another cache": lambda: (
        Dataset.zip(shuffled().cache().shuffle(4, seed=5), numbers().cache())
        .map(lambda one, _: one)
        .batch(2)
        .repeat()
    ),
    "two ordered caches": lambda: (
        shuffled().cache().concatenate(shuffled(12).cache()).batch(4).repeat()
    ),
    "cached before": lambda: numbers().cache().shuffle(8, seed=3).batch(2).repeat(),
    "concatenated": lambda: (
        numbers(6)
        .shuffle(6, seed=3)
        .concatenate(Dataset.range(6, 12).shuffle(6, seed=3))
        .batch(2)
        .repeat()
    ),
    "zipped": lambda: (
        Dataset.zip(numbers(), shuffled()).map(lambda _, each: each).batch(2).repeat()
    ),
    "filtered": lambda: (
        numbers(24).filter(lambda each: each < 12).shuffle(8, seed=3).batch(2).repeat()
    ),
    "a part is taken": lambda: shuffled(12).take(10).batch(2).prefetch(2).repeat(),
    "a part is skipped": lambda: shuffled(12).skip(2).batch(2).prefetch(2).repeat(),
    "sampled": lambda: (
        Dataset.sample_from_datasets(halves(), [0.5, 0.5], seed=3).batch(2).prefetch(2)
    ),
    "random numbers": lambda: (
        Dataset.random(seed=3, rerandomize_each_iteration=True)
        .take(12)
        .batch(2)
        .prefetch(2)
        .repeat()
    ),
    "by keys": lambda: from_index(
        lambda index: index, 12, batch_size=2, seed=3
    ).repeat(),
    "not reshuffled": lambda: (
        numbers()
        .shuffle(8, seed=3, reshuffle_each_iteration=False)
        .batch(2)
        .prefetch(2)
        .repeat()
    ),
}


def read(iterator: Any, steps: int = STEPS) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in itertools.islice(iterator, steps)]


def keeping(data: Any) -> Any:
    """Returns a new iterator whose states include the seeds."""
    iterator = iter(data)
    keep_seeds(iterator)
    return iterator


def resumed_from(state: Any, data: Any) -> Any:
    """Returns a new iterator at a saved position."""
    iterator = keeping(data)
    iterator._restore_from_tensors(state)
    return iterator


@pytest.mark.parametrize("name", PIPELINES)
def test_a_state_of_any_step_is_exact(name: str) -> None:
    undisturbed = read(iter(PIPELINES[name]()))
    iterator, states = keeping(PIPELINES[name]()), []
    for step, batch in enumerate(undisturbed):
        time.sleep(0.005)  # sometimes prefetching gets far ahead
        states.append(iterator._serialize_to_tensors())
        assert read(iterator, 1) == [batch], step
    for step, state in enumerate(states):
        resumed = resumed_from(state, PIPELINES[name]())
        assert read(resumed, STEPS - step) == undisturbed[step:], step


def test_the_next_iterators_of_a_dataset_have_their_orders_too() -> None:
    make = PIPELINES["two shuffles"]
    data = make().take(6)
    undisturbed = [read(iter(data)) for _ in range(4)]
    data = make().take(6)
    read(iter(data))
    iterator = keeping(data)
    read(iterator, 4)
    file = io.BytesIO()
    DatasetIteratorState("before", iterator, registry=None).save(file)
    file.seek(0)
    data = make().take(6)
    resumed = iter(data)
    DatasetIteratorState("after", resumed, registry=None).load(file)
    assert read(resumed) == undisturbed[1][4:]
    assert [read(iter(data)) for _ in range(2)] == undisturbed[2:]


@pytest.mark.parametrize("is_read", [False, True])
def test_the_next_iterators_read_the_same_cache(is_read: bool) -> None:
    """A saved iterator at its end has no state of the cache behind a shuffle."""
    make = lambda: shuffled().cache().shuffle(4, seed=5).batch(2)  # noqa: E731
    data = make()
    undisturbed = [read(iter(data)) for _ in range(4)]
    data = make()
    iterator = keeping(data)
    read(iterator)
    if not is_read:
        iterator = keeping(data)
    state = iterator._serialize_to_tensors()
    data = make()
    resumed = resumed_from(state, data)
    if not is_read:
        assert read(resumed) == undisturbed[1]
    following = undisturbed[1 if is_read else 2 :]
    assert [read(iter(data)) for _ in following] == following


def test_a_state_is_restored_in_a_graph() -> None:
    """TensorFlow restores so where tasks are remote."""
    make = PIPELINES["repeated last"]
    iterator = keeping(make())
    read(iterator, 5)
    state = iterator._serialize_to_tensors()["_STATE"]
    resumed = keeping(make())

    @tf.function
    def restore(state: Any) -> None:
        resumed._restore_from_tensors({"_STATE": state})

    restore(state)
    assert read(resumed) == read(iterator)


def test_states_have_the_counts_that_are_held() -> None:
    """Keras makes iterators at the end of an epoch, and again in a restart of it."""
    make = lambda: numbers().shuffle(8, seed=3).batch(2)  # noqa: E731
    data = make()
    undisturbed = [read(iter(data)) for _ in range(3)]
    data = make()
    iterator = keeping(data)
    read(iterator)
    seeds_of(data).hold()
    assert read(iter(data)) == undisturbed[1]
    held = iterator._serialize_to_tensors()
    seeds_of(data).release()
    state = iterator._serialize_to_tensors()
    for saved, following in ((held, undisturbed[1]), (state, undisturbed[2])):
        data = make()
        resumed_from(saved, data)
        assert read(iter(data)) == following


def test_tensorflow_restores_a_state_with_seeds() -> None:
    make = PIPELINES["repeated before the batch"]
    iterator = keeping(make())
    read(iterator, 4)
    state = iterator._serialize_to_tensors()
    plain = iter(make())
    plain._restore_from_tensors(state)
    assert read(plain) == read(iterator)


def test_a_state_without_seeds_is_restored_as_tensorflow_does() -> None:
    make = PIPELINES["repeated before the batch"]
    plain = iter(make())
    read(plain, 4)
    state = plain._serialize_to_tensors()
    resumed = resumed_from(state, make())
    assert read(resumed) == read(plain)


def test_an_iterator_ends_with_its_last_reference() -> None:
    """Its threads end at once, not at the next garbage collection."""
    iterator = keeping(PIPELINES["repeated last"]())
    gone = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert gone() is None
    finally:
        gc.enable()
