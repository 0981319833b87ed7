"""Positions of tf.data pipelines: the rest of an epoch, and all later epochs.

The model records its inputs. It is small and runs eagerly, so that many pipelines can
be interrupted at many positions.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import Machine, Seen, X, Y, machine  # noqa: E402
from tfpreempt.checkpoint.tensors.iterator_state import hidden_state  # noqa: E402

SAMPLES, EPOCHS, STEPS = 18, 3, 5
Dataset = tf.data.Dataset


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


# --- pipelines -----------------------------------------------------------------------


def numbers(first: Any = 0, end: Any = SAMPLES) -> Any:
    """Returns samples that are their own indices."""
    return Dataset.range(first, end)


def rows(data: Any) -> Any:
    return data.map(lambda batch: tf.cast(batch, tf.float32)[:, None])


def files(seed: int | None) -> Any:
    """Returns a shuffle of files, read a few at a time, and of their records."""
    names = Dataset.range(6).shuffle(6, seed=seed)
    records = names.interleave(
        lambda name: numbers(3 * name, 3 * name + 3), cycle_length=2, block_length=1
    )
    return records.shuffle(8, seed=seed)


def generated() -> Iterator[int]:
    yield from np.random.default_rng(3).permutation(SAMPLES)


def three_shuffles(seed: int | None) -> Any:
    once = numbers().shuffle(SAMPLES, seed=seed)
    return once.shuffle(5, seed=seed).batch(2).shuffle(4, seed=seed).unbatch()


def also_cached(data: Any) -> Any:
    return Dataset.zip(data.cache(), data).map(lambda one, other: 100 * one + other)


PIPELINES: dict[str, Callable[[int | None], Any]] = {
    "shuffled": lambda seed: numbers().shuffle(SAMPLES, seed=seed).batch(4),
    "small buffer": lambda seed: numbers().shuffle(5, seed=seed).batch(4),
    "not reshuffled": lambda seed: (
        numbers().shuffle(9, seed=seed, reshuffle_each_iteration=False).batch(4)
    ),
    "batches shuffled": lambda seed: numbers().batch(4).shuffle(3, seed=seed),
    "two shuffles": lambda seed: (
        numbers().shuffle(SAMPLES, seed=seed).shuffle(5, seed=seed).batch(4)
    ),
    "three shuffles": lambda seed: three_shuffles(seed).batch(4),
    "files": lambda seed: files(seed).batch(4),
    "prefetched": lambda seed: (
        numbers()
        .shuffle(SAMPLES, seed=seed)
        .map(lambda value: value, num_parallel_calls=2)
        .batch(4)
        .prefetch(tf.data.AUTOTUNE)
    ),
    "cached": lambda seed: numbers().cache().shuffle(SAMPLES, seed=seed).batch(4),
    "shuffled, cached": lambda seed: (
        numbers().shuffle(SAMPLES, seed=seed).batch(4).cache()
    ),
    "shuffled, cached, shuffled": lambda seed: (
        numbers().shuffle(9, seed=seed).batch(4).cache().shuffle(3, seed=seed)
    ),
    "cached twice": lambda seed: (
        numbers(0, 9).shuffle(9, seed=seed).repeat(2).batch(4).cache()
    ),
    "never cached completely": lambda seed: (
        numbers(0, 40).shuffle(40, seed=seed).cache().take(SAMPLES).batch(4)
    ),
    "cached and not cached": lambda seed: also_cached(
        numbers().shuffle(9, seed=seed)
    ).batch(4),
    "filtered": lambda seed: (
        numbers(0, 2 * SAMPLES)
        .filter(lambda value: value < SAMPLES)
        .shuffle(SAMPLES, seed=seed)
        .batch(4)
    ),
    "zipped": lambda seed: (
        Dataset.zip(numbers(), numbers().shuffle(9, seed=seed))
        .map(lambda _, value: value)
        .batch(4)
    ),
    "concatenated": lambda seed: (
        numbers(0, 9)
        .shuffle(9, seed=seed)
        .concatenate(numbers(9, SAMPLES).shuffle(5, seed=seed))
        .batch(4)
    ),
    "repeated": lambda seed: numbers().shuffle(SAMPLES, seed=seed).repeat().batch(4),
    "repeated last": lambda seed: (
        numbers().shuffle(SAMPLES, seed=seed).batch(4).prefetch(2).repeat()
    ),
    "files, repeated": lambda seed: files(seed).batch(4).prefetch(2).repeat(),
    "repeated twice": lambda seed: (
        numbers(0, 9).shuffle(9, seed=seed).batch(4).prefetch(2).repeat(2)
    ),
    "repeated and shuffled": lambda seed: (
        numbers().repeat().shuffle(9, seed=seed).batch(4)
    ),
    "sampled": lambda seed: Dataset.sample_from_datasets(
        [numbers(0, 9), numbers(9, SAMPLES)], [0.5, 0.5], seed=seed
    ).batch(4),
    "shuffled files": lambda seed: (
        Dataset.range(6)
        .shuffle(6, seed=seed)
        .interleave(
            lambda name: numbers(3 * name, 3 * name + 3).shuffle(3, seed=seed),
            cycle_length=2,
        )
        .batch(4)
    ),
    "shuffled files, repeated and cached": lambda seed: (
        Dataset.range(3)
        .interleave(
            lambda name: (
                numbers(3 * name, 3 * name + 3)
                .shuffle(3, seed=seed)
                .cache()
                .shuffle(3, seed=seed)
                .repeat(2)
                .batch(2)
            ),
            cycle_length=2,
        )
        .unbatch()
        .batch(4)
    ),
    "generator": lambda seed: Dataset.from_generator(
        generated, output_signature=tf.TensorSpec([], tf.int64)
    ).batch(4),
    "generator, never cached completely": lambda seed: (
        Dataset.from_generator(
            lambda: range(40), output_signature=tf.TensorSpec([], tf.int64)
        )
        .shuffle(40, seed=seed)
        .cache()
        .take(SAMPLES)
        .shuffle(9, seed=seed)
        .batch(4)
    ),
    "beside another cache": lambda seed: (
        Dataset.zip(
            numbers(0, 2000).cache(),
            numbers(0, 2000).shuffle(2000, seed=seed).cache().shuffle(9, seed=seed),
        )
        .map(lambda _, value: value)
        .batch(100)
    ),
    "generator, shuffled, cached": lambda seed: (
        Dataset.from_generator(generated, output_signature=tf.TensorSpec([], tf.int64))
        .shuffle(9, seed=seed)
        .batch(4)
        .cache()
    ),
    "generator, cached": lambda seed: (
        Dataset.from_generator(generated, output_signature=tf.TensorSpec([], tf.int64))
        .shuffle(9, seed=seed)
        .cache()
        .shuffle(9, seed=seed)
        .batch(4)
    ),
}
ENDLESS = {
    "repeated",
    "repeated last",
    "files, repeated",
    "repeated and shuffled",
}

MIDDLE = [("begin", 1, 3)]
OFTEN = [("end", 0, 0), ("begin", 1, 4), ("epoch", 1, 0), ("end", 2, 2)]
CUTS = {"keras": [MIDDLE, OFTEN], "tf_keras": [OFTEN]}


def train(
    on: Machine, data: Callable[[], Any], *cuts: Any, seed: int | None = 7, **more: Any
) -> list[list[list[int]]]:
    """The batches of each epoch; without cuts, of Keras without our callback."""
    seen = Seen()

    def program() -> None:
        ours = [on.preemption(save_freq=None)] if cuts else []
        seen.model(on).fit(
            rows(data()),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[*ours, seen.callback(on), on.interrupter()],
            **more,
        )

    on.run(program, *cuts, seed=seed)
    shutil.rmtree(on.checkpoints, ignore_errors=True)
    return [seen.epochs[epoch] for epoch in range(EPOCHS)]


@functools.cache
def undisturbed(line: str, name: str) -> list[list[list[int]]]:
    with machine(line) as on:
        return train(on, lambda: PIPELINES[name](3), **options(name))


def options(name: str) -> dict[str, int]:
    return {"steps_per_epoch": STEPS} if name in ENDLESS else {}


# --- the rest of the epoch and all later ones ----------------------------------------


@LINES
@pytest.mark.parametrize("name", PIPELINES)
def test_a_seeded_pipeline_resumes_exactly(on: Machine, line: str, name: str) -> None:
    for cuts in CUTS[line]:
        found = train(on, lambda: PIPELINES[name](3), *cuts, **options(name))
        assert found == undisturbed(line, name), cuts


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("keras", "three shuffles"),
        ("keras", "shuffled, cached, shuffled"),
        ("keras", "files"),
        ("keras", "concatenated"),
        ("keras", "repeated"),
        ("tf_keras", "two shuffles"),
    ],
)
def test_more_epochs_than_last_time(on: Machine, line: str, name: str) -> None:
    """The added epochs have the orders of one long fit."""
    seen = Seen()

    def program(epochs: int) -> None:
        given = {"epochs": epochs, "verbose": 0} | options(name)
        ours = on.preemption(save_freq=None)
        data = rows(PIPELINES[name](3))
        seen.model(on).fit(data, callbacks=[ours, seen.callback(on)], **given)

    for epochs in range(1, EPOCHS + 1):
        on.run(functools.partial(program, epochs))
    found = [seen.epochs[epoch] for epoch in range(EPOCHS)]
    assert found == undisturbed(line, name)


@LINES
@pytest.mark.parametrize("name", ["repeated last", "files, repeated"])
def test_a_pipeline_is_exact_wherever_an_epoch_was_interrupted(
    on: Machine, line: str, name: str
) -> None:
    """Also where the shuffle has given all elements and batches of them still wait."""
    for epoch, batch in itertools.product(range(2), range(STEPS)):
        found = train(
            on, lambda: PIPELINES[name](3), ("end", epoch, batch), **options(name)
        )
        assert found == undisturbed(line, name), (epoch, batch)


@LINES
def test_the_global_seed_is_a_seed(on: Machine, line: str) -> None:
    data = functools.partial(PIPELINES["two shuffles"], None)
    assert train(on, data, *OFTEN) == train(on, data)


@pytest.mark.parametrize(
    ("line", "steps"), [("keras", 3), ("keras", STEPS), ("tf_keras", STEPS)]
)
def test_epochs_that_are_not_those_of_the_data(
    on: Machine, line: str, steps: int
) -> None:
    """Keras 3 ends an epoch at the end of the data, which the next epoch restarts."""
    data = functools.partial(PIPELINES["two shuffles"], 3)
    cuts = [("begin", 0, 2), ("begin", 1, 1), ("epoch", 1, 0), ("end", 2, 1)]
    found = train(on, data, *cuts, steps_per_epoch=steps)
    assert found == train(on, data, steps_per_epoch=steps)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        *(("keras", name) for name in ("two shuffles", "files", "prefetched")),
        ("keras", "shuffled files"),
        *((line, "filtered") for line in ("keras", "tf_keras")),
    ],
)
def test_unseeded_every_sample_once(on: Machine, line: str, name: str) -> None:
    data = functools.partial(PIPELINES[name], None)
    for epoch in train(on, data, *OFTEN, seed=None):
        assert sorted(itertools.chain(*epoch)) == list(range(SAMPLES))


@LINES
def test_unseeded_and_repeated_every_sample_once(on: Machine, line: str) -> None:
    """The epochs are 20 samples, a pass over the data has 18."""
    data = functools.partial(PIPELINES["repeated"], None)
    found = train(on, data, *OFTEN, seed=None, steps_per_epoch=STEPS)
    order = list(itertools.chain(*itertools.chain(*found)))
    for first in range(0, len(order) - SAMPLES + 1, SAMPLES):
        assert sorted(order[first : first + SAMPLES]) == list(range(SAMPLES))


# --- what it takes -------------------------------------------------------------------


@LINES
def test_a_commit_holds_a_large_position_once(on: Machine, line: str) -> None:
    """A shuffle may fill half of the memory; another copy would end the process."""
    count, width = 32, 1 << 18  # 32 MiB, much larger than all else
    draw = lambda value: tf.random.stateless_uniform([width], tf.stack([value, value]))  # noqa: E731
    data = numbers(0, 2 * count).map(draw).shuffle(count, seed=3).batch(2)
    highest: list[int] = []

    def before_the_save(batch: int, logs: Any = None) -> None:
        if batch == 3:
            tracemalloc.start()

    def after_it(batch: int, logs: Any = None) -> None:
        if batch == 3:
            highest.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    watch = {"on_train_batch_begin": before_the_save, "on_train_batch_end": after_it}
    ours = on.preemption(save_freq=3)
    on.start()
    model = Seen().model(on)
    model.fit(data, epochs=1, verbose=0, callbacks=[on.callback(**watch), ours])
    size = 4 * count * width  # float32
    assert size < highest[0] < 1.5 * size


# --- what cannot be exact is said ----------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> str:
    kept = ("input pipeline", "reads the batches")
    messages = [record.getMessage() for record in caplog.records]
    return "\n".join(m for m in messages if any(word in m for word in kept))


@pytest.mark.parametrize("is_behind", [False, True])
@LINES
def test_a_stateful_map_is_named(
    on: Machine, line: str, is_behind: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every sample comes once and in order, but the random numbers of the op are lost.

    TensorFlow itself detects an op behind a shuffle after the first read.
    """

    def data() -> Any:
        noise = lambda value: value + tf.cast(tf.random.uniform([], 0, 0.5), tf.int64)  # noqa: E731
        if is_behind:
            return numbers().map(noise).shuffle(SAMPLES, seed=3).batch(4)
        return numbers().shuffle(SAMPLES, seed=3).map(noise).batch(4)

    with caplog.at_level(logging.WARNING):
        found = train(on, data, *OFTEN)
    assert found == undisturbed(line, "shuffled")
    assert "RandomUniform" in said(caplog)
    assert "tf.random.stateless_*" in said(caplog)


