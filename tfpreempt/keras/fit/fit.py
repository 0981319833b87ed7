"""A running `model.fit`, as the callback sees it: the seam between both Keras lines.

Keras gives a callback the model and nothing of the loop around it: neither the data,
nor the batch to begin with, nor the other callbacks. All three are local variables of
`fit`, so they are looked up there, once, at the start of training
(docs/decisions/0007). Everything that differs between Keras 3 and tf_keras is behind
`Fit`; `keras3.py` and `legacy.py` implement it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

from tfpreempt import errors

LOOPS = ("epoch_iterator", "data_handler")
"""The local variable of `fit` that holds its data: in Keras 3, in tf_keras."""


class Fit(Protocol):
    """One running fit. Main thread."""

    model: Any
    loop: Any  # its local variable among LOOPS
    callbacks: Any  # the CallbackList
    adapter: Any  # Keras' own data adapter
    line: str  # "keras" or "tf_keras"
    validation_data: Any  # what `fit` was given

    @property
    def dataset(self) -> Any:
        """What `fit` makes an iterator of, by `iter(dataset)`."""

    @dataset.setter
    def dataset(self, value: Any) -> None: ...

    @property
    def steps_per_execution(self) -> int:
        """Batches that one call of the train function trains."""

    @property
    def steps(self) -> int | None:
        """Batches in an epoch; None while unknown."""

    @property
    def epoch_limit(self) -> int | None:
        """Batches at which the last step of an epoch is cut short; None: never."""

    @property
    def keeps_iterator(self) -> bool:
        """Whether one iterator serves several epochs."""

    @property
    def first_iterator(self) -> int:
        """The number, from 1, of the iterator that a fresh fit trains with first."""

    @property
    def array_way(self) -> str | None:
        """How to go on in arrays, which Keras itself makes a dataset of.

        "iterator": by the iterator's state; "index": by `distribute_arrays`; "replay":
        by reading again. None: other data.
        """

    @property
    def sequence(self) -> Any:
        """The PyDataset or Sequence that is trained on; None for other data."""

    @property
    def sequence_length(self) -> int | None:
        """Its batches; None for ever."""

    @property
    def shuffles_sequence(self) -> bool:
        """Whether Keras shuffles its batches in each epoch."""

    @property
    def reads_early(self) -> bool:
        """Whether Keras draws the order in `on_epoch_begin`, and not with a batch."""

    @property
    def workers(self) -> int:
        """Threads or processes that read it."""

    def distribute_sequence(self, rest: Callable[[], Iterator[Any]]) -> Any:
        """A dataset of some batches of it, as `fit` would have made it."""

    def read_one_pass(self) -> Any:
        """A dataset of one epoch of it, if Keras' own would be read beyond; or None."""

    def distribute_arrays(self, batches: int) -> Any:
        """The dataset of arrays without its first batches, as `fit` would make it."""

    def keep_generators(self) -> None:
        """Makes random layers draw from generators whose state can be saved.

        Unless their step is traced already; then the handler will name them.
        """

    def loop_state(self) -> dict[str, Any]:
        """What the loop has learned of its data; JSON."""

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        """Makes the fit begin there; called in `on_train_begin`."""

    def epoch_begins(self) -> None:
        """Called in `on_epoch_begin`, after all other callbacks."""

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        """No step is left in an epoch whose steps returned these logs.

        Returns:
            Whether Keras can end the epoch so; otherwise a step must return them.
        """

    def forget_answer(self, answered: bool) -> None:
        """A step beyond the data was answered, and must not count as one of theirs."""

    def ends(self) -> None:
        """Takes back what `start_at` left on the model; also after a failure."""

    def build(self, iterator: Any, train_function: Any) -> None:
        """Makes every variable that training will use; reads no data."""

    def build_test(self, iterator: Any) -> None:
        """Makes what only a test step makes, such as metrics; reads no data."""

    def per_replica(self) -> list[Any]:
        """Variables that replicas have different values of: metrics."""

    def settle(self) -> None:
        """Waits until callbacks that Keras runs in the background are through."""


def find(model: Any) -> Fit:
    """The fit that calls the callback right now.

    Args:
        model: the callback's model.

    Raises:
        UsageError: there is none, or it is built differently from those that we know.
    """
    check_model(model)
    if getattr(model, "autotune_steps_per_execution", False):
        raise errors.ConfigurationError(
            'the model was compiled with steps_per_execution="auto", which changes '
            "while an epoch runs, so that nobody knows where it stands. Compile with a "
            "number."
        )
    frame = _frame(model, sys._getframe())
    if frame is None:
        raise errors.UsageError(
            "PreemptionCallback works inside model.fit, and no fit of Keras 3 or "
            f"tf_keras is running for {type(model).__name__!r} (its own fit must call "
            "super().fit). In a loop of your own use "
            "tfpreempt.PreemptionCheckpointHandler."
        )
    if LOOPS[0] in frame.f_locals:
        from tfpreempt.keras.fit.keras3 import Keras3Fit

        return Keras3Fit(model, frame.f_locals)
    from tfpreempt.keras.fit.legacy import LegacyFit

    return LegacyFit(model, frame.f_locals)


def made_of(fit: Fit) -> dict[str, Any]:
    """What a run must have in common with the run that it goes on from."""
    return {
        "keras": fit.line,
        "optimizer": type(fit.model.optimizer).__name__,
        "data": type(fit.adapter).__name__,
        "samples": getattr(fit.adapter, "_num_samples", None),
        "steps": fit.steps,
        "steps_per_execution": fit.steps_per_execution,
    }


def is_running(fit: Fit) -> bool:
    """Whether this very fit is on the main thread's stack; any thread.

    Another one of the same model may be, after this one has died.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while (frame := _frame(fit.model, frame)) is not None:
        if any(frame.f_locals.get(name) is fit.loop for name in LOOPS):
            return True
        frame = frame.f_back
    return False


def is_validation(model: Any) -> bool:
    """Whether `evaluate` was called by a fit of the model itself, not by a callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "evaluate" and frame.f_locals.get("self") is model:
            return bool(frame.f_locals.get("use_cached_eval_dataset"))
        frame = frame.f_back
    return False


def callbacks_of(model: Any) -> list[Any]:
    """The callbacks of the fit that is being set up; empty outside of one."""
    frame = _frame(model, sys._getframe())
    given = None if frame is None else frame.f_locals["callbacks"]
    given = getattr(given, "callbacks", given)  # a CallbackList
    return list(given) if isinstance(given, list | tuple) else []


def check_model(model: Any) -> None:
    """Refuses models that are not trained by TensorFlow.

    Raises:
        ConfigurationError: another backend of Keras 3.
    """
    if any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__):
        return
    import keras

    if keras.backend.backend() != "tensorflow":
        raise errors.ConfigurationError(
            f"Keras runs on the backend {keras.backend.backend()!r}; tfpreempt works "
            "with the TensorFlow backend only. Set KERAS_BACKEND=tensorflow before "
            "keras is imported."
        )


def _frame(model: Any, frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if frame.f_code.co_name == "fit":
            names = frame.f_locals
            if names.get("self") is model and any(name in names for name in LOOPS):
                return frame
        frame = frame.f_back
    return None
