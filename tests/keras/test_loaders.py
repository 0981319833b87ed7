"""Positions of other loaders: Grain's, and iterators with a position.

The model records its inputs, as in test_position.py.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.small_fit import Machine, Seen, machine  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.states import LoaderState  # noqa: E402

SAMPLES, BATCH, STEPS, EPOCHS = 22, 4, 6, 3
READ: list[int] = []
"""The samples that were read, in the process of the test, since it was cleared."""


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def row(number: Any) -> Any:
    READ.append(int(number))
    return np.full([1], number, "float32")


def samples() -> Any:
    return grain.MapDataset.range(SAMPLES).seed(3).shuffle().map(row)


def grain_loader() -> Any:
    sampler = grain.samplers.IndexSampler(
        SAMPLES,
        shard_options=grain.sharding.NoSharding(),
        shuffle=True,
        num_epochs=1,
        seed=5,
    )

    class Row(grain.transforms.Map):
        def map(self, number: Any) -> Any:
            return row(number)

    return grain.DataLoader(
        data_source=np.arange(SAMPLES),
        sampler=sampler,
        operations=[Row(), grain.transforms.Batch(BATCH)],
        worker_count=0,
    )


def ahead(dataset: Any, threads: int, count: int) -> Any:
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=count)
    return dataset.to_iter_dataset(options)


GRAIN: dict[str, Callable[[], Any]] = {
    "a MapDataset": lambda: samples().batch(BATCH),
    "an IterDataset": lambda: ahead(samples().batch(BATCH), 0, 0),
    "ahead in threads": lambda: ahead(samples().batch(BATCH), 4, 16),
    "windows shuffled": lambda: grain.experimental.WindowShuffleIterDataset(
        ahead(samples().batch(BATCH), 2, 4), window_size=3, seed=2
    ),
    "a DataLoader": grain_loader,
    "without an end": lambda: ahead(samples().repeat().batch(BATCH), 2, 8),
}


class Rows:
    """A user's iterator, with one of the two pairs of methods."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> Any:
        numbers = np.random.default_rng(self.place).integers(1000, size=BATCH)
        self.place += 1
        return np.stack([row(number) for number in numbers])


class RowsWithState(Rows):
    def get_state(self) -> Any:
        return {"place": self.place}

    def set_state(self, state: Any) -> None:
        self.place = state["place"]


class RowsThatBeginAnew(RowsWithState):
    """Restarts with each iteration, as many loaders do; tf_keras repeats a batch."""

    def __iter__(self) -> Rows:
        self.place = 0
        return self


class RowsElsewhere(RowsWithState):
    """Its iterator is another object, whose position is not in its own state."""

    def __iter__(self) -> Any:
        return Rows()


class RowsWithStateDict(Rows):
    def state_dict(self) -> Any:
        return {"place": np.int64(self.place)}

    def load_state_dict(self, state: Any) -> None:
        self.place = int(state["place"])


def train(on: Machine, data: Callable[[], Any], *cuts: Any, **more: Any) -> Any:
    """The batches of each epoch; without cuts, of Keras without our callback."""
    seen = Seen()

    def program() -> None:
        READ.clear()
        ours = [on.preemption(save_freq=None)] if cuts else []
        given = {"epochs": EPOCHS, "verbose": 0} | more
        model = seen.model(on)
        size = given.pop("steps_per_execution", 1)
        model.compile("sgd", "mse", run_eagerly=True, steps_per_execution=size)
        model.fit(
            data(), callbacks=[*ours, seen.callback(on), on.interrupter()], **given
        )

    on.run(program, *cuts)
    shutil.rmtree(on.checkpoints, ignore_errors=True)
    return [seen.epochs[epoch] for epoch in sorted(seen.epochs)]


OFTEN = [
    *(("begin", 0, 2), ("end", 0, 4), ("begin", 1, 4), ("epoch", 1, 0)),
    ("end", 2, 2),
]


def options(name: str) -> dict[str, int]:
    return {"steps_per_epoch": 5} if name == "without an end" else {}


@functools.cache
def undisturbed(name: str) -> Any:
    with machine("keras") as on:
        return train(on, GRAIN[name], **options(name))


# --- Grain, which Keras 3 takes ------------------------------------------------------

KERAS = pytest.mark.parametrize("line", ["keras"])


@KERAS
@pytest.mark.parametrize("name", GRAIN)
def test_grain_resumes_exactly(on: Machine, line: str, name: str) -> None:
    found = train(on, GRAIN[name], *OFTEN, **options(name))
    assert found == undisturbed(name)


