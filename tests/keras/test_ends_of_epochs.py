"""An epoch's end: stops under a notice, and callbacks that fail there."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.checkpoint.fakes import watch_searches  # noqa: E402
from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    BATCHES,
    Machine,
    X,
    Y,
    machine,
    values,
)

HELD_OUT = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": BATCH}
LAST = BATCHES - 1


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def program(
    on: Machine,
    ours: Any = None,
    *,
    first: Any = (),
    stop: Any = None,
    fail: Any = None,
    **more: Any,
) -> Any:
    """A fit whose notices stop training, as a program's own signal handler may.

    Args:
        on: the machine.
        ours: our callback; False: none.
        first: callbacks ahead of the others.
        stop: called with the model at the end of each epoch.
        fail: called at the end of each epoch, before other callbacks.
        **more: for `fit`.
    """
    model = on.model()
    kinds = on.keras.callbacks

    def press() -> None:
        on.button.press()
        model.stop_training = True

    path = on.directory / "log.csv"
    others = [
        *first,
        kinds.CSVLogger(str(path)),
        kinds.ReduceLROnPlateau("loss", patience=1, min_delta=1e9),
        on.callback(on_epoch_end=lambda epoch, logs=None: (fail or int)()),
        on.interrupter(press),
        on.callback(on_epoch_end=lambda epoch, logs=None: stop and stop(model, epoch)),
    ]
    given = {**on.arrays(), "epochs": 4, "verbose": 0, **more}
    ours = [] if ours is False else [ours or on.preemption()]
    history = model.fit(callbacks=[*ours, *others], **given)
    rows = path.read_bytes()
    return history.history, history.epoch, list(values(model).values()), rows


CUTS = [
    [("begin", 0, 2), ("end", 1, 3)],
    [("end", 0, LAST), ("epoch", 1, 0)],
    [("test", 0, 0), ("test", 1, 1)],
]


@LINES
@pytest.mark.parametrize("cuts", CUTS, ids=["step", "end", "validation"])
@pytest.mark.parametrize("save_freq", ["epoch", None])
def test_a_stop_by_the_handler_of_the_signal_ends_no_fit(
    on: Machine, line: str, cuts: list[Any], save_freq: Any
) -> None:
    on.start()
    held_out = HELD_OUT if cuts[0][0] == "test" else {}
    expected = program(on, False, **held_out)

    def preempted() -> Any:
        return program(on, on.preemption(save_freq=save_freq), **held_out)

    assert on.run(preempted, *cuts) == expected


@LINES
def test_a_process_searches_once_for_the_keys_of_all_saves(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first step, so that the keys are known at a notice."""
    steps: list[int] = []
    searches: list[int] = []
    watch_searches(monkeypatch, lambda: searches.append(len(steps)))

    def preempted() -> None:
        steps.clear()
        count = on.callback(on_train_batch_end=lambda batch, logs=None: steps.append(1))
        on.fit(None, count)

    on.run(preempted, ("begin", 0, 3))
    assert searches == [1, 1]


@LINES
@pytest.mark.parametrize("cut", [("test", 1, 1), ("epoch", 1, 0)])
def test_a_stop_of_its_own_ends_a_fit_that_is_preempted(
    on: Machine, line: str, cut: Any
) -> None:
    """A callback stops training at the time of the notice."""

    def stop(model: Any, epoch: int) -> None:
        model.stop_training = epoch == 1

    on.start()
    expected = program(on, False, stop=stop, **HELD_OUT)
    assert expected[1] == [0, 1]
    run = functools.partial(program, on, stop=stop, **HELD_OUT)
    assert on.run(run, cut) == expected


@LINES
def test_early_stopping_ends_a_fit_that_is_preempted(on: Machine, line: str) -> None:
    """Also where no state from before the callbacks is held: the end is committed."""

    def stopped(ours: Any) -> Any:
        early = on.keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
        return program(on, ours, first=[early])

    on.start()
    expected = stopped(False)
    assert expected[1] == [0, 1]
    ours = functools.partial(on.preemption, save_freq=None)
    assert on.run(lambda: stopped(ours()), ("epoch", 1, 0)) == expected


FREQUENCIES = ["epoch", None, BATCHES + 1, datetime.timedelta(hours=1)]


@LINES
@pytest.mark.parametrize("save_freq", FREQUENCIES, ids=str)
@pytest.mark.parametrize("held_out", [{}, HELD_OUT], ids=["", "validated"])
def test_a_callback_that_fails_costs_no_epoch(
    on: Machine, line: str, held_out: dict[str, Any], save_freq: Any
) -> None:
    """The second epoch ends again, and no batch of the epoch is trained again."""
    epochs: list[int] = []

    def fail() -> None:
        epochs.append(len(epochs))
        if len(epochs) == 2:
            raise RuntimeError("no network")

    def run() -> Any:
        ours = on.preemption(save_freq=save_freq)
        return program(on, ours, fail=fail, **held_out)

    on.start()
    expected = program(on, False, **held_out)
    on.start()
    with pytest.raises(RuntimeError, match="no network"):
        run()
    assert on.commits[-1] == 2 * BATCHES
    assert on.run(run) == expected
    assert len(epochs) == 5


@LINES
@pytest.mark.parametrize("fails", ["batch", "built", "callback"])
@pytest.mark.parametrize("save_freq", ["epoch", None])
def test_a_validation_that_fails_costs_no_epoch(
    on: Machine, line: str, fails: str, save_freq: Any
) -> None:
    """Fails once: when Keras builds the data, or in the second validation."""
    utils, begins = on.keras.utils, []
    is_failing = [False]

    class HeldOut(utils.PyDataset if line == "keras" else utils.Sequence):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if fails != "callback":
                fail()
            return X[index * BATCH :][:BATCH], Y[index * BATCH :][:BATCH]

    def fail() -> None:
        if is_failing[0]:
            is_failing[0] = False
            raise RuntimeError("no network")

    def begin(logs: Any = None) -> None:
        begins.append(None)
        is_failing[0] |= fails != "built" and len(begins) == 2

    hooks = {"on_test_batch_end": lambda batch, logs=None: fail()}
    breaker = on.callback(on_test_begin=begin, **(hooks if fails == "callback" else {}))

    def run(ours: Any = None) -> Any:
        ours = on.preemption(save_freq=save_freq) if ours is None else ours
        return program(on, ours, first=[breaker], validation_data=HeldOut())

    on.start()
    begins = [None] * 9
    expected = run(False)
    on.start()
    begins, is_failing[0] = [], fails == "built"
    with pytest.raises((RuntimeError, tf.errors.OpError), match="no network"):
        run()
    assert on.commits[-1] == (1 if fails == "built" else 2) * BATCHES
    assert on.run(run) == expected
