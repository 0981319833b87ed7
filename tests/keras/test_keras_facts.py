"""Errors of a resume with Keras alone, one test for each; tfpreempt resumes correctly.

If the check is cheap, the test also shows that Keras still has the error.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tensorflow.python.framework import config as tf_config  # noqa: E402

from tests.handler.program import is_told  # noqa: E402
from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    BATCHES,
    EPOCHS,
    SAMPLES,
    Machine,
    Seen,
    X,
    Y,
    machine,
    values,
)

CUTS = [("begin", 1, 4), ("end", 2, 1)]


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


@pytest.fixture
def deterministic() -> Iterator[None]:
    tf.config.experimental.enable_op_determinism()
    yield
    tf_config.disable_op_determinism()


# --- the state of the model ----------------------------------------------------------


class Noted:
    """All values of a model after each batch, by epoch and batch."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], dict[str, bytes]] = {}

    def callback(self, on: Machine, model: Any) -> Any:
        epochs: list[int] = []

        def note(batch: int, logs: Any = None) -> None:
            self.at[epochs[-1], batch] = values(model)

        return on.callback(
            on_epoch_begin=lambda epoch, logs=None: epochs.append(epoch),
            on_train_batch_end=note,
        )


@functools.cache
def noted_once(line: str, *cuts: Any) -> tuple[Any, Noted]:
    """Returns the result of `noted` in a separate environment."""
    with machine(line) as on:
        return noted(on, *cuts)


def noted(on: Machine, *cuts: Any) -> tuple[Any, Noted]:
    """The History of a fit, and its values by batch; without cuts of Keras alone."""
    found = Noted()

    def program() -> Any:
        model = on.model()
        ours = None if cuts else False
        return on.fit(model, found.callback(on, model), ours=ours)

    return on.run(program, *cuts), found


@LINES
def test_seeds_and_metrics_continue_at_every_batch(line: str) -> None:
    """F: a tf.train.Checkpoint holds neither seed generators nor metrics."""
    _, expected = noted_once(line)
    _, found = noted_once(line, *CUTS)
    assert found.at.keys() == expected.at.keys()
    for place, one in expected.at.items():
        assert found.at[place] == one, place


@pytest.mark.parametrize("line", ["keras"])
def test_keras_checkpoints_lack_seeds_and_metrics(on: Machine, line: str) -> None:
    """F: the same, as Keras 3 has it; if this fails, less has to be kept apart."""
    on.start()
    model = on.model()
    on.fit(model, ours=False, epochs=1)
    prefix = tf.train.Checkpoint(model=model).write(str(on.directory / "plain"))
    names = [name for name, _ in tf.train.list_variables(prefix)]
    assert not [name for name in names if "seed" in name or "metric" in name]
    assert [v for v in model.variables if "seed" in v.path]


@LINES
def test_the_loss_of_the_resumed_epoch_is_that_of_the_whole(line: str) -> None:
    """F: `fit` resets its metrics when an epoch begins, resumed or not."""
    expected, _ = noted_once(line)
    found, _ = noted_once(line, *CUTS)
    assert found.history == expected.history
    assert found.epoch == list(range(EPOCHS))


@LINES
def test_counters_of_callbacks_continue(on: Machine, line: str) -> None:
    """F: EarlyStopping and ReduceLROnPlateau reset themselves in `on_train_begin`."""

    def program(ours: Any = None) -> Any:
        kinds = on.keras.callbacks
        early = kinds.EarlyStopping("loss", patience=2, min_delta=1e9)
        reduce = kinds.ReduceLROnPlateau("loss", patience=1, min_delta=1e9)
        model = on.model()
        history = on.fit(model, early, reduce, ours=ours, epochs=9)
        return history, early.stopped_epoch, float(model.optimizer.learning_rate)

    on.start()
    history, stopped, rate = program(False)
    found, found_stopped, found_rate = on.run(program, *CUTS)
    assert stopped == 2
    assert (found_stopped, found_rate) == (stopped, rate)
    assert found.history == history.history


# --- what is left behind -------------------------------------------------------------


@LINES
def test_a_plain_fit_after_a_resumed_one_trains_all_its_epochs(
    on: Machine, line: str
) -> None:
    """F: Keras 3 never clears `model._initial_epoch`."""

    def program() -> Any:
        model = on.model()
        on.fit(model)
        return on.fit(model, ours=False)

    assert on.run(program, ("begin", 2, 1)).epoch == list(range(EPOCHS))


@pytest.mark.parametrize("line", ["keras"])
def test_keras_never_clears_the_initial_epoch(on: Machine, line: str) -> None:
    """F: the same; if this fails, `epoch_begins` need not clear it any more."""
    on.start()
    model = on.model()
    model._initial_epoch = 1
    assert on.fit(model, ours=False).epoch == [1, 2]
    assert on.fit(model, ours=False).epoch == [1, 2]


