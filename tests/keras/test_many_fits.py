"""Programs around `fit`: several fits, evaluations, directories and settings."""

from __future__ import annotations

import datetime
import gc
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.journals import read_journal  # noqa: E402
from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    BATCHES,
    EPOCHS,
    SAMPLES,
    Machine,
    X,
    Y,
    machine,
    values,
)
from tfpreempt import TerminationConfig, errors, save_all_states  # noqa: E402
from tfpreempt.checkpoint.bundles import bundle_writer  # noqa: E402
from tfpreempt.checkpoint.tensors import bundle_reader  # noqa: E402
from tfpreempt.core.journal import journal_directory  # noqa: E402
from tfpreempt.keras.fit.train_function import TrainFunctionWrapper  # noqa: E402
from tfpreempt.keras.fit_record import EncodedValue  # noqa: E402

HELD_OUT = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": BATCH}
ALL = list(range(EPOCHS))


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


Result = tuple[dict[str, list[float]], list[int], dict[str, bytes]]


def result(model: Any, history: Any) -> Result:
    return history.history, history.epoch, values(model)


def alone(on: Machine, program: Callable[..., Any]) -> Any:
    """Returns the results of a program without the callback."""
    on.start()
    return program(False)


# --- several fits --------------------------------------------------------------------


@LINES
def test_a_later_fit_keeps_no_tensors_of_a_commit(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later fit restores nothing: the model has the values."""
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    inner, kept = bundle_reader.read_ahead, []

    def read_ahead(prefix: str) -> Any:
        ahead = inner(prefix)
        assert ahead is not None
        kept.append(weakref.ref(next(iter(ahead.tensors.values()))[1]))
        return ahead

    monkeypatch.setattr(bundle_reader, "read_ahead", read_ahead)
    on.start()
    model = on.model()
    on.fit(model)
    assert not kept
    held: list[bool] = []

    def look(batch: int, logs: Any = None) -> None:
        held.extend(each() is not None for each in kept)

    on.fit(model, on.callback(on_train_batch_end=look))
    assert held
    assert not any(held)


@LINES
@pytest.mark.parametrize(
    ("callbacks", "where"),
    [("one", ("begin", 11, 3)), ("one for each", ("epoch", 10, 0))],
)
def test_interrupted_in_the_second_of_three(
    on: Machine, line: str, callbacks: str, where: Any
) -> None:
    """The first fit is not trained again, and returns its whole History."""
    trained: list[list[int]] = []  # by fit, over all starts

    def fit(model: Any, ours: Any, first: int) -> Any:
        steps: list[int] = []
        trained.append(steps)
        note = on.callback(on_train_batch_end=lambda b, logs=None: steps.append(b))
        epochs = {"initial_epoch": first, "epochs": first + 2}
        history = on.fit(model, note, ours=ours, **epochs)
        return history.history, history.epoch

    def program(ours: Any = None) -> Any:
        model = on.model()
        if callbacks == "one" and ours is None:
            ours = on.preemption()
        return [fit(model, ours, first) for first in (0, 10, 20)], values(model)

    expected = alone(on, program)
    trained.clear()
    assert on.run(program, where) == expected
    counts = [len(steps) for steps in trained]
    assert counts[0] == 2 * BATCHES
    assert counts[2:] == [0, 2 * BATCHES - counts[1], 2 * BATCHES]


@LINES
def test_layers_that_are_unfrozen_for_a_second_fit_are_trained(
    on: Machine, line: str
) -> None:
    """The restart builds the layers while they are frozen."""
    layer, adam = on.keras.layers.Dense, on.keras.optimizers.Adam

    def program(ours: Any = None) -> Any:
        inner = on.keras.Sequential([layer(3)])
        model = on.keras.Sequential([inner, layer(1)])
        for is_trained in (False, True):
            inner.trainable = is_trained
            model.compile(adam(0.1), "mse", jit_compile=False)
            first = 2 * is_trained
            on.fit(model, ours=ours, initial_epoch=first, epochs=first + 2)
        return values(model)

    expected = alone(on, program)
    assert on.run(program, ("begin", 0, 3)) == expected


@LINES
@pytest.mark.parametrize("batch", [0, 3])
def test_the_second_fit_of_shuffled_data_has_its_own_orders(
    on: Machine, line: str, batch: int
) -> None:
    """A restart had the orders of the first fit, if the second fit had no commit."""

    def program(ours: Any = None) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES)
        model = on.model()
        for first in (0, 2):
            on.checkpoints = on.directory / f"of-{first}"
            rows = data.cache().shuffle(4) if first else data
            given = {"x": rows.batch(BATCH), "y": None, "batch_size": None}
            on.fit(model, ours=ours, initial_epoch=first, epochs=first + 2, **given)
        return values(model)

    expected = alone(on, program)
    assert on.run(program, ("begin", 2, batch)) == expected


@LINES
def test_a_finished_program_of_two_fits_trains_nothing(on: Machine, line: str) -> None:
    trained: list[int] = []

    def program() -> Any:
        model = on.model()
        count = on.callback(on_train_batch_end=lambda b, logs=None: trained.append(b))
        found = [on.fit(model, count, epochs=2) for _ in range(2)]
        return [(each.history, each.epoch) for each in found], values(model)

    first = on.run(program)
    trained.clear()
    assert on.run(program) == first
    assert trained == []


def wide(on: Machine) -> Any:
    """Returns another model than `on.model()`."""
    model = on.keras.Sequential([on.keras.layers.Dense(3), on.keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    return model


OTHER_ROWS = {"x": X + 1, "y": Y + 1}


@LINES
@pytest.mark.parametrize("kind", ["model", "rows", "epochs"])
def test_a_program_that_leaves_out_finished_fits_gets_no_other_fits_history(
    on: Machine, line: str, kind: str
) -> None:
    """The second fit of a directory is interrupted, the first is not run again."""
    done = on.directory / "done"

    def program(ours: Any = None) -> Result:
        if not done.exists():
            on.fit(on.model(), ours=ours, epochs=1)
            done.touch()
        on.keras.utils.set_random_seed(8)
        model = wide(on) if kind == "model" else on.model()
        given = {"rows": OTHER_ROWS, "epochs": {"epochs": 2}}.get(kind, {})
        where = ("begin", 1, 2) if kind == "epochs" else ("begin", 1, 3)
        on.cuts = [where] if cut.pop(0) else []
        return result(model, on.fit(model, ours=ours, **given))

    cut = [False]
    expected = alone(on, program)
    done.unlink()
    cut = [True]
    on.start()
    with pytest.raises(SystemExit):
        program()
    cut = [False]
    on.start()
    assert program() == expected


@LINES
def test_the_end_of_another_fit_is_not_given_to_the_next_one(
    on: Machine, line: str
) -> None:
    """A kill between two fits of one directory; the program omits the first fit."""
    on.run(lambda: on.fit(epochs=1))
    on.start()
    with pytest.raises(errors.CheckpointMismatchError, match="each fit its own dir"):
        on.fit(epochs=1, **OTHER_ROWS)
    assert on.run(lambda: on.fit(epochs=1)).epoch == [0]


@LINES
def test_a_complete_fit_whose_data_differ_in_each_start_is_restored(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed after an unseeded fit: the next start is refused, the one after is not."""
    on.run(lambda: on.fit(epochs=1))
    on.start()
    with pytest.raises(
        errors.CheckpointMismatchError, match="start the program again unchanged"
    ):
        on.fit(epochs=1, x=X + 1)
    for shift in (2, 3):
        caplog.clear()
        assert on.run(lambda s=shift: on.fit(epochs=1, x=X + s)).epoch == [0]
        assert "cannot be compared" in caplog.text
        assert on.commits == [BATCHES]


@LINES
def test_a_program_with_another_learning_rate_gets_a_warning(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each restart restores the saved rate, which a callback may have changed."""
    starts = iter([0.25, 0.5, 0.5])
    rates, warned = [], []

    def read(batch: int, logs: Any = None) -> None:
        rates.append(float(model.optimizer.learning_rate))

    def program() -> Any:
        nonlocal model
        warned.append("sets the learning rate 0.5; 0.25 was set" in caplog.text)
        caplog.clear()
        model = on.model(optimizer=on.keras.optimizers.SGD(next(starts)))
        return on.fit(model, on.callback(on_train_batch_end=read))

    model: Any = None
    on.run(program, ("begin", 0, 1), ("begin", 1, 1))
    assert [*warned[1:], "the learning rate 0.5" in caplog.text] == [False, True, True]
    assert set(rates) == {0.25}


def halving(on: Machine) -> Any:
    """Returns a callback that halves the learning rate in each epoch."""

    def halve(epoch: int, logs: Any = None) -> None:
        rate = callback.model.optimizer.learning_rate
        rate.assign(rate * 0.5)

    callback = on.callback(on_epoch_begin=halve)
    return callback


@LINES
def test_a_learning_rate_that_a_callback_changes_gets_no_warning(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a later fit of the program begins with the changed rate."""

    def program() -> None:
        model = on.model()
        for _ in range(2):
            on.fit(model, halving(on))

    on.run(program, ("begin", 1, 1), ("begin", 0, 1), ("begin", 1, 1))
    assert "sets the learning rate" not in caplog.text


@LINES
def test_a_fit_that_is_called_again_gets_no_warning_about_its_learning_rate(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a notebook, with the model that a callback has trained at another rate."""
    on.start()
    model = on.model()
    on.cuts = [("begin", 1, 1)]
    with pytest.raises(SystemExit):
        on.fit(model, halving(on))
    on.fit(model, halving(on))
    assert on.commits
    assert "sets the learning rate" not in caplog.text


@LINES
def test_arrays_that_a_program_changes_in_place_are_compared_as_they_were_saved(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart from the second epoch has the rows of the first epoch."""
    rows = X.copy()

    def double(epoch: int, logs: Any = None) -> None:
        rows[:] *= 2

    def program(ours: Any = None) -> Any:
        rows[:] = X
        return on.fit(None, on.callback(on_epoch_end=double), ours=ours, x=rows)

    on.cuts = [("begin", 1, 2)]
    on.start()
    with pytest.raises(SystemExit):
        program()
    assert "samples of the training arrays differ" not in caplog.text
    on.start()
    program()
    assert "samples of the training arrays differ" in caplog.text


@LINES
def test_the_end_of_a_fold_is_given_to_no_other_fold(on: Machine, line: str) -> None:
    """Also if a program continues with its folds after the error."""
    on.run(lambda: on.fit(epochs=1))
    for _ in range(2):
        on.start()
        for shift in (1, 2):
            with pytest.raises(errors.CheckpointMismatchError, match="other training"):
                on.fit(epochs=1, x=X + shift)


@LINES
def test_a_fold_given_by_a_program_argument_is_refused(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start has other arrays, and another argument in its command line."""
    on.run(lambda: on.fit(epochs=1))
    for fold in (2, 3, 4):
        on.start()
        monkeypatch.setattr(sys, "argv", ["train.py", "--fold", f"{fold}"])
        with pytest.raises(errors.CheckpointMismatchError, match="other training"):
            on.fit(epochs=1, x=X + fold)


@LINES
def test_a_complete_fit_that_was_resumed_on_other_data_is_restored(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = iter([X, X + 1])
    on.run(lambda: on.fit(epochs=1, x=next(rows)), ("begin", 0, 1))
    assert on.run(lambda: on.fit(epochs=1, x=X + 2)).epoch == [0]
    assert "cannot be compared" in caplog.text


@LINES
def test_the_fit_after_one_that_resumed_on_other_data_has_its_data_compared(
    on: Machine, line: str
) -> None:
    """Only the data of the first fit differ between starts."""
    rows = iter([X, X + 1, X + 2])

    def program(second: Any) -> None:
        on.fit(epochs=1, x=next(rows))
        on.fit(epochs=1, x=second)

    on.run(lambda: program(X + 5), ("begin", 0, 1))
    on.start()
    with pytest.raises(errors.CheckpointMismatchError, match="other training"):
        program(X + 6)


@LINES
def test_a_fit_that_resumes_on_other_data_is_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a split without a seed; a copy of the data is not named."""
    rows = [{}, {"x": X + 0, "y": Y + 0}, OTHER_ROWS]
    cuts = [("begin", 0, 1), ("begin", 0, 2)]
    on.run(lambda: on.fit(epochs=1, **rows.pop(0)), *cuts)
    [text] = [each for each in caplog.messages if "arrays differ" in each]
    assert "resumes on other data" in text


@LINES
def test_values_of_a_validation_are_not_kept_after_its_epoch(
    on: Machine, line: str
) -> None:
    held: list[int] = []
    gc.freeze()  # objects of earlier tests are not searched

    def count(*_: Any, **__: Any) -> None:
        gc.collect()
        held.append(sum(type(each) is EncodedValue for each in gc.get_objects()))

    tests = ("on_test_begin", "on_test_batch_begin")
    hooks = ("on_epoch_begin", *tests, "on_epoch_end")
    counts = on.callback(**dict.fromkeys(hooks, count))
    on.run(lambda: on.fit(None, counts, epochs=2, **HELD_OUT))
    # The values are kept from before the hooks of on_test_begin.
    expected = [False, True, True, True, True, False]
    after = held[5]  # when the second epoch begins
    assert [each > after for each in held[:6]] == expected


@LINES
def test_a_program_that_changes_its_directory(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative names refer to the working directory in which each fit began."""
    begun = {name: on.directory / name for name in ("first", "second")}

    def program(ours: Any = None) -> list[Any]:
        log = on.keras.callbacks.CSVLogger("log.csv")
        found: list[Any] = []
        for directory in begun.values():
            directory.mkdir(exist_ok=True)
            monkeypatch.chdir(directory)
            # Not sooner: tf_keras opens the log with its first row.
            move = on.callback(on_epoch_end=lambda *_, **__: os.chdir(on.directory))
            on.checkpoints = Path("checkpoints")
            given = on.preemption() if ours is None else ours
            on.fit(None, log, move, ours=given, **HELD_OUT)
            found.append((directory / "log.csv").read_bytes())
            if given:
                assert Path(given.latest_checkpoint).parents[2] == directory
        return found

    expected = alone(on, program)
    for directory in begun.values():
        shutil.rmtree(directory)
    assert on.run(program, ("begin", 1, 2), ("test", 2, 0)) == expected
    assert on.run(program) == expected  # complete: no row is written
    assert not (on.directory / "log.csv").exists()


# --- many restarts of one fit --------------------------------------------------------


@LINES
@pytest.mark.parametrize("hook", ["begin", "end"])
def test_interrupted_at_every_batch(on: Machine, line: str, hook: str) -> None:
    """Each start reaches only the next batch."""

    def program(ours: Any = None) -> Result:
        model = on.model()
        return result(model, on.fit(model, ours=ours, epochs=2, **HELD_OUT))

    expected = alone(on, program)
    points = [*((hook, batch) for batch in range(BATCHES)), ("test", 0), ("test", 1)]
    cuts = [(where, epoch, batch) for epoch in range(2) for where, batch in points]
    assert on.run(program, *cuts) == expected


@LINES
@pytest.mark.parametrize(("size", "begins"), [(3, (0, 3, 6, 9)), (20, (0,))])
def test_interrupted_at_every_step_of_many_batches(
    on: Machine, line: str, size: int, begins: tuple[int, ...]
) -> None:
    """An epoch has 11 batches: tf_keras changes the size of a step that finds fewer."""

    def program(ours: Any = None) -> Result:
        model = on.model(steps_per_execution=size)
        return result(model, on.fit(model, ours=ours, batch_size=2, **HELD_OUT))

    expected = alone(on, program)
    points = [*(("begin", batch) for batch in begins), ("test", 0)]
    cuts = [(where, epoch, batch) for epoch in range(EPOCHS) for where, batch in points]
    assert on.run(program, *cuts) == expected


@LINES
@pytest.mark.parametrize(
    "cuts",
    [
        [("end", epoch, BATCHES - 1) for epoch in range(EPOCHS)],
        [("end", 0, BATCHES - 1), ("test", 0, 0), ("test", 1, 0)],
    ],
)
@pytest.mark.parametrize("is_validated", [True, False])
def test_interrupted_where_data_of_unknown_length_end(
    on: Machine, line: str, cuts: list[Any], is_validated: bool
) -> None:
    """tf_keras counts the optimizer's iterations up there, though no step is made."""

    def program(ours: Any = None) -> Result:
        model = on.model()
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True)
        rows = rows.shuffle(SAMPLES, seed=5).batch(BATCH)
        given = {"x": rows, "y": None, "batch_size": None, "shuffle": None}
        given |= HELD_OUT if is_validated else {}
        return result(model, on.fit(model, ours=ours, **given))

    expected = alone(on, program)
    cuts = [cut for cut in cuts if is_validated or cut[0] != "test"]
    assert on.run(program, *cuts) == expected


# --- evaluate ------------------------------------------------------------------------


@LINES
def test_evaluate_inside_and_outside_of_fit(on: Machine, line: str) -> None:
    def program(ours: Any = None) -> Any:
        model = on.model()
        scores: list[Any] = []

        def score(*_: Any, **__: Any) -> None:
            scores.append(model.evaluate(X[:8], Y[:8], batch_size=BATCH, verbose=0))

        model.build((None, 3))
        inside = on.callback(on_epoch_end=score)
        history = on.fit(model, inside, ours=ours, **HELD_OUT)
        score()
        return result(model, history), scores[-1]

    expected = alone(on, program)
    assert on.run(program, ("begin", 1, 2), ("test", 1, 1), ("epoch", 2, 0)) == expected


# --- places and settings -------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "place", "verbose", "built"),
    [("keras", 0, 0, True), ("keras", 1, 1, False), ("tf_keras", 2, 2, True)],
)
def test_anywhere_in_the_list_and_with_any_output(
    on: Machine, line: str, place: int, verbose: int, built: bool
) -> None:
    def program(ours: Any = None) -> Result:
        model = on.model()
        if built:
            model.build((None, 3))
        kinds = on.keras.callbacks
        log = kinds.CSVLogger(str(on.directory / "log.csv"))
        callbacks = [kinds.ReduceLROnPlateau("loss", patience=1, min_delta=1e9), log]
        if ours is None:
            callbacks.insert(place, on.preemption())
        callbacks.append(on.interrupter())
        given = on.arrays() | HELD_OUT
        # Keras flattens a list in the list.
        callbacks = [callbacks[:2], *callbacks[2:]] if place == 1 else callbacks
        history = model.fit(
            **given, epochs=EPOCHS, verbose=verbose, callbacks=callbacks
        )
        return *result(model, history), (on.directory / "log.csv").read_bytes()

    expected = alone(on, program)
    assert on.run(program, ("begin", 1, 3), ("test", 1, 1)) == expected


@LINES
def test_initial_epoch_and_validation_freq(on: Machine, line: str) -> None:
    def program(ours: Any = None) -> Result:
        model = on.model()
        chosen = {"initial_epoch": 2, "epochs": 6, "validation_freq": 2} | HELD_OUT
        return result(model, on.fit(model, ours=ours, **chosen))

    expected = alone(on, program)
    cuts = [("begin", 2, 1), ("test", 3, 1), ("epoch", 4, 0), ("end", 5, 5)]
    assert on.run(program, *cuts) == expected
    assert expected[1] == [2, 3, 4, 5]
    assert len(expected[0]["val_loss"]) == 2


# --- the end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("keras", ("begin", 2, 1)),
        ("keras", ("test", 2, 0)),
        ("tf_keras", ("epoch", 2, 0)),
    ],
)
def test_the_best_weights_are_restored_at_the_end(
    on: Machine, line: str, where: Any
) -> None:
    """The best epoch was before the restart."""

    def program(ours: Any = None) -> Result:
        early = on.keras.callbacks.EarlyStopping(
            "val_loss", patience=2, min_delta=1e9, restore_best_weights=True
        )
        model = on.model()
        return result(model, on.fit(model, early, ours=ours, epochs=9, **HELD_OUT))

    expected = alone(on, program)
    assert on.run(program, where) == expected
    assert on.run(program) == expected  # complete: nothing is trained


@LINES
def test_stopped_by_someone_else(on: Machine, line: str) -> None:
    """The checkpoint is kept, and a new start restores and trains nothing."""
    trained: list[int] = []

    def program(ours: Any = None) -> tuple[Result, bool]:
        model = on.model()

        def stop(epoch: int, logs: Any = None) -> None:
            model.stop_training = epoch == 1

        callbacks = on.callback(
            on_epoch_end=stop,
            on_train_batch_end=lambda batch, logs=None: trained.append(batch),
        )
        found = result(model, on.fit(model, callbacks, ours=ours, epochs=9))
        return found, model.stop_training  # a loop over fits may end by the flag

    expected = alone(on, program)
    assert expected[1]
    assert on.run(program, ("begin", 1, 2)) == expected
    trained.clear()
    assert on.run(program) == expected
    assert trained == []


@LINES
def test_run_again_after_completion(on: Machine, line: str) -> None:
    trained: list[int] = []

    def program(epochs: int, ours: Any = None) -> Result:
        model = on.model()
        note = on.callback(on_train_batch_end=lambda b, logs=None: trained.append(b))
        return result(model, on.fit(model, note, ours=ours, epochs=epochs, **HELD_OUT))

    first = on.run(lambda: program(2))
    trained.clear()
    assert on.run(lambda: program(2)) == first
    assert trained == []
    more = on.run(lambda: program(4), ("begin", 2, 0), ("begin", 3, 2))
    assert more == alone(on, lambda ours: program(4, ours))


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "error"), [("keras", KeyboardInterrupt), ("tf_keras", ValueError("mine"))]
)
def test_an_error_in_fit_and_a_new_fit(on: Machine, line: str, error: Any) -> None:
    """The next fit resumes at the newest commit, in the same process or a new one."""

    def failing(batch: int, logs: Any = None) -> None:
        if on.cuts == ["fail"] and batch == 2:
            on.cuts = []
            raise error

    def program(ours: Any = None) -> Any:
        model = on.model()
        fails = on.callback(on_train_batch_begin=failing)
        return model, on.fit(model, fails, ours=ours)

    expected = result(*alone(on, program))
    on.cuts = ["fail"]
    on.start()
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        program(on.preemption(save_freq=1))
    on.keras.utils.set_random_seed(7)
    model, history = program()
    assert result(model, history) == expected
    assert not isinstance(model.train_function, TrainFunctionWrapper)


