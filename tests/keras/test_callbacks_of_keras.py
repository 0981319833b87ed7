"""Callbacks of Keras 3 and tf_keras, one at a time and without a fit."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES, callbacks_of, looks, travelled  # noqa: E402
from tfpreempt.keras.callbacks import callback_list, callback_state  # noqa: E402


def keras_model(line):
    keras = importlib.import_module(line)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def put_into(fresh, callback, extends=False):
    states = travelled(callback_state.capture([callback]))
    callback_state.restore([fresh], states, extends=extends)


@LINES
def test_best_weights_of_any_type_come_back(line):
    bfloat16 = tf.bfloat16.as_numpy_dtype
    saved, fresh = (callbacks_of(line).EarlyStopping("loss") for _ in range(2))
    for one in (saved, fresh):
        one.on_train_begin()
    saved.best = np.float32(-np.inf)
    saved.best_weights = [np.arange(3).astype(bfloat16), np.float16(2), np.zeros((0,))]
    put_into(fresh, saved)
    assert type(fresh.best) is np.float32
    assert [w.dtype for w in fresh.best_weights] == [bfloat16, np.float16, float]
    assert [w.tolist() for w in fresh.best_weights] == [[0, 1, 2], 2, []]


@LINES
def test_history_is_filled_in_place(line):
    saved, fresh = (callbacks_of(line).History() for _ in range(2))
    for one in (saved, fresh):
        one.on_train_begin()
    saved.epoch += [0, 1]
    saved.history.update(loss=[0.1, float("nan")], lr=[np.float32(0.1), tf.ones(2)])
    held, fresh.history["acc"] = fresh.history, [7.0]
    put_into(fresh, saved)
    assert held is fresh.history
    assert repr(held) == (
        "{'loss': [0.1, nan], 'lr': [np.float32(0.1), array([1., 1.], dtype=float32)]}"
    )
    assert fresh.epoch == [0, 1]


def test_swapped_weights_are_known_to_be_swapped():
    saved, fresh = (callbacks_of("keras").SwapEMAWeights() for _ in range(2))
    saved._ema_weights_in_model = True  # where a validation begins
    put_into(fresh, saved, extends=True)
    assert not fresh._ema_weights_in_model
    put_into(fresh, saved)
    assert fresh._ema_weights_in_model


@LINES
def test_stateless_callbacks_leave_nothing(line, caplog):
    kinds = callbacks_of(line)
    callbacks = [
        kinds.LambdaCallback(on_epoch_end=print),
        kinds.RemoteMonitor(),
        kinds.TerminateOnNaN(),
        kinds.BackupAndRestore("somewhere"),
        kinds.LearningRateScheduler(print),
    ]
    assert callback_list.unsupported(callbacks) == []
    states = callback_state.capture(callbacks)
    assert states.header == {}
    callback_state.restore([kinds.History()], states)
    (record,) = caplog.records
    assert f"no state for the callback {line}.History" in record.getMessage()


@LINES
def test_of_a_users_callback_only_what_it_adds_is_named(line):
    class Mine(callbacks_of(line).Callback):
        pass

    class Stopping(callbacks_of(line).EarlyStopping):
        def on_train_begin(self, logs=None):
            super().on_train_begin()
            self.stops = 0

    mine, stopping = Mine(), Stopping("loss")
    for callback in (mine, stopping):
        callback.set_params({"epochs": 1})
        callback.set_model(None)
        callback.on_train_begin()
    (text,) = callback_list.unsupported([mine, stopping])
    assert text.endswith("Stopping (stops)")


@LINES
def test_the_direction_of_an_unusual_metric_comes_back(line):
    """Keras 3 reads the direction from the metrics, which may not exist yet."""
    make = callbacks_of(line).ReduceLROnPlateau
    mode = "max" if line == "keras" else "auto"
    saved, fresh = make("acc", mode=mode), make("acc")
    if line == "keras":
        saved._set_monitor_op()
    for one in (saved, fresh):
        one.on_train_begin()
    saved.best = 0.25
    put_into(fresh, saved)
    assert fresh.mode == "auto"
    assert fresh.monitor_op(0.5, fresh.best)
    assert not fresh.monitor_op(0.2, fresh.best)


class Clock:
    """`time.time` with a time of our own."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("time.time", lambda: self.now)


@LINES
def test_batch_counters_of_an_extended_fit(line, tmp_path):
    """The first batch was counted from zero before the restore."""
    saved, fresh = (
        callbacks_of(line).TensorBoard(str(tmp_path), write_graph=False)
        for _ in range(2)
    )
    model = keras_model(line)
    for one in (saved, fresh):
        one.set_model(model)
        one.on_train_begin()
    for batch in range(3):
        saved.on_train_batch_begin(batch)
    fresh.on_train_batch_begin(0)
    put_into(fresh, saved, extends=True)
    assert fresh._global_train_batch == 4