# --- BackupAndRestore ----------------------------------------------------------------


def trained_batches(on: Machine, *cuts: Any, seed: int | None = 7) -> list[Any]:
    """Returns the trained batches of each epoch, from shuffled arrays."""
    seen = Seen()
    rows = np.arange(SAMPLES, dtype="float32")[:, None]

    def program() -> None:
        callbacks = [on.preemption(), seen.callback(on), on.interrupter()]
        seen.model(on).fit(
            rows, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks
        )

    on.run(program, *cuts, seed=seed)
    return [seen.epochs[epoch] for epoch in range(EPOCHS)]


@LINES
def test_the_middle_of_an_epoch_is_not_lost(on: Machine, line: str) -> None:
    """F: Keras 3 resumes at the epoch; tf_keras repeats its first batches only."""
    expected = trained_batches(on)
    on.checkpoints.rename(on.directory / "before")
    assert trained_batches(on, ("begin", 1, 4)) == expected


@LINES
def test_a_second_kill_in_the_resumed_epoch(on: Machine, line: str) -> None:
    """F: Keras 3 begins at epoch 0 then."""
    expected, _ = noted_once(line)
    cuts = [("begin", 1, 2), ("begin", 1, 2), ("begin", 1, 4)]
    found, _ = noted(on, *cuts)
    assert found.history == expected.history


@LINES
def test_stopped_training_keeps_its_checkpoint(on: Machine, line: str) -> None:
    """F: Keras 3 deletes the backup, so the next start trains from scratch."""

    def program() -> tuple[Any, list[int]]:
        steps: list[int] = []
        model = on.model()

        def stop(batch: int, logs: Any = None) -> None:
            steps.append(batch)
            if batch == 3:
                model.stop_training = True

        history = on.fit(model, on.callback(on_train_batch_end=stop))
        return history, steps

    history, steps = on.run(program)
    assert steps == [0, 1, 2, 3]
    commits = on.commits
    assert commits
    again, more = on.run(program)
    assert more == []
    assert again.history == history.history
    assert on.commits == commits


@pytest.fixture
def harmless_sigterm() -> Iterator[list[int]]:
    """Makes a SIGTERM without a handler harmless for the tests."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: came.append(signum))
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("verbose", [0, 2])
@LINES
def test_sigterm_is_watched_by_default(
    on: Machine, line: str, verbose: int, harmless_sigterm: list[int]
) -> None:
    """F: BackupAndRestore(save_before_preemption=True) of tf_keras ignores it, with its
    default save_freq and verbose 0 or 2."""
    on.start()

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 20
        while not is_told():
            assert time.monotonic() < end
            time.sleep(0.001)

    on.cuts = [("begin", 1, 2)]
    ours = on.preemption(termination_config=None)
    chosen = {"verbose": verbose, "epochs": EPOCHS} | on.arrays()
    with pytest.raises(SystemExit) as left:
        on.model().fit(callbacks=[ours, on.interrupter(send)], **chosen)
    assert left.value.code == 143
    assert max(on.commits) == BATCHES + 2


# --- data and determinism ------------------------------------------------------------


@LINES
def test_unseeded_arrays_lose_no_sample(on: Machine, line: str) -> None:
    """F: the order of an epoch is drawn inside a dataset, and cannot be drawn again."""
    cuts = [("begin", 0, 3), ("begin", 1, 5), ("epoch", 1, 0), ("end", 2, 0)]
    epochs = trained_batches(on, *cuts, seed=None)
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(SAMPLES))
    assert len({str(epoch) for epoch in epochs}) == EPOCHS


@LINES
def test_two_undisturbed_runs_are_identical(
    on: Machine, line: str, deterministic: None
) -> None:
    """F: with seeds and determinism; without that nothing here could be compared."""
    (first, one), (second, other) = noted(on), noted(on)
    assert first.history == second.history
    assert one.at == other.at


@LINES
def test_our_callback_changes_nothing(on: Machine, line: str) -> None:
    """An uninterrupted fit has equal results with and without the callback."""

    def program(ours: Any = None) -> tuple[Any, Any]:
        model = on.model()
        held_out = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": BATCH}
        history = on.fit(model, ours=ours, **held_out)
        return history.history, values(model)

    on.start()
    expected = program(False)
    assert on.run(program) == expected


def test_the_versions_are_those_that_were_tried() -> None:
    """The facts hold for these versions; check each fact for another version."""
    found = {name: importlib.import_module(name).__version__ for name in VERSIONS}
    assert {n: v.rpartition(".")[0] for n, v in found.items()} == VERSIONS


VERSIONS = {"keras": "3.15", "tf_keras": "2.21", "tensorflow": "2.21"}
