"""Batches that Keras reads ahead by workers are in one order, however long it takes.

tf_keras' readers begin another pass over the data a tenth of a second after the last
batch of an epoch was taken: they call `on_epoch_end` and draw an order once more, so
that the next epoch depends on how long the validation took.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    BATCHES,
    EPOCHS,
    Machine,
    Seen,
    machine,
)
from tfpreempt.core import object_graph, private_api  # noqa: E402

LONG = 0.4  # seconds; four times what tf_keras' readers wait
ROWS = np.arange(BATCHES * BATCH, dtype="float32")[:, None]
Program = Callable[..., dict[int, list[list[int]]]]


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def rows(on: Machine, **workers: Any) -> Any:
    """Data that are shuffled between epochs by Python's generator."""
    utils = on.keras.utils

    class Rows(utils.PyDataset if on.line == "keras" else utils.Sequence):
        def __init__(self) -> None:
            super().__init__(**(workers if on.line == "keras" else {}))
            self.order = np.arange(len(ROWS))

        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            return ROWS[self.order[index * BATCH : (index + 1) * BATCH]]

        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)

    return Rows()


@pytest.fixture
def seen_by(on: Machine) -> Program:
    """Runs a fit with long validations; each start records its batches."""

    def program(seen: Seen, seconds: float = 0.0, **workers: Any) -> Any:
        def validate(batch: int, logs: Any = None) -> None:
            time.sleep(seconds)

        slow = on.callback(on_test_batch_begin=validate)
        data = {"x": rows(on, **workers), "y": None, "batch_size": None}
        held_out = {"validation_data": (ROWS[:BATCH],) * 2}
        own = workers if on.line == "tf_keras" else {}
        on.fit(seen.model(on), seen.callback(on), slow, **data, **held_out, **own)
        return seen.epochs

    return program


@LINES
@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_does_not_depend_on_the_time(
    on: Machine, seen_by: Program, line: str, workers: int
) -> None:
    expected = seen_by_run(on, seen_by, 0.0, 1)
    assert seen_by_run(on, seen_by, LONG, workers) == expected
    cuts = [("begin", 1, 3), ("test", 1, 0), ("end", 2, 1)]
    assert seen_by_run(on, seen_by, LONG, workers, *cuts) == expected


@LINES
def test_processes_read_in_the_same_order(
    on: Machine, seen_by: Program, line: str
) -> None:
    expected = seen_by_run(on, seen_by, 0.0, 1)
    on.start()
    found = seen_by(Seen(), LONG, workers=2, use_multiprocessing=True)
    assert found == expected


def counting(on: Machine, changes: str) -> Any:
    """Returns data whose reading changes the named value."""
    utils = on.keras.utils

    class Counting(utils.PyDataset if on.line == "keras" else utils.Sequence):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.rng, self.cache = 0, np.random.default_rng(3), {}
            if changes == "seeds":
                self.seeds = on.keras.random.SeedGenerator(3)

        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            self.count += changes == "count"
            if changes == "rng":
                self.rng.random()
            if changes == "seeds":
                on.keras.random.normal([1], seed=self.seeds)
            if changes == "cache":
                self.cache[index] = True
            return ROWS[index * BATCH : (index + 1) * BATCH]

        def on_epoch_end(self) -> None:
            self.count += 1

    return Counting()


def drawn(on: Machine, kind: str, **options: Any) -> Any:
    """Data of Keras' legacy preprocessing; Keras 3 has it in `tf.keras` only."""
    name = "keras._tf_keras.keras" if on.line == "keras" else "tf_keras"
    module = importlib.import_module(f"{name}.preprocessing.{kind}")
    if kind == "image":
        images = np.zeros([BATCHES * BATCH, 2, 2, 1])
        return module.ImageDataGenerator().flow(images, None, BATCH, **options)
    given = {"length": 1, "batch_size": BATCH} | options
    return module.TimeseriesGenerator(ROWS, ROWS, **given)


