"""Warns of values that a fit changes and that no commit holds.

Examples are a counter in a closure or in a global variable, a list that a callback
fills, and a tf.Variable beside the model. Commits contain the values in the model and
in callbacks; so this module looks at the other values that the program's steps, losses,
layers and callbacks can reach.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tfpreempt.checkpoint.state.unsaved_state_check import UnsavedStateCheck
from tfpreempt.core import object_graph
from tfpreempt.core.object_graph import ObjectPath
from tfpreempt.keras.callbacks import builtin_callbacks

_CALLED = (
    *("call", "compute_loss", "compute_metrics", "train_step", "test_step"),
    *("get_gradients", "update_step", "result", "reset_state", "update_state"),
    *(
        f"on_{kind}{when}"
        for kind in ("train_", "train_batch_", "test_", "test_batch_", "epoch_")
        for when in ("begin", "end")
    ),
    *("on_batch_begin", "on_batch_end"),
)
"""Methods of the program's objects that Keras calls."""


class UnsavedState:
    """Compares values from save to save. Use on the main thread only.

    Args:
        model: the model.
        callbacks: the callbacks of the fit without the PreemptionCallback.
        checkpoint: the tf.train.Checkpoint of the fit; None on JAX.
        data: the PyDataset or Sequence of the fit, whose attributes another warning
            names; None for other data.
    """

    def __init__(
        self, model: Any, callbacks: Sequence[Any], checkpoint: Any, data: Any
    ) -> None:
        self._model, self._data = model, data
        self._callbacks = callbacks
        self._check = UnsavedStateCheck(checkpoint)
        self._is_begun = False

    def begin(self) -> None:
        """Records the values. Called after the first step, because tracing may change
        values, and a restart traces the step again."""
        if self._is_begun:
            return
        self._is_begun = True
        of_model = list(self._of_model())
        of_callbacks = list(self._of_callbacks())
        roots = {
            location.path: location.value
            for location in itertools.chain(
                of_model, itertools.chain.from_iterable(of_callbacks)
            )
            if object_graph.is_user_function(location.value)
            or object_graph.is_user_code(type(location.value))
        }
        if roots:
            # Another warning names the attributes of the user's own callbacks.
            named = (
                found
                for found in of_callbacks
                if object_graph.is_user_code(type(found[0].value))
            )
            savers = [
                callback.get_state
                for callback in self._callbacks
                if builtin_callbacks.has_hooks(callback)
            ]
            of_data = (
                ObjectPath(path=key, value=value, owner=self._data, key=key)
                for key, value in getattr(self._data, "__dict__", {}).items()
            )
            kept = itertools.chain(
                of_model, itertools.chain.from_iterable(named), of_data
            )
            self._check.watch(roots, called=_CALLED, kept=kept, savers=savers)

    def compare(self) -> None:
        """Warns of values that have changed since `begin`; called for each save."""
        if self._is_begun:
            self._check.compare()
        else:
            self.begin()

    def end(self) -> None:
        """Drops the recorded values."""
        self._check.forget()

    def _of_model(self) -> Iterator[ObjectPath]:
        roots = {"model": self._model}
        return object_graph.walk(roots, object_graph.may_have_state)

    def _of_callbacks(self) -> Iterator[list[ObjectPath]]:
        """Yields for each callback the locations of the callback, and of what is in its
        attributes."""
        counts = collections.Counter[str]()
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] += 1
            name = name if counts[name] == 1 else f"{name}#{counts[name]}"
            found = [ObjectPath(path=name, value=callback)]
            for key, value in getattr(callback, "__dict__", {}).items():
                if value is not self._model:
                    first, *inner = object_graph.walk(
                        {f"{name}.{key}": value}, object_graph.is_user_code
                    )
                    found += [first._replace(owner=callback, key=key), *inner]
            yield found