@LINES
def test_an_interrupted_end_of_a_fit_leaves_no_commit(on: Machine, line: str) -> None:
    """A notice is served at its end, and a notebook catches the SystemExit."""
    trained: list[int] = []

    def program(*more: Any) -> Any:
        note = on.callback(on_train_batch_end=lambda b, logs=None: trained.append(b))
        return on.fit(None, note, *more, epochs=1).epoch

    on.start()
    with pytest.raises(SystemExit):
        program(on.callback(on_train_end=lambda logs=None: on.button.press()))
    assert on.commits == [BATCHES]
    with pytest.raises(errors.UsageError, match=r"while model\.fit runs"):
        save_all_states()
    trained.clear()
    assert on.run(program) == [0]
    assert trained == []


@LINES
def test_the_train_function_is_given_back(on: Machine, line: str) -> None:
    def program() -> Any:
        model = on.model()
        on.fit(model, epochs=1)
        function = model.train_function
        on.fit(model, ours=False, epochs=1)
        return function, model.train_function

    for function in on.run(program):
        assert function is not None
        assert not isinstance(function, TrainFunctionWrapper)


# --- save_freq -----------------------------------------------------------------------

FINAL = EPOCHS * BATCHES


@pytest.mark.parametrize(
    ("line", "save_freq", "steps"),
    [
        ("keras", "epoch", [6, 12, FINAL]),
        ("tf_keras", "epoch", [6, 12, FINAL]),
        ("keras", 4, [4, 8, 12, 16, FINAL]),
        ("keras", 100, [FINAL]),
        ("tf_keras", None, [FINAL]),
    ],
)
def test_commits_are_made_when_requested(
    on: Machine, line: str, save_freq: Any, steps: list[int]
) -> None:
    ours = {"save_freq": save_freq, "max_to_keep": None, "async_save": False}
    on.run(lambda: on.fit(ours=on.preemption(**ours)))
    assert on.commits == steps


