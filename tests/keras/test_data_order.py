"""A resume that would continue in another order of the data is refused or named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    SAMPLES,
    Machine,
    X,
    Y,
    machine,
)
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.state import data_order  # noqa: E402
from tfpreempt.data import from_arrays, from_index  # noqa: E402
from tfpreempt.keras.data.position import Position  # noqa: E402

Data = Callable[[], dict[str, Any]]
OTHER_ORDER = "have another order than in the interrupted run"


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def resume(on: Machine, before: Data, after: Data, seed: int = 7) -> None:
    """Interrupts a fit with some data, and resumes the fit with other data.

    Args:
        on: environment of the fit.
        before: arguments of `fit` in the first start.
        after: arguments of `fit` in the second start.
        seed: seed of the second start.
    """
    on.start()
    on.cuts = [("begin", 1, 3)]
    with pytest.raises(SystemExit):
        on.fit(**before())
    on.start(seed)
    on.fit(**after())


def pipeline(dataset: Any) -> dict[str, Any]:
    return {"x": dataset, "y": None, "batch_size": None, "shuffle": False}


def indexed(seed: int = 7, size: int = SAMPLES, **more: Any) -> Data:
    """Returns a pipeline with the same number of batches for any size."""

    def sample(index: Any) -> Any:
        row = index % SAMPLES
        return tf.gather(X, row), tf.gather(Y, row)

    chosen = {"batch_size": BATCH} | more
    return lambda: pipeline(from_index(sample, size, seed=seed, **chosen))


def arrays(seed: int) -> Data:
    return lambda: pipeline(from_arrays((X, Y), batch_size=BATCH, seed=seed))


@LINES
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (indexed(), indexed(seed=8)),
        (indexed(), indexed(size=SAMPLES + 1)),
        (indexed(), indexed(shuffle=False)),
        (arrays(7), arrays(8)),
    ],
    ids=["seed", "size", "shuffle", "arrays"],
)
def test_another_tfpreempt_pipeline_is_refused(
    on: Machine, line: str, before: Data, after: Data
) -> None:
    with pytest.raises(errors.CheckpointMismatchError, match=OTHER_ORDER):
        resume(on, before, after)


@LINES
def test_arrays_that_another_seed_shuffles_are_refused(on: Machine, line: str) -> None:
    if on.keras.__version__.startswith("3.16"):
        pytest.skip("it shuffles arrays without a seed")
    with pytest.raises(errors.CheckpointMismatchError, match=OTHER_ORDER):
        resume(on, dict, dict, seed=8)


@LINES
def test_a_complete_fit_is_restored_whatever_the_order(on: Machine, line: str) -> None:
    for seed in (7, 8):
        on.start(seed)
        on.fit(**indexed(seed)())


@LINES
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sequence_in_another_order_is_refused(
    on: Machine, line: str, workers: int
) -> None:
    utils, is_new = on.keras.utils, line == "keras"

    class Rows(utils.PyDataset if is_new else utils.Sequence):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return X[BATCH * index :][:BATCH], Y[BATCH * index :][:BATCH]

    def data(shuffle: bool) -> Data:
        rows = (lambda: Rows(workers=workers)) if is_new else Rows
        more = {"shuffle": shuffle} | ({} if is_new else {"workers": workers})
        return lambda: pipeline(rows()) | more

    resume(on, data(True), data(True))
    mismatch = pytest.raises(errors.CheckpointMismatchError, match=OTHER_ORDER)
    with machine(line) as fresh, mismatch:
        resume(fresh, data(True), data(False))


def shuffled(seed: int) -> Data:
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    return lambda: pipeline(rows.shuffle(SAMPLES, seed=seed).batch(BATCH))


def generated(seed: int | None) -> Data:
    def batches() -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            rows = rng.integers(0, SAMPLES, BATCH)
            yield X[rows], Y[rows]

    return lambda: pipeline(batches()) | {"steps_per_epoch": 6}


@LINES
@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (shuffled(1), shuffled(1), ""),
        (shuffled(1), shuffled(2), "have other seeds or buffer sizes"),
        (generated(1), generated(1), ""),
        (generated(1), generated(2), "differs from the batch of the interrupted run"),
        (
            generated(None),
            generated(None),
            "differs from the batch of the interrupted run",
        ),
    ],
)
def test_a_different_order_at_an_inexact_position_is_named(
    on: Machine,
    line: str,
    before: Data,
    after: Data,
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    resume(on, before, after)
    said = [
        each.getMessage() for each in caplog.records if each.name == data_order.__name__
    ]
    assert len(said) == bool(named)
    assert named in "".join(said)


@pytest.mark.parametrize("line", ["keras"])
def test_a_commit_without_fingerprints_is_restored(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version's."""
    parse = Position.parse

    def without(place: Any) -> Position | None:
        del place["order"]
        return parse(place)

    monkeypatch.setattr(Position, "parse", without)
    resume(on, indexed(), indexed(seed=8))
