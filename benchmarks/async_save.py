"""Measures the cost of a periodic save for training, beside TensorFlow's and Orbax's.

There are three kinds of steps: steps that wait for a device, as on an accelerator;
steps that compute on all processors; and steps of pure Python. States with more than 16
tensors (`states.py`) are measured with the first kind only. A side saves once, at a
boundary, while the steps continue until the save is complete. The rows have a kind of
step, and one of these values:

- `stall`: seconds at the boundary;
- `slower`: seconds that the steps took longer during the save than as many steps
  without a save;
- `written`: seconds until the state was committed.

The sides are tfpreempt; tfpreempt with `async_save=False` (`waited`);
`tf.train.Checkpoint.write` with `experimental_enable_async_checkpoint`, which neither
syncs nor commits; and, if orbax-checkpoint is installed,
`keras.callbacks.OrbaxCheckpoint` on a model of the same size. TensorFlow's asynchronous
save fails for variables of Keras 3. The first save of each side is not counted, because
in this save tfpreempt and TensorFlow search for the objects, and TensorFlow makes its
own copies. `raw` is a copy of the whole state by NumPy, on one thread. `copies` is the
stall of tfpreempt divided by `raw`. `of_waited` is the slowdown of the steps of
tfpreempt, divided by the stall of a save with `async_save=False`.

A row of `model.fit` has the stall of a save at the end of an epoch: the time from the
end of the last batch of an epoch to the end of the next batch, less this time in a fit
without tfpreempt (`theirs`). The model is a ResNet-50: a batch of the transformer takes
0.8 s on two processors, and varies by more than the time of a save.

Rounds are interleaved. Other programs on the machine disturb mostly `slower`.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import states
from benchmarks.row import judged, side

STALL_BAR = 1.3  # copies of the state
TENSOR_BAR = 30e-6  # additional seconds for each tensor
SLOWER_BAR = 0.1  # share of the time of a synchronous save
EPOCH = 3  # batches of an epoch of `model.fit`
USUAL = 30  # steps that measure a step without a save
Figures = dict[str, float]


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields three rows for each kind of step, with the state in memory.

    Args:
        rounds: number of saves of each side.
        mebibytes: size of the state.
    """
    root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir="/dev/shm"))
    try:
        for name in (states.FEW, states.SOME, states.MANY, *states.MODELS):
            state = _State(name, mebibytes)
            kinds = list(state.steps) if name == states.FEW else ["waits for a device"]
            for kind in kinds:
                yield from _rows(root, state, kind, rounds)
            if name == "ResNet-50":
                yield _fit_row(root, state, rounds)
    finally:
        shutil.rmtree(root)


class _State:
    def __init__(self, name: str, mebibytes: int) -> None:
        import tensorflow as tf

        self.name = name
        self.counter = tf.Variable(0.0)
        if name in states.TENSORS:
            self.variables = states.tensors(name, mebibytes)
            self.tracked: dict[str, Any] = {"variables": self.variables}
        else:
            self.model = model = states.MODELS[name]()
            self.variables = [*model.variables, *model.optimizer.variables]
            self.tracked = {"model": model, "optimizer": model.optimizer}
        self.checkpoint = tf.train.Checkpoint(**self.tracked, counter=self.counter)
        read = [np.asarray(variable) for variable in self.variables]
        self.mebibytes = round(sum(each.nbytes for each in read) / 2**20)
        matrix = tf.random.normal([700, 700])

        @tf.function
        def compute() -> None:
            product = matrix
            for _ in range(4):
                product = tf.matmul(matrix, product) / 30.0
            self.counter.assign_add(tf.reduce_sum(product) * 0.0 + 1.0)

        def wait() -> None:
            time.sleep(0.01)
            self.counter.assign_add(1.0)

        def count() -> None:
            sum(number * number for number in range(150_000))
            self.counter.assign_add(1.0)

        self.steps: dict[str, Callable[[], None]] = {
            "waits for a device": wait,
            "all processors": compute,
            "Python": count,
        }

    def copy_seconds(self) -> float:
        """Returns the seconds to copy all variables into previously written memory.

        The time that the kernel needs for new memory depends on the virtual machine.
        """
        read = [np.asarray(variable) for variable in self.variables]
        copies = [np.full_like(each, 1) for each in read]
        began = time.perf_counter()
        for copy, each in zip(copies, read, strict=True):
            np.copyto(copy, each)
        return time.perf_counter() - began


