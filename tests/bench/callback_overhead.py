"""What the quiet callback adds to each batch of `model.fit`: no notice, save_freq=None.

A batch of the smallest model takes some 300 us, of which the callback is a hundredth,
and the machine's moods are larger than that. So it is measured in three ways:

- `ours`, under the bar: the stand-in for the train function, called within a fit, less
  the train function itself, which does nothing here. It is all that the callback adds
  but for the empty hooks that Keras calls.
- `in_one_fit`: one fit, in which a batch with the callback's train function follows
  one with Keras' own; the difference of two neighbours, and of that the median. The
  same with both alike, `in_one_fit_null`, shows how far from zero chance goes.
- `fit` and `added`: whole fits in turn, without any callback, with ours, and with
  Keras' BackupAndRestore, which never saves either: the median batch of each, and the
  median of the differences. This one has the empty hooks in it.

A batch lasts from one entry of the train function to the next. `fetches` counts how
often values are fetched from TensorFlow in a fit, on the main thread (where that is a
device sync) and on Keras' own threads; it is counted in fits of their own.
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

BAR = 5.0
BATCHES = 400
WARM = 20
CALLS = 5_000


def rows(rounds: int = 40) -> Iterator[dict[str, Any]]:
    """One row for each line of Keras.

    Args:
        rounds: fits of each kind.
    """
    import keras
    import tf_keras

    for name, line in (("keras", keras), ("tf_keras", tf_keras)):
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            yield Bench(line, directory).row(name, rounds)


class Clock:
    """Stands for Keras' train function, and notes when it is entered.

    Attributes:
        entered: the times, in seconds.
    """

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self.inner = inner
        self.entered: list[float] = []

    def __call__(self, iterator: Any) -> Any:
        self.entered.append(time.perf_counter())
        return self.inner(iterator)

    def batches(self) -> list[float]:
        """Microseconds of each batch so far; begins anew."""
        times, self.entered = self.entered, []
        return [1e6 * (b - a) for a, b in itertools.pairwise(times)]


class Bench:
    """The fits of one line of Keras, all of one model.

    Args:
        line: `keras` or `tf_keras`.
        directory: for checkpoints; each fit has a new one.
    """

    def __init__(self, line: Any, directory: str) -> None:
        import tensorflow as tf

        self._line = line
        self._directories = (f"{directory}/{n}" for n in itertools.count())
        layers = [line.Input((4,)), line.layers.Dense(1)]
        self._model = line.Sequential(layers)
        self._model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        batch = tf.ones([8, 4]), tf.ones([8, 1])
        self._data = tf.data.Dataset.from_tensors(batch).repeat()
        self.fit([])
        self._clock = Clock(self._model.train_function)
        self._model.train_function = self._clock

    def row(self, name: str, rounds: int) -> dict[str, Any]:
        """Measures everything."""
        from tfpreempt.keras import PreemptionCallback

        def ours() -> list[Any]:
            return [PreemptionCallback(next(self._directories), save_freq=None)]

        def theirs() -> list[Any]:
            kind = self._line.callbacks.BackupAndRestore
            return [kind(next(self._directories), save_freq=10**9)]

        sides = {"bare": list, "ours": ours, "backup_and_restore": theirs}
        fits: dict[str, list[float]] = {side: [] for side in sides}
        calls, swaps, nulls = [], [], []
        for number in range(rounds + 1):
            found = {side: self.median(make()) for side, make in sides.items()}
            one = self.probe(ours(), self.stand_in)
            swap = self.probe(ours(), lambda: self.alternate(self._model.train_function))
            null = self.probe(ours(), lambda: self.alternate(self._clock))
            if number:  # the first round is a warm-up
                calls.append(one)
                swaps += swap
                nulls += null
                for side, value in found.items():
                    fits[side].append(value)
        return {
            "bench": "callback_overhead",
            "keras": name,
            "ours": round(statistics.median(calls), 3),
            "unit": "us",
            "bar": BAR,
            "ok": statistics.median(calls) <= BAR,
            "in_one_fit": round(statistics.median(swaps), 2),
            "in_one_fit_null": round(statistics.median(nulls), 2),
            "fit": {side: round(statistics.median(fits[side]), 1) for side in sides},
            "added": {
                side: added(fits["bare"], fits[side]) for side in sides if side != "bare"
            },
            "fetches": {side: self.fetches(make()) for side, make in sides.items()},
            "rounds": rounds,
            "batches_per_fit": BATCHES,
        }

    def fit(self, callbacks: list[Any]) -> None:
        """One fit."""
        self._model.fit(
            self._data, steps_per_epoch=BATCHES, verbose=0, callbacks=callbacks
        )

    def median(self, callbacks: list[Any]) -> float:
        """The median batch of a fit, in microseconds."""
        self.fit(callbacks)
        return statistics.median(self._clock.batches()[WARM:])

    def probe(self, callbacks: list[Any], act: Callable[[], Any]) -> Any:
        """Fits, and does something in the midst of it; what that returned."""
        found: list[Any] = []

        def on_batch(batch: int, logs: Any) -> None:
            if batch == WARM:
                found.append(act())

        hook = self._line.callbacks.LambdaCallback(on_train_batch_begin=on_batch)
        self.fit([*callbacks, hook])
        self._clock.batches()
        result = found[0]
        return result() if callable(result) else result
