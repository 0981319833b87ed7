"""What the quiet callback adds to each batch of `model.fit`: no notice, save_freq=None.

A batch of the smallest model takes some 300 us, of which the callback is a hundredth,
and the machine's moods are larger than that. So it is measured in three ways:

- `ours`, under the bar: in the midst of a fit, the stand-in for the train function is
  called with nothing behind it, and the two empty hooks of a batch, less a call of that
  nothing. This is all that the callback adds to a batch.
- `in_one_fit`: in one fit, batches with the stand-in and with Keras' own train function
  take turns; the median over pairs of neighbours. `in_one_fit_null` is the same without
  a difference between the two, and says how far from zero chance goes.
- `fit` and `added`: whole fits take turns, without a callback, with ours, with Keras'
  BackupAndRestore, which never saves either: the median batch, from one entry of the
  train function to the next, and the median over rounds of what was added to it.

`fetches` counts how often 100 batches fetch a value from TensorFlow, which may wait for
the device: on the main thread, and on others.
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
BATCHES = 300
TURNS = 1_000
WARM = 20  # even
CALLS = 2_000


def rows(rounds: int = 20) -> Iterator[dict[str, Any]]:
    """One row for each line of Keras.

    Args:
        rounds: fits of each kind.
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
        directory: for checkpoints; each fit has a new one.

    Attributes:
        line: see above.
        entered: when the train function was entered, in seconds.
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
        """New callbacks: none for "bare", those of "ours", "backup_and_restore"."""
        from tfpreempt.keras import PreemptionCallback

        if side == "bare":
            return []
        if side == "ours":
            return [PreemptionCallback(next(self._directories), save_freq=None)]
        kind = self.line.callbacks.BackupAndRestore
        return [kind(next(self._directories), save_freq=10**9)]

    def run(self, callbacks: list[Any], batches: int = BATCHES) -> None:
        """One fit."""
        self.entered.clear()
        self.model._training_state = None  # tf_keras' BackupAndRestore deletes it
        self.model.fit(
            self._data, steps_per_epoch=batches, verbose=0, callbacks=callbacks
        )

    def hook(self, act: Callable[[int], None]) -> Any:
        """A callback that acts before each batch."""
        hook = self.line.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: act(batch)
        )
        hook._supports_tf_logs = True  # tf_keras would fetch the logs for it
        return hook


SIDES = ("bare", "ours", "backup_and_restore")


def row(fits: Fits, rounds: int) -> dict[str, Any]:
    """Measures everything, in turn."""
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    calls, swaps, nulls = [], [], []
    for number in range(rounds + 1):
        found = {side: median_batch(fits, side) for side in SIDES}
        call = stand_in(fits)
        swap, null = turns(fits, number, True), turns(fits, number, False)
        if number:  # the first round is a warm-up
            calls.append(call)
            swaps += swap
            nulls += null
            for side, value in found.items():
                medians[side].append(value)
    ours = statistics.median(calls)
    return {
        "bench": "callback_overhead",
        "keras": fits.line.__name__,
        "ours": round(ours, 3),
        "unit": "us",
        "bar": BAR,
        "ok": ours <= BAR,
        "in_one_fit": round(statistics.median(swaps), 2),
        "in_one_fit_null": round(statistics.median(nulls), 2),
        "fit": {side: round(statistics.median(medians[side]), 1) for side in SIDES},
        "added": {side: added(medians["bare"], medians[side]) for side in SIDES[1:]},
        "fetches": {side: fetches(fits, side) for side in SIDES},
        "rounds": rounds,
        "batches_per_fit": BATCHES,
    }


def added(bare: list[float], other: list[float]) -> float:
    """The median over rounds of what was added to a batch."""
    pairs = zip(bare, other, strict=True)
    return round(statistics.median(b - a for a, b in pairs), 2)


def median_batch(fits: Fits, side: str) -> float:
    """The median batch of one fit, in microseconds."""
    fits.run(fits.callbacks(side))
    return statistics.median(differences(fits.entered)[WARM:])


def differences(times: list[float]) -> list[float]:
    """Between neighbours, in microseconds."""
    return [1e6 * (b - a) for a, b in itertools.pairwise(times)]


def stand_in(fits: Fits) -> float:
    """Microseconds that the callback needs in a batch that trains nothing."""
    callbacks = fits.callbacks("ours")
    found: list[float] = []

    def act(batch: int) -> None:
        if batch != WARM:
            return
        ours = fits.model.train_function
        inner, runs = ours.inner, ours._handler.runs
        ours.inner = noop
        base = loop(lambda: noop(ours.iterator))

        def one() -> None:
            callbacks[0].on_train_batch_begin(batch, logs=None)
            ours(ours.iterator)
            callbacks[0].on_train_batch_end(batch, logs=None)

        found.append(loop(one) - base)
        ours.inner, ours._handler.runs = inner, runs

    fits.run([*callbacks, fits.hook(act)])
    return 1e6 * found[0]


def noop(iterator: Any) -> None:
    """The step."""


def loop(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - began) / CALLS


def turns(fits: Fits, number: int, differ: bool) -> list[float]:
    """What a batch with ours took more than its neighbour without, in microseconds.

    Args:
        fits: runs one.
        number: odd or even, as the batches with ours are; their turn must change.
        differ: False is for the null: all batches have ours.
    """
    begins: list[float] = []
    both: list[Any] = []

    def act(batch: int) -> None:
        begins.append(time.perf_counter())
        names = vars(fits.model)  # to set an attribute of a model takes long
        if not both:
            ours = names["train_function"]
            both.extend([ours, ours.inner if differ else ours])
        if batch > WARM:  # the callback itself needs the first ones
            names["train_function"] = both[(batch + number) % 2]

    fits.run([*fits.callbacks("ours"), fits.hook(act)], TURNS)
    fits.model.train_function = both[0].inner
    lasted = differences(begins)
    first = WARM + 2 + number % 2
    return [
        a - b for a, b in zip(lasted[first::2], lasted[first + 1 :: 2], strict=False)
    ]


def fetches(fits: Fits, side: str) -> dict[str, int]:
    """How often 100 batches in the midst of a fit fetch values, by thread."""
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
    """Gives a list that grows by the thread whenever a tensor's value is fetched."""
    from keras.src import backend
    from tensorflow.python.framework import ops

    seen: list[threading.Thread] = []

    def counted(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fetch(tensor: Any) -> Any:
            seen.append(threading.current_thread())
            return plain(tensor)

        return fetch

    # Keras 3 makes its logs arrays by NumPy, which does not ask the tensor's methods.
    tensor: Any = ops._EagerTensorBase
    plain = tensor._numpy, backend.convert_to_numpy
    tensor._numpy, backend.convert_to_numpy = map(counted, plain)
    try:
        yield seen
    finally:
        tensor._numpy, backend.convert_to_numpy = plain
