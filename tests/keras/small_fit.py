"""Small fits that are preempted and restarted, in the process of the tests.

A start creates the model, the data and the callbacks again, and resets the state that
tfpreempt keeps for a process. Notices come from a button, not from signals.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tests.fakes.process import forget_fits, new_process
from tests.handler.program import Button
from tfpreempt import TerminationConfig
from tfpreempt.keras import PreemptionCallback

T = TypeVar("T")

SAMPLES, BATCH, BATCHES = 22, 4, 6  # the last batch is smaller
EPOCHS = 3
END = 1 << 30  # as a batch: the end of the epoch

X = np.random.default_rng(0).normal(size=(SAMPLES, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Machine:
    """The test's influence on a program.

    Args:
        line: "keras" or "tf_keras".
        directory: directory for checkpoints and other files.

    Attributes:
        cuts: remaining points of notices: hook, epoch, batch. The hooks are "begin" and
            "end" of a train batch, "test" (the begin of a test batch), "epoch" (the end
            of an epoch, batch 0).
        codes: exit codes of the process so far.
    """

    def __init__(self, line: str, directory: Path) -> None:
        self.line = line
        self.keras = importlib.import_module(line)
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self.button = Button()
        self.cuts: list[tuple[str, int, int]] = []
        self.codes: list[Any] = []

    # --- starts ----------------------------------------------------------------------

    def start(self, seed: int | None = 7) -> None:
        """A new process begins."""
        forget_fits()
        self.keras.backend.clear_session(*([False] if self.line == "keras" else []))
        if seed is not None:
            self.keras.utils.set_random_seed(seed)
            return
        tf.random.set_seed(None)
        np.random.seed(None)
        random.seed()

    def run(
        self,
        program: Callable[[], T],
        *cuts: tuple[str, int, int],
        seed: int | None = 7,
    ) -> T:
        """Starts a program repeatedly, until the program is complete."""
        self.cuts, self.codes = list(cuts), []
        while True:
            self.start(seed)
            try:
                result = program()
                break
            except SystemExit as left:
                self.codes.append(left.code)
        assert self.cuts == []
        assert self.codes == [143] * len(cuts)
        return result

    # --- callbacks -------------------------------------------------------------------

    def preemption(self, **more: Any) -> PreemptionCallback:
        """Ours."""
        config = TerminationConfig(signals=(), sources=[lambda: self.button])
        return PreemptionCallback(
            self.checkpoints, **{"termination_config": config} | more
        )

    def callback(self, **hooks: Callable[..., Any]) -> Any:
        """A callback with these hooks, and nothing to remember."""
        stateless = {
            "get_state": lambda self: {},
            "set_state": lambda self, state: None,
        }
        methods = {name: _method(hook) for name, hook in hooks.items()}
        base = self.keras.callbacks.Callback
        return type("Hooks", (base,), stateless | methods)()

    def interrupter(self, press: Callable[[], None] | None = None) -> Any:
        """A callback that gives the notices."""
        epochs: list[int] = []

        def at(hook: str, batch: int) -> None:
            if self.cuts and self.cuts[0] == (hook, epochs[-1], batch):
                self.cuts.pop(0)
                (press or self.button.press)()

        return self.callback(
            on_epoch_begin=lambda epoch, logs=None: epochs.append(epoch),
            on_train_batch_begin=lambda batch, logs=None: at("begin", batch),
            on_train_batch_end=lambda batch, logs=None: at("end", batch),
            on_test_batch_begin=lambda batch, logs=None: at("test", batch),
            on_epoch_end=lambda epoch, logs=None: at("epoch", 0),
        )

    # --- models ----------------------------------------------------------------------

    def model(self, **compiled: Any) -> Any:
        """A small one with random masks, slots and a metric; not built yet."""
        layers = self.keras.layers
        model = self.keras.Sequential(
            [
                layers.Dense(2, use_bias=False, name="first"),
                layers.Dropout(0.3),
                layers.Dense(1, use_bias=False, name="second"),
            ]
        )
        optimizer = self.keras.optimizers.SGD(0.005, momentum=0.9)
        chosen = {"optimizer": optimizer, "loss": "mse", "metrics": ["mae"]} | compiled
        model.compile(jit_compile=False, **chosen)
        return model

    def arrays(self) -> dict[str, Any]:
        """Returns arguments of `fit`."""
        return {"x": X, "y": Y, "batch_size": BATCH, "shuffle": True}

    def fit(
        self, model: Any = None, *others: Any, ours: Any = None, **more: Any
    ) -> Any:
        """The fit of a small model on arrays, under our callback and with cuts."""
        model = self.model() if model is None else model
        chosen = {"epochs": EPOCHS, "verbose": 0} | self.arrays() | more
        ours = [] if ours is False else [ours or self.preemption()]
        return model.fit(callbacks=[*ours, *others, self.interrupter()], **chosen)

    @property
    def commits(self) -> list[int]:
        """Returns the steps of the kept commits."""
        found = self.checkpoints.glob("*/COMMITTED")
        return sorted(int(path.parent.name.partition(".")[0]) for path in found)


def _method(hook: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return hook(*arguments, **keywords)

    return method


def values(model: Any) -> dict[str, bytes]:
    """Returns all values of a model and its optimizer."""
    optimizer = model.optimizer.variables
    found = [*model.variables, *(optimizer() if callable(optimizer) else optimizer)]
    metrics = [v for metric in model.metrics for v in metric.variables]
    return {
        f"{number}: {each.name.partition('/')[2]}": each.numpy().tobytes()
        for number, each in enumerate([*found, *metrics])
        if hasattr(each, "numpy")  # not a vocabulary of tf_keras
    }


@contextlib.contextmanager
def machine(line: str) -> Iterator[Machine]:
    """A machine with a directory in memory, on which no program ran before."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="tfpreempt-test-", dir=memory))
    legacy = importlib.import_module("tf_keras").backend.experimental
    was_enabled = legacy.is_tf_random_generator_enabled()
    legacy.enable_tf_random_generator()
    made = Machine(line, directory)
    with new_process(), contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, directory, ignore_errors=True)
        if not was_enabled:
            at_end.callback(legacy.disable_tf_random_generator)
        at_end.callback(forget_fits)
        yield made


class Seen:
    """The trained samples, batch by batch: the first feature of each sample.

    Attributes:
        epochs: batches in their order, by number of the epoch.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, list[list[int]]] = {}
        self._epoch = 0

    def model(self, machine: Machine) -> Any:
        """Returns a model that records its inputs, and learns nothing."""
        note = self._note

        class Watched(machine.keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.weight = machine.keras.layers.Dense(1)

            def call(self, inputs: Any) -> Any:
                return self.weight(inputs)

            def train_step(self, data: Any) -> dict[str, Any]:
                data = data[0] if isinstance(data, tuple) else data
                if tf.executing_eagerly():
                    note(data)
                return {"loss": tf.reduce_mean(self(data, training=True))}

            def test_step(self, data: Any) -> dict[str, Any]:
                data = data[0] if isinstance(data, tuple) else data
                return {"loss": tf.reduce_mean(self(data))}

        model = Watched()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    def callback(self, machine: Machine) -> Any:
        """Tells it the epochs."""
        return machine.callback(on_epoch_begin=self._begin)

    def _begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def _note(self, data: Any) -> None:
        batch = data.numpy()[:, 0].astype(int).tolist()
        self.epochs.setdefault(self._epoch, []).append(batch)