@LINES
@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("image", {"seed": 3}, "ImageDataGenerator"),
        ("sequence", {"shuffle": True}, "TimeseriesGenerator"),
        ("sequence", {}, None),
    ],
)
def test_classes_of_keras_that_draw_batches_are_named_before_training(
    on: Machine,
    line: str,
    kind: str,
    options: dict[str, Any],
    word: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on.start()
    named_by_then: list[bool] = []
    look = on.callback(
        on_train_batch_begin=lambda batch, logs=None: named_by_then.append(
            word is None or word in caplog.text
        )
    )
    data = {"x": drawn(on, kind, **options), "y": None, "batch_size": None, "epochs": 2}
    on.fit(Seen().model(on), look, **data)
    assert named_by_then
    assert all(named_by_then)
    said = [r.getMessage() for r in caplog.records]
    words = ("which draws", "the training data have attributes")
    told = [each for each in said if any(word in each for word in words)]
    assert len(told) == (word is not None)


@LINES
@pytest.mark.parametrize("changes", ["count", "rng", "cache", "seeds", "nothing"])
def test_attributes_that_change_while_batches_are_read_are_named(
    on: Machine, line: str, changes: str, caplog: pytest.LogCaptureFixture
) -> None:
    if (line, changes) == ("tf_keras", "seeds"):
        pytest.skip("tf_keras has no SeedGenerator")
    on.start()
    data = {"x": counting(on, changes), "y": None, "batch_size": None, "epochs": 2}
    seen = Seen()
    on.fit(seen.model(on), seen.callback(on), **data)
    said = [r.getMessage() for r in caplog.records]
    told = [each for each in said if "the training data have attributes" in each]
    assert len(told) == (changes != "nothing")
    assert all(changes in each for each in told)


@LINES
def test_a_getitem_that_draws_from_global_generators_is_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers are ahead of training, so the drawn numbers differ after a restart."""
    on.start()

    class Drawing(type(counting(on, "nothing"))):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return self.noisy(super().__getitem__(index))

        def noisy(self, batch: Any) -> Any:
            return batch + np.random.normal(size=batch.shape)

    data = {"x": Drawing(), "y": None, "batch_size": None, "epochs": 1}
    on.fit(Seen().model(on), **data)
    assert "Drawing.noisy, which draws random numbers for each batch" in caplog.text
    assert "np.random.default_rng((seed, index))" in caplog.text


@pytest.fixture
def counting_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Keras shuffle a PyDataset as Keras 3.16 does: by a count of epochs."""
    adapter: Any = private_api.keras_py_dataset_adapter.PyDatasetAdapter
    begin, end = adapter.__init__, adapter.on_epoch_end

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        begin(self, *arguments, **keywords)
        self._epoch = 0

    def generate(self: Any) -> Iterator[Any]:
        indices = list(range(self.py_dataset.num_batches))
        if self.shuffle:
            random.Random(self._epoch).shuffle(indices)
        for index in indices:
            yield self._standardize_batch(self.py_dataset[index])

    def count(self: Any) -> None:
        end(self)
        self._epoch += 1

    if "_epoch" not in object_graph.set_by(adapter):
        monkeypatch.setattr(adapter, "__init__", init)
        monkeypatch.setattr(adapter, "_finite_generator", generate)
        monkeypatch.setattr(adapter, "on_epoch_end", count)


@pytest.mark.usefixtures("counting_adapter")
@pytest.mark.parametrize("line", ["keras"])
@pytest.mark.parametrize(
    ("steps", "cuts"),
    [
        (None, [("begin", 1, 3), ("test", 1, 0), ("begin", 2, 1)]),
        (None, [("end", 0, BATCHES - 1), ("epoch", 1, 0)]),
        (4, [("begin", 1, 1), ("begin", 2, 3)]),  # passes end within epochs
    ],
)
def test_an_order_by_the_count_of_epochs_is_resumed(
    on: Machine, line: str, steps: int | None, cuts: Any
) -> None:
    found = []
    for interruptions in ([], cuts):
        with machine(line) as fresh:
            on.checkpoints, seen = fresh.checkpoints, Seen()
            on.run(lambda seen=seen: fit_in_order(on, seen, steps), *interruptions)
        found.append(seen.epochs)
    undisturbed, resumed = found
    assert undisturbed[0] != undisturbed[1] != undisturbed[2]
    assert resumed == undisturbed


@pytest.mark.usefixtures("counting_adapter")
@pytest.mark.parametrize("line", ["keras"])
def test_more_epochs_continue_the_count_of_epochs(on: Machine, line: str) -> None:
    found = []
    for each in ([EPOCHS], [1, EPOCHS]):
        with machine(line) as fresh:
            on.checkpoints, seen = fresh.checkpoints, Seen()
            for epochs in each:
                on.run(lambda n=epochs, seen=seen: fit_in_order(on, seen, epochs=n))
        found.append(seen.epochs)
    assert found[0] == found[1]


CUTS = [("begin", 1, 0), ("begin", 1, 3), ("epoch", 1, 0), ("test", 2, 0)]
FEW_CUTS = [("begin", 1, 0), ("begin", 1, 1), ("begin", 2, 1)]


@LINES
@pytest.mark.parametrize("workers", [(1, 3, 1, 3, 1), (3, 1, 3, 3, 1)])
@pytest.mark.parametrize(
    ("steps", "cuts"), [(None, CUTS), (BATCHES // EPOCHS, FEW_CUTS)]
)
def test_restarts_with_other_workers_read_in_the_same_order(
    on: Machine, line: str, workers: tuple[int, ...], steps: int | None, cuts: Any
) -> None:
    """With `steps_per_epoch`, one pass over the data lasts several epochs."""
    found = []
    for interruptions in ([], cuts):
        with machine(line) as fresh:
            on.checkpoints, seen, each = fresh.checkpoints, Seen(), iter(workers)

            def program(seen: Seen = seen, each: Iterator[int] = each) -> None:
                fit_in_order(on, seen, steps, workers=next(each))

            on.run(program, *interruptions)
        found.append(seen.epochs)
    undisturbed, resumed = found
    assert undisturbed[0] != undisturbed[1] != undisturbed[2]
    assert resumed == undisturbed


@LINES
@pytest.mark.parametrize("workers", [(1, 3), (3, 3)])
def test_more_epochs_with_other_workers_continue_the_orders(
    on: Machine, line: str, workers: tuple[int, ...]
) -> None:
    found = []
    for each in ([EPOCHS], [1, EPOCHS]):
        with machine(line) as fresh:
            on.checkpoints, seen = fresh.checkpoints, Seen()
            for epochs, count in zip(each, workers, strict=False):
                on.start()
                fit_in_order(on, seen, epochs=epochs, workers=count)
        found.append(seen.epochs)
    assert found[0] == found[1]


def fit_in_order(
    on: Machine,
    seen: Seen,
    steps: int | None = None,
    epochs: int = EPOCHS,
    **workers: Any,
) -> None:
    """A fit over batches that only Keras shuffles."""
    utils, is_new = on.keras.utils, on.line == "keras"

    class Rows(utils.PyDataset if is_new else utils.Sequence):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            return ROWS[index * BATCH : (index + 1) * BATCH]

    on.fit(
        seen.model(on),
        seen.callback(on),
        x=Rows(**workers) if is_new else Rows(),
        y=None,
        batch_size=None,
        steps_per_epoch=steps,
        epochs=epochs,
        validation_data=(ROWS[:BATCH],) * 2,
        **({} if is_new else workers),
    )


def seen_by_run(
    on: Machine, program: Program, seconds: float, workers: int, *cuts: Any
) -> dict[int, list[list[int]]]:
    """Returns the trained batches of a run in a new environment."""
    with machine(on.line) as fresh:
        on.checkpoints = fresh.checkpoints
        seen = Seen()
        on.run(lambda: program(seen, seconds, workers=workers), *cuts)
    assert sorted(seen.epochs) == list(range(EPOCHS))
    for epoch in seen.epochs.values():
        samples = [sample for batch in epoch for sample in batch]
        assert sorted(samples) == sorted(ROWS[:, 0].astype(int))
    return seen.epochs


@LINES
def test_an_iterator_that_ends_in_getitem_is_an_error(on: Machine, line: str) -> None:
    """Not the end of the epoch."""
    numbers = iter(range(3))
    data = rows(on)
    kind = type(data)
    inner = kind.__getitem__
    kind.__getitem__ = lambda self, index: (
        next(numbers) + inner(self, index),
        inner(self, index),
    )
    on.start()
    with pytest.raises(Exception, match="StopIteration"):
        on.fit(None, x=data, y=None, batch_size=None, shuffle=False)