def test_the_open_writer_counts_from_the_restored_step(tmp_path):
    """Keras 3 only: the callback of tf_keras reads a counter of the model."""
    step = tf.summary.experimental.get_step
    tf.summary.experimental.set_step(None)  # left open by an interrupted fit
    saved, fresh = (
        callbacks_of("keras").TensorBoard(str(tmp_path), 0, False, update_freq="batch")
        for _ in range(2)
    )
    model = keras_model("keras")
    for one, steps in ((saved, 7), (fresh, 1)):
        one.set_model(model)
        one.on_train_begin()
        for batch in range(steps):
            one.on_train_batch_begin(batch)
        one.on_test_begin()
        one.on_test_batch_begin(0)
        one.on_test_batch_begin(1)
    saved.on_test_batch_begin(2)
    put_into(fresh, saved)
    assert step() == 3  # of the validation, which is the innermost writer
    fresh.on_test_end({})
    put_into(fresh, saved)
    assert step() == 7
    for one in (fresh, saved):
        one.on_train_batch_begin(7)
        assert step() == 8
    fresh.on_train_end()
    saved.on_test_end({})
    saved.on_train_end()
    assert step() is None


@LINES
@pytest.mark.parametrize("extends", [False, True])
def test_speeds_count_the_time_of_training_only(line, extends, tmp_path, monkeypatch):
    clock, model = Clock(monkeypatch), keras_model(line)
    iterations = model.optimizer.iterations

    def board_at(steps):
        board = callbacks_of(line).TensorBoard(
            str(tmp_path), write_graph=False, write_steps_per_second=True
        )
        board.set_model(model)
        board.on_train_begin()
        iterations.assign(steps)
        board.on_epoch_begin(0)
        return board

    saved = board_at(4)
    clock.now += 3
    iterations.assign(10)
    states = travelled(callback_state.capture([saved]))
    clock.now += 500
    fresh = board_at(0)
    iterations.assign(10)  # the variables are restored before the callbacks
    callback_state.restore([fresh], states, extends=extends)
    clock.now += 1
    iterations.assign(13)
    assert fresh._compute_steps_per_second() == pytest.approx(
        (13 - 10) / 1 if extends else (13 - 4) / 4
    )


def bar_at(line, clock, batches, target=10, verbose=1, seconds=2.0):
    logger = callbacks_of(line).ProgbarLogger(*(["steps"] if line[0] == "t" else []))
    logger.set_params({"verbose": verbose, "epochs": 2, "steps": target})
    logger.on_train_begin()
    logger.on_epoch_begin(0)
    for batch in range(batches):
        clock.now += seconds
        logger.on_train_batch_end(batch, {"loss": float(batch)})
    return logger


@LINES
@pytest.mark.parametrize("verbose", [0, 1, 2])
@pytest.mark.parametrize("target", [10, None])
def test_the_bar_goes_on_where_it_was(line, verbose, target, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    whole = bar_at(line, clock, 6, target, verbose)
    saved = bar_at(line, clock, 5, target, verbose)
    states = travelled(callback_state.capture([saved]))
    clock.now += 500
    fresh = bar_at(line, clock, 0, target, verbose)
    callback_state.restore([fresh], states)
    clock.now += 2
    capsys.readouterr()
    fresh.on_train_batch_end(5, {"loss": 5.0})
    shown = capsys.readouterr().out
    assert looks([fresh]) == looks([whole])
    assert clock.now - fresh.progbar._start == 12  # seconds of training, no pause
    assert ("6/10" in shown or "6/Unknown" in shown) == (verbose == 1)
    fresh.on_epoch_end(0, {"loss": 1.0})
    assert ("12s" in capsys.readouterr().out) == (verbose > 0)
    assert fresh.target == (target or 6)


@LINES
def test_an_extended_fit_has_a_new_bar_of_the_known_length(line, monkeypatch):
    clock = Clock(monkeypatch)
    saved = bar_at(line, clock, 5, target=None)
    saved.on_epoch_end(0, {"loss": 1.0})
    fresh = bar_at(line, clock, 0, target=None)
    put_into(fresh, saved, extends=True)
    assert (fresh.seen, fresh.target, fresh.progbar.target) == (0, 5, 5)
    assert fresh.progbar._values == {}


@LINES
def test_a_bar_that_is_not_there_is_no_matter(line, monkeypatch, caplog):
    saved = bar_at(line, Clock(monkeypatch), 1)
    states = travelled(callback_state.capture([saved]))
    callback_state.restore([], states)
    fresh = callbacks_of(line).ProgbarLogger()
    callback_state.restore([fresh], states)
    assert fresh.progbar is None
    put_into(saved, fresh)
    assert not caplog.records
