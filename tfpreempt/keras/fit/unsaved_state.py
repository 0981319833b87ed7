"""Warns of values that a fit changes and that no commit holds.

Examples are a counter in a closure or in a global variable, a list that a callback
fills, and a tf.Variable beside the model. Commits contain the values in the model and
in callbacks; so this module looks at the other values that the program's steps, losses,
layers and callbacks can reach.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tfpreempt.checkpoint.state.unsaved_state_check import UnsavedStateCheck
from tfpreempt.core import object_graph
from tfpreempt.core.object_graph import ObjectPath
from tfpreempt.core.reachable_values import MAX_LOCATIONS
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


def watch(
    check: UnsavedStateCheck,
    model: Any,
    callbacks: Sequence[Any],
    data: Any,
    held_out: Any,
) -> None:
    """Records the values that the functions of a fit can reach, for `check.compare`.

    Called after the first step, because tracing may change values, and a restart traces
    the step again.

    Args:
        check: the check of the fit.
        model: the model.
        callbacks: the callbacks of the fit without the PreemptionCallback.
        data: the PyDataset or Sequence of the fit, whose attributes another warning
            names; None for other data.
        held_out: `validation_data` of the fit. Keras calls the hooks of a PyDataset or
            Sequence after each validation.
    """
    in_model = list(object_graph.walk({"model": model}, object_graph.may_have_state))
    each_callback = list(_in_callbacks(model, callbacks))
    roots = {
        location.path: location.value
        for location in itertools.chain(
            in_model,
            *each_callback,
            [ObjectPath(path="validation_data", value=held_out)],
        )
        if _is_of_program(location.value)
    }
    if not roots:
        return
    # Another warning names the attributes of the user's own callbacks.
    named = (
        found
        for found in each_callback
        if object_graph.is_user_code(type(found[0].value))
    )
    savers = [
        callback.get_state
        for callback in callbacks
        if builtin_callbacks.has_hooks(callback)
    ]
    of_data = (
        ObjectPath(path=key, value=value, owner=data, key=key)
        for key, value in getattr(data, "__dict__", {}).items()
    )
    kept = itertools.chain(in_model, of_data, *named)
    check.watch(roots, called=_CALLED, kept=kept, savers=savers)


def _is_of_program(value: Any) -> bool:
    """Returns whether a value is a function or an object of the program, such as the
    bound method in `LambdaCallback(on_epoch_end=tracker.update)`."""
    if object_graph.is_user_code(type(value)):
        return True
    while isinstance(value, functools.partial):
        value = value.func
    return object_graph.is_user_function(getattr(value, "__func__", value))


def _in_callbacks(model: Any, callbacks: Sequence[Any]) -> Iterator[list[ObjectPath]]:
    """Yields for each callback the locations of the callback, and of the values in its
    attributes: of each attribute as many locations as the check compares."""
    counts = collections.Counter[str]()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        name = name if counts[name] == 1 else f"{name}#{counts[name]}"
        found = [ObjectPath(path=name, value=callback)]
        for key, value in getattr(callback, "__dict__", {}).items():
            if value is not model:
                below = object_graph.walk(
                    {f"{name}.{key}": value}, object_graph.is_user_code
                )
                first, *inner = itertools.islice(below, MAX_LOCATIONS)
                found += [first._replace(owner=callback, key=key), *inner]
        yield found