def checked(value: Any) -> Any:
    return tf.debugging.check_numerics(tf.cast(value, tf.float32), "a bad value")


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (checked, None),
        (tf.function(checked), None),
        (lambda value: checked(value) + tf.random.uniform([]), "RandomUniform"),
        (lambda value: tf.function(at_random)(checked(value)), "RandomUniform"),
    ],
)
def test_a_check_of_values_has_no_state(function: Any, op: str | None) -> None:
    """TensorFlow calls the op of the check stateful, and names no further op."""
    found = hidden_state(numbers().map(function), allows_checks=True)
    assert found == (op and f"{op} is stateful.")


@pytest.mark.parametrize("is_random", [False, True])
def test_a_shuffle_of_each_file_has_no_hidden_state(is_random: bool) -> None:
    """The seeds are in the state of the shuffle, which is a part of the position."""

    def read(name: Any) -> Any:
        file = Dataset.range(3).cache().shuffle(3, seed=3).map(checked)
        return file.map(at_random) if is_random else file

    found = hidden_state(Dataset.range(6).interleave(read), allows_checks=True)
    assert found == ("RandomUniform is stateful." if is_random else None)


def at_random(value: Any) -> Any:
    return value + tf.random.uniform([])


@LINES
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("generator", "a Python generator"),
        ("sampled", "may wait for ever at their end"),
    ],
)
def test_a_pipeline_without_a_position_is_named(
    on: Machine, line: str, name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(on, lambda: PIPELINES[name](3), *MIDDLE)
    assert reason in said(caplog)
    assert "PyDataset" in said(caplog)


@LINES
def test_a_cache_in_memory_is_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(on, lambda: PIPELINES["cached"](3), *MIDDLE)
    assert "caches in memory" in said(caplog)
    assert "cache(path)" in said(caplog)


@LINES
@pytest.mark.parametrize(
    ("name", "buffer", "is_needed"),
    [
        ("small buffer", 5, True),
        ("shuffled", SAMPLES, False),  # the buffer has the rest of the epoch
    ],
)
def test_data_of_a_lost_cache_are_read_again(
    on: Machine,
    line: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    buffer: int,
    is_needed: bool,
) -> None:
    """TensorFlow ends the process where such a position is restored."""

    def data() -> Any:
        for file in tmp_path.iterdir():  # each start has a disk of its own
            file.unlink()
        cached = numbers().cache(str(tmp_path / "cache"))
        return cached.shuffle(buffer, seed=3).batch(4)

    with caplog.at_level(logging.WARNING):
        found = train(on, data, ("begin", 1, 1), ("end", 2, 1))
    assert found == undisturbed(line, name)
    assert caplog.text.count("cache.index") == is_needed
    assert "Cache to a file" not in caplog.text


@LINES
def test_caches_that_a_killed_run_began_are_written_again(
    on: Machine, line: str, tmp_path: Path
) -> None:
    """TensorFlow refuses to write a cache while there is a lock file."""
    given = {}
    for name in ("x", "validation_data"):
        lock = tmp_path / f"{name}_0.lockfile"
        lock.touch()
        os.utime(lock, (1e9, 1e9))
        cached = Dataset.from_tensor_slices((X, Y)).cache(str(tmp_path / name))
        given[name] = cached.batch(4)
    on.run(functools.partial(on.fit, y=None, epochs=1, **given))
    assert list(tmp_path.glob("*.lockfile")) == []
    assert len(list(tmp_path.glob("*.index"))) == 2


@LINES
def test_validation_data_that_change_are_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = Dataset.from_tensor_slices((X, Y))
    endless = ((X[:2], Y[:2]) for _ in itertools.count())
    for data, word in (
        (pairs.shuffle(4).batch(4).prefetch(1), "validation_data are shuffled"),
        (endless, "validation_data is a Python generator"),
        (pairs.batch(4), None),
        ((X, Y), None),
    ):
        caplog.clear()
        given = {"validation_data": data, "validation_steps": 1, "epochs": 1}
        on.run(functools.partial(on.fit, **given))
        shutil.rmtree(on.checkpoints)
        assert word is None or word in caplog.text
        assert ("validation_data" in caplog.text) == (word is not None)


@LINES
@pytest.mark.parametrize(
    "name", ["files", "repeated", "repeated last", "repeated twice", "filtered"]
)
def test_an_exact_resume_logs_no_warning(
    on: Machine, line: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(on, lambda: PIPELINES[name](3), *MIDDLE, **options(name))
    assert said(caplog) == ""