def _rows(
    root: Path, state: _State, kind: str, rounds: int
) -> Iterator[dict[str, Any]]:
    step = state.steps[kind]
    ways: dict[str, Callable[[], Figures]] = {
        "ours": lambda: _ours(root, state, step, is_async=True),
        "waited": lambda: _ours(root, state, step, is_async=False),
    }
    if state.name in states.TENSORS:
        ways["theirs"] = lambda: _tensorflow(root, state, step)
    if state.name == states.FEW and importlib.util.find_spec("orbax"):
        ways["orbax"] = functools.partial(_orbax, root, _model(state.mebibytes), step)
    sides: dict[str, list[Figures]] = {name: [] for name in ways}
    copies = []
    for number in range(rounds + 1):
        found = {name: save() for name, save in ways.items()}
        if number:  # the first is a warm-up
            copies.append(state.copy_seconds())
            for name, figures in found.items():
                sides[name].append(figures)
    waited = statistics.median(each["stall"] for each in sides["waited"])
    for what, base, name, bar in (
        ("stall", statistics.median(copies), "copies", _stall_bar(state, copies)),
        ("slower", waited, "of_waited", SLOWER_BAR),
        ("written", None, "", None),
    ):
        seconds = {
            each: [figures[what] for figures in found] for each, found in sides.items()
        }
        row = {
            "bench": "async_save",
            **side("ours", seconds["ours"], 3),
            **side("waited", seconds["waited"], 3),
            **side("theirs", seconds.get("theirs", ()), 3),
            **side("orbax", seconds.get("orbax", ()), 3),
            **side("raw", copies if what == "stall" else (), 3),
            "unit": "s",
            "of": what,
            "step": kind,
            "state": state.name,
            "tensors": len(state.variables),
            "mebibytes": state.mebibytes,
        }
        if base:
            value = statistics.median(seconds["ours"]) / base
            row |= {name: round(value, 2), **judged(value, name, bar)}
        yield row


def _stall_bar(state: _State, copies: list[float]) -> float:
    """Returns the largest accepted stall, in copies of the state."""
    tensors = TENSOR_BAR * len(state.variables)
    return round(STALL_BAR + tensors / statistics.median(copies), 2)


def _fit_row(root: Path, state: _State, rounds: int) -> dict[str, Any]:
    batch = states.model_batch(state.name, samples=2 * EPOCH)
    ours, theirs, copies = [], [], []
    for number in range(rounds + 1):
        directory = root / f"fit-{number}"
        found = [
            _between_epochs(state.model, batch, each) for each in (directory, None)
        ]
        shutil.rmtree(directory)
        if number:  # the first is a warm-up
            copies.append(state.copy_seconds())
            ours.append(found[0] - found[1])
            theirs.append(found[1])
    value = statistics.median(ours) / statistics.median(copies)
    return {
        "bench": "async_save",
        **side("ours", ours, 3),
        **side("theirs", theirs, 3),
        **side("raw", copies, 3),
        "unit": "s",
        "of": "stall",
        "step": "model.fit",
        "state": state.name,
        "tensors": len(state.variables),
        "mebibytes": state.mebibytes,
        "copies": round(value, 2),
        **judged(value, "copies", _stall_bar(state, copies)),
    }