@LINES
def test_asynchronous_commits_equal_synchronous_commits(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, though steps change every variable before one is written."""
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    add = bundle_writer.add
    trained = threading.Semaphore(0)

    def add_later(*args: Any, check: Any, **more: Any) -> Any:
        if check is not None:
            while trained.acquire(blocking=False):
                pass
            for _ in range(2):
                trained.acquire(timeout=1.0)  # at the end no batch comes any more
        return add(*args, check=check, **more)

    monkeypatch.setattr(bundle_writer, "add", add_later)

    def commits(name: str, **ours: Any) -> dict[int, dict[str, bytes]]:
        on.checkpoints = on.directory / name
        note = on.callback(on_train_batch_end=lambda b, logs=None: trained.release())
        ours = {"max_to_keep": None} | ours
        on.run(lambda: on.fit(None, note, ours=on.preemption(**ours)))
        return {step: tensors(on.checkpoints / str(step)) for step in on.commits}

    waited = commits("synchronous", save_freq=1, async_save=False)
    assert list(waited) == list(range(1, FINAL + 1))
    made = commits("asynchronous", save_freq=4)
    assert len(made) >= 3
    for step, found in made.items():
        assert found.keys() == waited[step].keys()
        assert all(found[name] == waited[step][name] for name in found)


def tensors(commit: Path) -> dict[str, bytes]:
    """Returns the tensors of the model and optimizer that stock TensorFlow reads."""
    reader = tf.train.load_checkpoint(str(commit / "ckpt"))
    names = reader.get_variable_to_shape_map()
    kept = [name for name in names if name.startswith(("model/", "optimizer/"))]
    return {name: np.asarray(reader.get_tensor(name)).tobytes() for name in kept}


@LINES
def test_preempted_in_the_last_validation(on: Machine, line: str) -> None:
    """The start after it commits the end, though it makes no step."""
    ended: list[int] = []
    counts = on.callback(on_epoch_end=lambda epoch, logs=None: ended.append(epoch))

    def program(ours: Any = None) -> Result:
        model = on.model()
        history = on.fit(model, counts, ours=ours, epochs=1, **HELD_OUT)
        return result(model, history)

    first = on.run(program, ("test", 0, 0))
    assert ended == [0]
    assert on.run(program) == first
    assert ended == [0]


@LINES
@pytest.mark.parametrize("save_freq", ["epoch", 6])
def test_a_validation_that_was_preempted_is_committed_at_its_end(
    on: Machine, line: str, save_freq: Any
) -> None:
    """The step of the commit equals the restored step."""
    ours = {"save_freq": save_freq, "max_to_keep": None, "async_save": False}
    on.run(
        lambda: on.fit(ours=on.preemption(**ours), epochs=2, **HELD_OUT),
        ("test", 0, 0),
    )
    assert on.commits == [6, 6, 12]


@LINES
def test_a_fit_from_scratch_logs_its_start(on: Machine, line: str) -> None:
    """Its journal is open from then on, and `tfpreempt simulate` finds the run."""
    on.run(lambda: on.fit(ours=on.preemption(save_freq=None)))
    first, *_ = read_journal(journal_directory(on.checkpoints))
    assert (first["event"], first["path"], first["step"]) == ("restored", None, 0)


@LINES
def test_the_logs_of_an_epoch_are_in_the_journal(on: Machine, line: str) -> None:
    """And the position of each start: `tfpreempt report` draws both."""
    on.run(lambda: on.fit(ours=on.preemption(), epochs=2, **HELD_OUT))
    records = read_journal(journal_directory(on.checkpoints))
    told = [each for each in records if each["event"] == "metrics"]
    assert [each["step"] for each in told] == [6, 12]
    assert all({"loss", "val_loss"} <= each["values"].keys() for each in told)
    assert [r["step"] for r in records if r["event"] == "firststep"] == [1]


@LINES
@pytest.mark.parametrize(("grace", "is_warned"), [(0.05, True), (30.0, False)])
def test_steps_longer_than_the_grace_period_cause_a_warning(
    on: Machine,
    line: str,
    grace: float,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Batches of a validation do not count."""
    config = TerminationConfig(
        signals=(), sources=[lambda: on.button], grace_period=grace
    )
    slow = on.callback(on_train_batch_begin=lambda batch, logs=None: time.sleep(0.1))
    ours = on.preemption(termination_config=config)
    on.run(lambda: on.fit(None, slow, ours=ours, epochs=2, **HELD_OUT))
    found = [each for each in caplog.messages if "but a notice leaves" in each]
    assert len(found) == is_warned
    records = read_journal(journal_directory(on.checkpoints))
    told = [r["step_seconds"] for r in records if r["event"] == "commit"]
    assert told[-1] >= 0.1


@LINES
def test_commits_by_time(on: Machine, line: str) -> None:
    """The number of commits depends on the time; the end is committed too."""
    ours = {"save_freq": datetime.timedelta(milliseconds=1), "max_to_keep": None}
    on.run(lambda: on.fit(ours=on.preemption(**ours)))
    records = read_journal(journal_directory(on.checkpoints))
    because = [r["because"] for r in records if r["event"] == "commit"]
    assert "periodic" in because
    assert on.commits[-1] == FINAL
    trained: list[int] = []
    note = on.callback(on_train_batch_end=lambda b, logs=None: trained.append(b))
    assert on.run(lambda: on.fit(None, note)).epoch == ALL
    assert trained == []


@LINES
def test_a_log_that_cannot_be_read_costs_one_save(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A periodic save: the failure is logged, and training continues."""
    path, aside = on.directory / "log.csv", on.directory / "aside.csv"
    epochs: list[int] = []

    def begin(epoch: int, logs: Any = None) -> None:
        epochs.append(epoch)
        if epoch == 2:
            path.rmdir()
            aside.rename(path)

    def spoil(batch: int, logs: Any = None) -> None:
        if (epochs[-1], batch) == (1, 0):
            path.rename(aside)
            path.mkdir()

    log = on.keras.callbacks.CSVLogger(str(path))
    spoils = on.callback(on_epoch_begin=begin, on_train_batch_end=spoil)
    ours = {"save_freq": 5, "max_to_keep": None, "async_save": False}
    on.run(lambda: on.fit(None, log, spoils, ours=on.preemption(**ours)))
    assert on.commits == [5, 15, FINAL]
    assert "periodic save failed" in caplog.text
    assert len(path.read_text().split()) == EPOCHS + 1


@LINES
def test_a_log_that_cannot_be_read_is_no_matter_to_a_validation(
    on: Machine, line: str
) -> None:
    """A validation makes no commit here, so no log is read."""
    path, aside = on.directory / "log.csv", on.directory / "aside.csv"

    def spoil(logs: Any = None) -> None:
        if path.exists():  # tf_keras makes it with the first row
            path.rename(aside)
            path.mkdir()

    def mend(logs: Any = None) -> None:
        if aside.exists():
            path.rmdir()
            aside.rename(path)

    log = on.keras.callbacks.CSVLogger(str(path))
    spoils = on.callback(on_test_begin=spoil, on_test_end=mend)
    assert on.run(lambda: on.fit(None, log, spoils, **HELD_OUT)).epoch == ALL
    assert len(path.read_text().split()) == EPOCHS + 1


@LINES
def test_steps_per_execution_rounds_up(on: Machine, line: str) -> None:
    """Every 3 batches is every 2 steps of 2."""
    ours = {"save_freq": 3, "max_to_keep": None, "async_save": False}

    def program() -> Any:
        model = on.model(steps_per_execution=2)
        return on.fit(model, ours=on.preemption(**ours), epochs=2)

    on.run(program)
    assert on.commits == [2, 4, 6]