@KERAS
@pytest.mark.parametrize("name", ["an IterDataset", "a DataLoader"])
def test_nothing_is_read_again(
    on: Machine, line: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Keras reads two batches to find their shapes; three are left for training."""
    with caplog.at_level(logging.WARNING):
        train(on, GRAIN[name], ("begin", 2, 3))
    assert len(READ) == 2 * BATCH + SAMPLES - 3 * BATCH
    assert "batches before the position again" not in caplog.text


@KERAS
@pytest.mark.parametrize("size", [2, 4])
def test_steps_of_several_batches(on: Machine, line: str, size: int) -> None:
    """Of six batches the last step of four has two."""
    data = GRAIN["ahead in threads"]
    cuts = [("begin", 0, size), ("epoch", 1, 0), ("begin", 2, 4)]
    found = train(on, data, *cuts, steps_per_execution=size)
    assert found == undisturbed("ahead in threads")


@KERAS
def test_a_validation_after_a_step_that_was_cut_short(on: Machine, line: str) -> None:
    given = {"steps_per_execution": 4, "validation_data": np.ones([2, 1], "float32")}
    found = train(on, GRAIN["a MapDataset"], ("test", 1, 0), **given)
    assert found == undisturbed("a MapDataset")


@KERAS
@pytest.mark.parametrize("name", ["a MapDataset", "without an end"])
def test_more_epochs_than_last_time(on: Machine, line: str, name: str) -> None:
    seen = Seen()

    def program(epochs: int) -> None:
        ours = on.preemption(save_freq=None)
        given = {"epochs": epochs, "verbose": 0} | options(name)
        callbacks = [ours, seen.callback(on)]
        seen.model(on).fit(GRAIN[name](), callbacks=callbacks, **given)

    for epochs in range(1, EPOCHS + 1):
        on.run(functools.partial(program, epochs))
    assert [seen.epochs[epoch] for epoch in range(EPOCHS)] == undisturbed(name)


@KERAS
def test_another_dataset_of_grain_is_a_mismatch(on: Machine, line: str) -> None:
    sizes = iter([SAMPLES, 3 * BATCH])

    def data() -> Any:
        return grain.MapDataset.range(next(sizes)).map(row).batch(BATCH)

    with pytest.raises(
        errors.CheckpointMismatchError, match=r"does not accept.*out of range"
    ):
        train(on, data, ("begin", 0, 5))


# --- a user's iterators, which tf_keras takes ----------------------------------------

TF_KERAS = pytest.mark.parametrize("line", ["tf_keras"])
OWN = {"epochs": EPOCHS, "steps_per_epoch": STEPS}


@TF_KERAS
@pytest.mark.parametrize("kind", [RowsWithState, RowsWithStateDict, RowsThatBeginAnew])
def test_a_users_iterator_resumes_at_once(
    on: Machine, line: str, kind: type[Rows], caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(on, kind, **OWN)
    with caplog.at_level(logging.WARNING):
        assert train(on, kind, *OFTEN, **OWN) == expected
    assert "batches before the position again" not in caplog.text
    # One batch to find the shapes, three remaining batches, and the prefetched batches.
    assert len(READ) <= BATCH * (1 + 3 + 6)


@TF_KERAS
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": Rows}, "a Python generator"),
        ({"data": RowsElsewhere}, "a Python generator"),
        ({"state": {1, 2}}, r"the state of the loader is {1, 2} (set)"),
        ({"state": ValueError("lost")}, "ValueError: lost"),
    ],
)
def test_without_a_position_all_batches_are_read_again(
    on: Machine,
    line: str,
    given: dict[str, Any],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(RowsWithState):
        def get_state(self) -> Any:
            state = given.get("state", self.place)
            if isinstance(state, Exception):
                raise state
            return state

    expected = train(on, given.get("data", Rows), **OWN)
    with caplog.at_level(logging.WARNING):
        assert train(on, given.get("data", Odd), *OFTEN, **OWN) == expected
    assert "batches before the position again" in caplog.text
    assert said in caplog.text


@TF_KERAS
def test_a_loader_read_by_several_threads_has_no_position(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads get batches in random order, so a warning is all that is promised."""
    with caplog.at_level(logging.WARNING):
        train(on, RowsWithState, *OFTEN, **OWN, workers=2)
    assert "batches before the position again" in caplog.text
    assert "a Python generator" in caplog.text


@TF_KERAS
def test_a_position_that_becomes_unknown(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The position is never wrong: batches are read again up to a known position."""

    class Odd(RowsWithState):
        def get_state(self) -> Any:
            return object() if self.place == 4 else super().get_state()

    expected = train(on, Rows, **OWN)
    with caplog.at_level(logging.WARNING):
        found = train(on, Odd, ("begin", 0, 4), ("begin", 1, 2), **OWN)
    assert found == expected
    assert (
        "the position of the loader of the training data after 4 batches" in caplog.text
    )
    assert "after 8 batches" not in caplog.text


@TF_KERAS
def test_data_without_the_methods_are_a_mismatch(on: Machine, line: str) -> None:
    kinds = iter([RowsWithState, Rows])
    with pytest.raises(errors.CheckpointMismatchError, match=r"the kind 'loader'"):
        train(on, lambda: next(kinds)(), ("begin", 0, 4), **OWN)


@TF_KERAS
def test_a_state_that_is_refused_is_a_mismatch(on: Machine, line: str) -> None:
    class Refusing(RowsWithState):
        def set_state(self, state: Any) -> None:
            raise KeyError("shards")

    with pytest.raises(
        errors.CheckpointMismatchError, match=r"does not accept.*'shards'"
    ):
        train(on, Refusing, ("begin", 0, 4), **OWN)


# --- a generator over a loader -------------------------------------------------------


@KERAS
def test_a_state_beside_a_generator_over_its_loader_is_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The generator is read again, and the State would put the loader elsewhere."""
    loader = RowsWithState()
    place = LoaderState("place", loader)
    with caplog.at_level(logging.WARNING):
        train(on, lambda: ((rows,) for rows in loader), ("begin", 0, 2), **OWN)
    place.unregister()
    named = [m for m in caplog.messages if "remove the State" in m]
    assert len(named) == 2  # in each start
    assert "'place'" in named[0]
