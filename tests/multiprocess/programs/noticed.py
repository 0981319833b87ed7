"""A program with `run()`, a watch scope or `fit`, which prints its phases.

The program prints `began`, and `in PHASE` when the phase is reached for the given time;
there the program waits for a moment. It prints `child PID` for each process that reads
data, and `listens` when the handler receives notices. For each step it prints `enters N
TIME` when it asks whether to make the step, and `step N` at the end of the step. The
results are in `result {...}`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import multiprocessing
import time
from typing import IO, Any

import tfpreempt

STEPS, EPOCH, SAVE_EVERY, BATCH = 12, 4, 3, 8

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint_dir")
parser.add_argument("--way", default="run", help="run, scope, keras or tf_keras")
parser.add_argument("--strategy", default="none")
parser.add_argument("--phase")
parser.add_argument("--count", type=int, default=1)
parser.add_argument("--linger", type=float, default=0.0, help="seconds")
parser.add_argument("--grace", type=float)
parser.add_argument("--unprotected", action="store_true")
parser.add_argument("--sync-saves", action="store_true")
parser.add_argument("--children", action="store_true", help="read the data")
options = parser.parse_args()
times = itertools.count(1)


def at(phase: str) -> None:
    """Marks that the program has reached a phase."""
    if phase == options.phase and next(times) == options.count:
        print(f"in {phase}\n", end="", flush=True)
        time.sleep(options.linger)


config = tfpreempt.TerminationConfig(grace_period=options.grace)
if not options.unprotected:
    tfpreempt.handle_early_notices(config)
print("began\n", end="", flush=True)
at("import")

import numpy as np  # noqa: E402 - protection comes first
from toy_model import (  # noqa: E402
    Model,
    before_asynchronous_writes,
    log_to_stdout,
    make_strategy,
    say,
    say_when,
    slow_down,
)


class Told(tfpreempt.State):
    """A State whose `save` and `load` are phases. It has a `sync`, so no trial save."""

    def sync(self) -> None:
        pass

    def save(self, fileobj: IO[bytes]) -> None:
        at("save")

    def load(self, fileobj: IO[bytes]) -> None:
        at("restore")


def read(number: int) -> Any:
    """Returns the rows of a batch."""
    return np.random.default_rng(number).random((BATCH, 7), np.float32)


class Reader:
    """Reads batches, in child processes with `--children`."""

    def __init__(self) -> None:
        self._pool: Any = None
        if options.children:
            self._pool = multiprocessing.get_context("fork").Pool(2)
            for child in multiprocessing.active_children():
                say("child", child.pid)

    def batch(self, number: int) -> Any:
        return self._pool.apply(read, (number,)) if self._pool else read(number)


def begin() -> None:
    """Marks the beginning of a step."""
    slow_down()
    at("step")


# --- a loop of one's own -------------------------------------------------------------


class OwnModel(Model):
    """A model whose batches also come from a Reader."""

    reader: Reader

    def draw(self) -> Any:
        return super().draw() + self.reader.batch(self.steps)[0]

    def traced(self) -> None:
        at("trace")


def step(model: OwnModel, number: int) -> None:
    begin()
    if number == STEPS:
        at("last")
    model.step()


def loop() -> None:
    at("strategy")
    model = OwnModel(make_strategy(options.strategy))
    has_workers = options.strategy.startswith("mwms")
    resolver = model.strategy.cluster_resolver if has_workers else None
    at("construct")
    handler = tfpreempt.PreemptionCheckpointHandler(
        resolver,
        model.checkpoint,
        options.checkpoint_dir,
        config,
        save_freq=SAVE_EVERY,
        async_save=not options.sync_saves,
    )
    model.reader = Reader()
    say("listens")
    with handler:
        if options.way == "run":
            train(handler, model)
        else:
            with handler.watch_preemption_scope():
                train(handler, model)
    at("export")
    model.report()


def train(handler: tfpreempt.PreemptionCheckpointHandler, model: OwnModel) -> None:
    while (number := handler.total_run_calls + 1) <= STEPS:
        say_when("enters", number)
        if options.way == "run":
            handler.run(step, model, number)
        else:
            handler.save_checkpoint_if_preempted()
            step(model, number)
        say("step", number)
        at("callbacks")
        if number % EPOCH == 0:
            for _ in range(2):
                handler.check_preemption()
                at("validation")
            at("between")
    at("after")


# --- model.fit -----------------------------------------------------------------------


def fit() -> None:
    import tensorflow as tf

    keras = importlib.import_module(options.way)
    is_legacy = options.way == "tf_keras"
    if is_legacy:
        keras.backend.experimental.enable_tf_random_generator()
    elif options.strategy == "mwms":
        tfpreempt.keras.enable_multi_worker()
    keras.utils.set_random_seed(7)
    tf.config.experimental.enable_op_determinism()

    class Traced(keras.layers.Layer):
        def call(self, inputs: Any, training: Any = None) -> Any:
            at("trace")
            if training:  # main is inside of TensorFlow then
                tf.numpy_function(begin, [], [])
            return inputs

    class Batches(keras.utils.Sequence if is_legacy else keras.utils.PyDataset):
        def __init__(self, reader: Reader) -> None:
            super().__init__()
            self._reader = reader

        def __len__(self) -> int:
            return EPOCH

        def __getitem__(self, index: int) -> Any:
            rows = self._reader.batch(index)
            return rows, rows.sum(axis=1)

    class Watch(keras.callbacks.Callback):
        number = 0  # of the step

        def on_train_begin(self, logs: Any = None) -> None:
            say("listens")

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._before = epoch * EPOCH
            at("between")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.number = self._before + batch + 1
            say_when("enters", self.number)
            if self.number == STEPS:
                at("last")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            say("step", self.number)
            at("callbacks")

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            at("validation")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            at("between")

        def on_train_end(self, logs: Any = None) -> None:
            at("after")

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            pass

    watch = Watch()
    at("strategy")
    with make_strategy(options.strategy).scope():
        layers = keras.layers
        model = keras.Sequential(
            [Traced(), layers.Dense(8), layers.Dropout(0.3), layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=False)
    at("construct")
    ours = tfpreempt.keras.PreemptionCallback(
        options.checkpoint_dir,
        save_freq=SAVE_EVERY,
        termination_config=config,
        async_save=not options.sync_saves,
    )
    history = model.fit(
        Batches(Reader()),
        epochs=STEPS // EPOCH,
        verbose=0,
        callbacks=[ours, watch],
        validation_data=(read(100), read(100).sum(axis=1)),
        validation_batch_size=BATCH // 2,
    )
    at("export")
    weights = b"".join(value.tobytes() for value in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()
    say("result", json.dumps({"weights": digest, "history": history.history}))


log_to_stdout()
told = Told("told")
if options.phase == "write":
    before_asynchronous_writes(lambda: at("write"))
if options.way in ("run", "scope"):
    loop()
else:
    import tfpreempt.keras

    fit()
