"""Measures the time that the idle callback adds to each batch of `model.fit`.

The callback receives no notice and makes no periodic save (`save_freq=None`). A batch
of the smallest model takes hundreds of microseconds. The callback takes a hundredth of
this time, which is less than the machine's noise. So the overhead is measured in three
ways:

- `ours`, compared with the bar: in each batch of a fit, the time in the callback's
  replacement of the train function, less the time in Keras' own train function in the
  same call. So the time of the step itself cancels. The time of reading the clock,
  measured in the same way without the replacement, is subtracted. `raw` is the median
  batch of whole fits without a callback.
- `repeated`: the replacement with an empty function in place of Keras' train function,
  and the two empty hooks of a batch, called repeatedly during a fit, less a call of the
  empty function.
- `fit` and `added`: whole fits take turns, without a callback, with tfpreempt's
  callback, and with Keras' BackupAndRestore, which does not save either. `fit` is the
  median batch, from one entry of the train function to the next; `added` is the median
  over rounds of the added time.

`fetches` is the number of times that 100 batches fetch a value from TensorFlow, which
may wait for the device: on the main thread, and on other threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.row import alone

BAR = 5.0
BATCHES = 300
WARM = 20
CALLS = 2_000


def rows(rounds: int = 20) -> Iterator[dict[str, Any]]:
    """Yields a row for `keras` and a row for `tf_keras`.

    Args:
        rounds: number of fits of each kind.
    """
    import keras
    import tf_keras

    for line in (keras, tf_keras):
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            yield row(Fits(line, directory), rounds)


class Fits:
    """Fits of one model.

    Args:
        line: `keras` or `tf_keras`.
        directory: parent of the checkpoint directories of the fits.

    Attributes:
        line: `keras` or `tf_keras`.
        entered: times at which the train function was called, in seconds.
    """

    def __init__(self, line: Any, directory: str) -> None:
        import tensorflow as tf

        self.line = line
        self.entered: list[float] = []
        self._directories = (f"{directory}/{n}" for n in itertools.count())
        self.model = line.Sequential([line.Input((4,)), line.layers.Dense(1)])
        self.model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        batch = tf.ones([8, 4]), tf.ones([8, 1])
        self._data = tf.data.Dataset.from_tensors(batch).repeat()
        self.run([])
        inner = self.model.train_function

        def timed(iterator: Any) -> Any:
            self.entered.append(time.perf_counter())
            return inner(iterator)

        self.model.train_function = timed

    def callbacks(self, side: str) -> list[Any]:
        """Returns new callbacks for "ours" or "backup_and_restore"; none for "bare"."""
        from tfpreempt.keras import PreemptionCallback

        if side == "bare":
            return []
        if side == "ours":
            return [PreemptionCallback(next(self._directories), save_freq=None)]
        kind = self.line.callbacks.BackupAndRestore
        return [kind(next(self._directories), save_freq=10**9)]

    def run(self, callbacks: list[Any], batches: int = BATCHES) -> None:
        """Runs one fit."""
        self.entered.clear()
        self.model._training_state = None  # deleted by BackupAndRestore
        self.model.fit(
            self._data, steps_per_epoch=batches, verbose=0, callbacks=callbacks
        )

    def hook(self, act: Callable[[int], None]) -> Any:
        """Returns a callback that acts before each batch."""
        hook = self.line.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: act(batch)
        )
        hook._supports_tf_logs = True  # without this, tf_keras fetches the logs
        return hook


SIDES = ("bare", "ours", "backup_and_restore")


def row(fits: Fits, rounds: int) -> dict[str, Any]:
    """Measures all values in turn, and returns the row."""
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    repeats, within, clocks = [], [], []
    for number in range(rounds + 1):
        found = {side: median_batch(fits, side) for side in SIDES}
        repeat, ours, clock = repeated(fits), outside(fits, True), outside(fits, False)
        if number:  # the first round is a warm-up
            repeats.append(repeat)
            within += ours
            clocks += clock
            for side, value in found.items():
                medians[side].append(value)
    clock_us = statistics.median(clocks)
    return alone(
        "callback_overhead",
        [taken - clock_us for taken in within],
        raw=medians["bare"],
        unit="us",
        bar=BAR,
        keras=fits.line.__name__,
        repeated=round(statistics.median(repeats), 3),
        fit={each: round(statistics.median(medians[each]), 1) for each in SIDES[1:]},
        added={each: added(medians["bare"], medians[each]) for each in SIDES[1:]},
        fetches={each: fetches(fits, each) for each in SIDES},
        batches_per_fit=BATCHES,
    )


def added(bare: list[float], other: list[float]) -> float:
    """Returns the median over rounds of the time added to a batch."""
    pairs = zip(bare, other, strict=True)
    return round(statistics.median(b - a for a, b in pairs), 2)


def median_batch(fits: Fits, side: str) -> float:
    """Returns the median batch of one fit, in microseconds."""
    fits.run(fits.callbacks(side))
    return statistics.median(differences(fits.entered)[WARM:])


def differences(times: list[float]) -> list[float]:
    """Returns the differences of successive times, in microseconds."""
    return [1e6 * (b - a) for a, b in itertools.pairwise(times)]


def repeated(fits: Fits) -> float:
    """Returns the microseconds that the callback needs in a batch without training."""
    callbacks = fits.callbacks("ours")
    found: list[float] = []

    def act(batch: int) -> None:
        if batch != WARM:
            return
        ours = fits.model.train_function
        inner, runs = ours.inner, ours._run.steps_made
        ours.inner = noop
        base = loop(lambda: noop(ours.iterator))

        def one() -> None:
            callbacks[0].on_train_batch_begin(batch, logs=None)
            ours(ours.iterator)
            callbacks[0].on_train_batch_end(batch, logs=None)

        found.append(loop(one) - base)
        ours.inner, ours._run.steps_made = inner, runs

    fits.run([*callbacks, fits.hook(act)])
    return 1e6 * found[0]


def noop(iterator: Any) -> None:
    """The step."""


def loop(function: Callable[[], Any]) -> float:
    """Returns the seconds of one call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - began) / CALLS