def _between_epochs(model: Any, batch: Any, directory: Path | None) -> float:
    """Returns the seconds from the end of an epoch to the end of the next batch.

    Args:
        model: model to train for three epochs; the first save is not measured.
        batch: inputs and targets of an epoch.
        directory: directory of the commits; None: a fit without tfpreempt.
    """
    import keras

    from tests.fakes.process import new_process
    from tfpreempt import TerminationConfig
    from tfpreempt.keras import PreemptionCallback

    ends: list[float] = []

    def wait_for_commit(batch: int, logs: Any) -> None:
        if directory is not None and len(ends) == 2 * EPOCH - 1:
            while not (directory / str(EPOCH) / "COMMITTED").exists():
                time.sleep(0.01)

    hooks = keras.callbacks.LambdaCallback(
        on_train_batch_begin=wait_for_commit,
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
    )
    callbacks = [hooks]
    with new_process():
        if directory is not None:
            config = TerminationConfig(signals=())
            callbacks += [PreemptionCallback(directory, termination_config=config)]
        model.fit(
            *batch,
            batch_size=2,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    return ends[2 * EPOCH] - ends[2 * EPOCH - 1]


def _ours(
    root: Path, state: _State, step: Callable[[], None], *, is_async: bool
) -> Figures:
    from tests.fakes.process import new_process
    from tfpreempt import PreemptionCheckpointHandler, TerminationConfig

    directory, every = root / "run", 10
    with new_process():
        handler = PreemptionCheckpointHandler(
            None,
            state.checkpoint,
            directory,
            TerminationConfig(signals=()),
            save_freq=every,
            async_save=is_async,
        )
        first, marker = (directory / f"{n * every}" / "COMMITTED" for n in (1, 2))
        while handler.total_run_calls <= every:
            handler.run(step)
        while not first.exists():
            time.sleep(0.01)
        while handler.total_run_calls < 2 * every:
            handler.run(step)
        began = time.perf_counter()
        entered: list[float] = []
        handler.run(lambda: entered.append(time.perf_counter()))
        figures = _meanwhile(step, began, entered[0], marker.exists)
    shutil.rmtree(directory)
    return figures


def _tensorflow(root: Path, state: _State, step: Callable[[], None]) -> Figures:
    import tensorflow as tf

    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    checkpoint = tf.train.Checkpoint(**state.tracked, counter=state.counter)
    checkpoint.write(str(root / "first"), options=options)
    checkpoint.sync()
    began = time.perf_counter()
    checkpoint.write(str(root / "second"), options=options)
    index = root / "second.index"
    figures = _meanwhile(step, began, time.perf_counter(), index.exists)
    checkpoint.sync()
    for path in root.glob("*.*"):
        path.unlink()
    return figures


def _model(mebibytes: int) -> Any:
    """Returns a Keras model whose weights have the size of the state."""
    import keras

    rows, width = (mebibytes << 20) // 4 // 16 // 256, 256
    layers = [keras.layers.Embedding(rows, width) for _ in range(16)]
    for layer in layers:
        layer.build()
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.SGD())
    return model


def _orbax(root: Path, model: Any, step: Callable[[], None]) -> Figures:
    import keras

    directory = root / "orbax"
    callback = keras.callbacks.OrbaxCheckpoint(
        str(directory), save_freq=1, save_weights_only=True
    )
    callback.set_model(model)
    began = time.perf_counter()
    callback.on_train_batch_end(0)
    entered = time.perf_counter()
    figures = _meanwhile(step, began, entered, (directory / "1").exists)
    callback.on_train_end()
    shutil.rmtree(directory)
    return figures


def _meanwhile(
    step: Callable[[], None], began: float, entered: float, is_over: Callable[[], bool]
) -> Figures:
    """Runs steps until the save ends, and steps without a save for comparison."""
    steps = 0
    while not is_over():
        step()
        steps += 1
    ended = time.perf_counter()
    for _ in range(USUAL):
        step()
    usual = (time.perf_counter() - ended) / USUAL
    return {
        "stall": entered - began,
        "slower": ended - entered - steps * usual,
        "written": ended - began,
    }
