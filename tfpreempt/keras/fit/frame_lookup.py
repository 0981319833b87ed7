"""Finds the running `model.fit` by its stack frame on the main thread.

Keras gives a callback the model, but not the data, the first batch or the user's
callbacks. These are local variables of `fit`, so they are read from the stack frame of
`fit`, once, at the start of training (docs/decisions/0007).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from tfpreempt import errors
from tfpreempt.core import private_api
from tfpreempt.core.object_graph import leaves
from tfpreempt.keras.fit_protocol import Fit

LOOPS = ("epoch_iterator", "data_handler")
"""Local variable of `fit` that holds the data: in Keras 3, and in tf_keras."""


def find(model: Any) -> Fit:
    """Finds the running `fit` call of a model; called in a hook of the callback.

    Args:
        model: the callback's model.

    Raises:
        ConfigurationError: the model was compiled with steps_per_execution="auto".
        UsageError: no fit of the model is running.
        UnsupportedVersionError: this version of Keras lacks a private API that is
            needed.
    """
    if getattr(model, "autotune_steps_per_execution", False):
        raise errors.ConfigurationError(
            'the model was compiled with steps_per_execution="auto", which changes '
            "during an epoch, so the position in the epoch is unknown; expected a "
            "number. Compile with a number."
        )
    line = "tf_keras" if is_of_tf_keras(model) else "keras"
    if line == "keras" and keras_backend() == "jax":
        private_api.check_available("keras_fit_data", "keras_fit_jax")
    else:
        features = ("keras_fit_data",) if line == "keras" else ()
        private_api.check_available("pipelines", "iterators", *features, f"{line}_fit")
    private_api.name_if_unseen(line)
    frame = next(_calls(model, "fit", LOOPS), None)
    if frame is None:
        raise errors.UsageError(
            "PreemptionCallback was called outside of model.fit: no fit of Keras 3 or "
            f"tf_keras is running for {type(model).__name__!r}. If the model overrides "
            "fit, call super().fit in the method. In a custom loop use "
            "tfpreempt.PreemptionCheckpointHandler."
        )
    # Imported here, because a fit on one backend must not import another backend.
    if LOOPS[0] not in frame.f_locals:
        from tfpreempt.keras.backends.tf_keras import TfKerasFit

        return TfKerasFit(model, frame)
    if keras_backend() == "jax":
        from tfpreempt.keras.backends.keras3_jax import Keras3JaxFit

        return Keras3JaxFit(model, frame)
    from tfpreempt.keras.backends.keras3_tensorflow import Keras3TensorFlowFit

    return Keras3TensorFlowFit(model, frame)


def keras_backend() -> str:
    """Returns the backend of Keras 3, which the program has imported."""
    import keras

    return str(keras.backend.backend())


def is_running(fit: Fit) -> bool:
    """Returns whether this call of `fit` is still running. May be called on any thread.

    The function looks for the fit's stack frame on the main thread: comparing models is
    not enough, because after an error another fit of the same model may run. The
    function does not read `f_locals`: when another thread did so during a fit, workers
    ended by SIGSEGV (the cause is unknown; a read makes CPython renew its copy of the
    local variables).
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame is not fit.frame:
        frame = frame.f_back
    return frame is not None


def is_validation(model: Any) -> bool:
    """Returns whether `fit`, not the program, has called the running `evaluate`."""
    name = "use_cached_eval_dataset"
    frame = next(_calls(model, "evaluate", (name,)), None)
    return frame is not None and bool(frame.f_locals[name])


def epoch_logs(model: Any) -> dict[str, Any]:
    """Returns the logs of the epoch whose validation begins."""
    variables = next(_calls(model, "fit", LOOPS)).f_locals
    logs = dict(variables["epoch_logs"])
    if sys.version_info < (3, 13):
        # The frame keeps this copy of the variables until the next read. Do not keep
        # the iterator of this epoch, with its buffers, during the next epoch.
        variables.clear()
    return logs


def callbacks_of(model: Any) -> list[Any]:
    """Returns the callbacks of the fit that is being set up; empty outside of a fit."""
    frame = next(_calls(model, "fit", LOOPS), None)
    given = None if frame is None else frame.f_locals["callbacks"]
    given = getattr(given, "callbacks", given)  # take the list of a CallbackList
    return list(leaves(given)) if isinstance(given, list | tuple | dict) else []


def is_of_tf_keras(model: Any) -> bool:
    """Returns True for a model of tf_keras, False for a model of Keras 3."""
    return any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__)


def _calls(model: Any, method: str, having: Sequence[str]) -> Iterator[FrameType]:
    """Yields the running calls of a method of the model in this thread.

    Args:
        model: the model.
        method: name of the method.
        having: names of local variables. A frame is Keras' own method if it has at
            least one of these variables.

    Yields:
        The stack frames, innermost first.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == method:
            names = frame.f_locals
            if names.get("self") is model and any(name in names for name in having):
                yield frame
        frame = frame.f_back