def outside(fits: Fits, is_ours: bool) -> list[float]:
    """Returns the microseconds of each batch outside of Keras' own train function.

    Args:
        fits: object that runs a fit.
        is_ours: whether tfpreempt's replacement is called; otherwise Keras' own
            train function is timed in the same way.
    """
    inner: list[float] = []
    outer: list[float] = []

    def act(batch: int) -> None:
        if batch != WARM:  # the callback itself uses the first batches
            return
        ours = fits.model.train_function
        ours.inner = clocked(ours.inner, inner)
        fits.model.train_function = clocked(ours if is_ours else ours.inner, outer)

    own = fits.model.train_function
    fits.run([*fits.callbacks("ours"), fits.hook(act)])
    fits.model.train_function = own
    return [1e6 * (a - b) for a, b in zip(outer, inner, strict=True)]


def clocked(
    function: Callable[[Any], Any], seconds: list[float]
) -> Callable[[Any], Any]:
    """Returns the function with a timer around each call."""

    def call(iterator: Any) -> Any:
        began = time.perf_counter()
        result = function(iterator)
        seconds.append(time.perf_counter() - began)
        return result

    return call


def fetches(fits: Fits, side: str) -> dict[str, int]:
    """Returns the number of fetches of 100 batches within a fit, by thread."""
    marks: dict[int, list[threading.Thread]] = {}
    with counting() as seen:

        def act(batch: int) -> None:
            if batch in (100, 200):
                marks[batch] = list(seen)

        fits.run([*fits.callbacks(side), fits.hook(act)])
    threads = marks[200][len(marks[100]) :]
    main = threads.count(threading.main_thread())
    return {"main": main, "others": len(threads) - main}


@contextlib.contextmanager
def counting() -> Iterator[list[threading.Thread]]:
    """Yields a list; each fetch of a tensor's value appends its thread."""
    from keras.src import backend
    from tensorflow.python.framework import ops

    seen: list[threading.Thread] = []

    def counted(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fetch(tensor: Any) -> Any:
            seen.append(threading.current_thread())
            return plain(tensor)

        return fetch

    # Keras 3 converts its logs by NumPy, without a call of the tensor's methods.
    tensor: Any = ops._EagerTensorBase
    plain = tensor._numpy, backend.convert_to_numpy
    tensor._numpy, backend.convert_to_numpy = map(counted, plain)
    try:
        yield seen
    finally:
        tensor._numpy, backend.convert_to_numpy = plain
