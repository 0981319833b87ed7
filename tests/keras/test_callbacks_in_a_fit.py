"""Callbacks of Keras 3 and tf_keras continue in a new fit without a difference.

One fit of each Keras runs without interruption. Its state in the middle of an epoch is
restored into the new callbacks of another fit, which must have the same results.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.usefixtures("summaries")]
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES, callbacks_of, looks, travelled  # noqa: E402
from tfpreempt.keras.callbacks import callback_list, callback_state  # noqa: E402
from tfpreempt.keras.fit_record import EncodedValue  # noqa: E402

EPOCHS, BATCHES = 6, 4
PLACE = (3, 2)  # epoch and batch of the capture
STEP = PLACE[0] * BATCHES + PLACE[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The contents of a commit."""

    values: list[Any]  # of all variables at the beginning of the epoch
    states: EncodedValue
    files: EncodedValue
    looks: list[Any]


def probe(line, at, do):
    """A callback that does something before one step; batch -1 is before the epoch."""

    class Probe(callbacks_of(line).Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            self.on_train_batch_begin(-1)

        def on_train_batch_begin(self, batch, logs=None):
            if (self.epoch, batch) in at:
                do(batch)

    return Probe()


def build(line):
    keras = importlib.import_module(line)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    averages = {"use_ema": True} if line == "keras" else {}
    optimizer = keras.optimizers.SGD(0.9, **averages)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def variables(model):
    rate = model.optimizer.learning_rate  # not among the variables in tf_keras
    return [*model.variables, *model.optimizer.variables, rate]


def make_callbacks(line, directory):
    kinds = callbacks_of(line)
    made = [
        kinds.History(),
        kinds.EarlyStopping("loss", patience=9, restore_best_weights=True),
        kinds.ReduceLROnPlateau("loss", patience=1, cooldown=1, factor=0.3),
        kinds.ModelCheckpoint(
            str(directory / "{epoch}.weights.h5"),
            monitor="loss",
            save_best_only=True,
            save_weights_only=True,
            save_freq=5,
        ),
        kinds.CSVLogger(str(directory / "log.csv"), separator=";"),
        kinds.TensorBoard(
            str(directory / "board"), update_freq=5, write_steps_per_second=True
        ),
        kinds.ProgbarLogger(*([] if line == "keras" else ["steps"])),
        kinds.TerminateOnNaN(),
        kinds.LearningRateScheduler(lambda epoch, rate: rate),
    ]
    return [*made, kinds.SwapEMAWeights()] if line == "keras" else made


def train(model, callbacks, initial_epoch=0):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 8)), random.normal(size=(16, 1))
    return model.fit(
        x,
        y,
        batch_size=4,
        epochs=EPOCHS,
        initial_epoch=initial_epoch,
        shuffle=False,
        validation_data=(x[:4], y[:4]),
        callbacks=callbacks,
        verbose=1,
    )


def run_through(line, callbacks):
    """Runs a fit without interruption; returns the states during the fit."""
    model = build(line)
    taken: dict[str, Any] = {}

    def take(batch):
        if batch == -1:
            taken["values"] = [v.numpy() for v in variables(model)]
            return
        taken["states"] = callback_state.capture(callbacks)
        taken["files"] = callback_state.capture_files(callbacks)
        taken["looks"] = looks(callbacks)

    train(model, [*callbacks, probe(line, {PLACE, (PLACE[0], -1)}, take)])
    return model, Taken(**taken)


def go_on(line, callbacks, taken):
    """Runs a fit from the epoch; returns the callbacks' values after the restore."""
    model = build(line)
    for variable, value in zip(variables(model), taken.values, strict=True):
        variable.assign(value)
    restored = []

    def put(batch):
        callback_state.restore(callbacks, travelled(taken.states))
        callback_state.restore_files(callbacks, travelled(taken.files))
        if line == "tf_keras":
            model._train_counter.assign(STEP)
        restored.extend(looks(callbacks))

    history = train(model, [*callbacks, probe(line, {PLACE}, put)], PLACE[0])
    return model, history, restored


def scalars(directory):
    """The scalar summaries of a fit, without speeds."""
    found = []
    for path in directory.rglob("*tfevents*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [
                (value.tag, event.step, tf.make_ndarray(value.tensor).item())
                for value in event.summary.value
                if value.metadata.plugin_data.plugin_name == "scalars"
                and "per_second" not in value.tag
            ]
    return sorted(found)


def is_late(tag, step):
    """Whether a summary is written after the capture."""
    first = {"batch": STEP + 1, "epoch": PLACE[0]}
    return step >= first.get(tag.partition("_")[0], PLACE[0] * BATCHES + 1)


@LINES
def test_a_fresh_fit_goes_on_as_the_old_one(line, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    callbacks, fresh = make_callbacks(line, old), make_callbacks(line, new)
    for directory in (old, new):
        directory.mkdir()
    model, taken = run_through(line, callbacks)
    again, history, restored = go_on(line, fresh, taken)
    assert restored == taken.looks
    assert looks(fresh) == looks(callbacks)
    assert history.epoch == list(range(EPOCHS))
    assert (old / "log.csv").read_bytes() == (new / "log.csv").read_bytes()
    for value, other in zip(again.get_weights(), model.get_weights(), strict=True):
        assert value.tobytes() == other.tobytes()
    late = [row for row in scalars(old) if is_late(*row[:2])]
    assert {"batch_loss", "epoch_loss"} <= {row[0] for row in late}
    assert scalars(new) == late
    assert callback_list.unsupported(callbacks) == []
