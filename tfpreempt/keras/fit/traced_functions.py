"""Replaces the train and test functions of a model during a fit, to control tracing.

A traced function keeps using the Python values from the time of the trace
(`python_attributes.py`). So every call that may trace goes through
`TracedFunctions.call`, which sets the right values before the trace.
"""

from __future__ import annotations

import functools
import logging
import types
from typing import Any

from tfpreempt.core import frameworks, object_graph
from tfpreempt.keras.fit.frame_lookup import is_running
from tfpreempt.keras.fit.python_attributes import Attributes
from tfpreempt.keras.fit.train_function import TrainFunctionWrapper
from tfpreempt.keras.fit_protocol import Fit, after_each, uncover

log = logging.getLogger(__name__)

_RANDOM_OPS = (
    "the %s function draws random numbers with %s, whose state cannot be saved: after "
    "a restart the numbers differ from those of an uninterrupted run. Use keras.random "
    "with a SeedGenerator, a tf.random.Generator that is an attribute of the model, or "
    "tf.random.stateless_*."
)
_MAKERS = ("compile", "make_train_function", "make_test_function")
"""Methods of a model that replace the model's functions."""


class TracedFunctions:
    """Replaces the train and test functions of a model, until `close`.

    Use on the main thread only.

    Args:
        fit: the fit.
        steps: the replacement for the train function.
        attributes: the Python attributes of the model.

    Attributes:
        train: calls Keras' own train function with an iterator.
    """

    def __init__(
        self, fit: Fit, steps: TrainFunctionWrapper, attributes: Attributes
    ) -> None:
        self._fit = fit
        self._steps = steps
        self._attributes = attributes
        self._is_warned = False
        self.train = functools.partial(self.call, "train")
        test = functools.partial(self.call, "test")
        self._ours = {
            "train": fit.as_keras_calls("train", steps),
            "test": fit.as_keras_calls("test", test),
        }
        # By name, the functions that Keras made.
        self._made: dict[str, Any] = dict.fromkeys(self._ours)
        # By name, the function that was searched for random ops.
        self._searched: dict[str, Any] = dict.fromkeys(self._ours)
        for name in self._ours:
            self.take_over(name)
        for method in _MAKERS:
            after_each(fit.model, method, self._made_again)

    def close(self) -> None:
        """Restores the model's own functions."""
        model = self._fit.model
        for method in _MAKERS:
            uncover(model, method)
        for name, ours in self._ours.items():
            if getattr(model, f"{name}_function") is ours:
                setattr(model, f"{name}_function", self._made[name])

    def call(self, name: str, iterator: Any) -> Any:
        """Calls the function that Keras made. The first call traces the function.

        Args:
            name: name of the function, "train" or "test".
            iterator: argument of the function.
        """
        made = self._made[name]
        inner = self._fit.as_step(name, made)
        trace = self._attributes.traces[name]
        for kind in self._fit.batch_kinds(name, iterator):
            if kind not in trace.kinds:
                trace.kinds.append(kind)
        if made is trace.function or self._runs_python(name):
            result = inner(iterator)
        else:
            try:
                result = self._attributes.traced_by(inner, iterator, name=name)
            finally:
                trace.function = made
        if made is not self._searched[name]:
            self._searched[name] = made
            self._warn_of_random_ops(name, made)
        return result

    def _runs_python(self, name: str) -> bool:
        """Returns whether Python code runs in every step, and not only in a trace.

        A function that the program has made may run Python code around traced
        functions. Such code may count steps, and choose a traced function.
        """
        is_plain = isinstance(self._made[name], types.FunctionType)
        return self._fit.model.run_eagerly or (self._is_own(name) and is_plain)

    def _is_own(self, name: str) -> bool:
        """Returns whether the program, and not Keras, makes a function."""
        maker = getattr(type(self._fit.model), f"make_{name}_function")
        return object_graph.is_user_module(maker.__module__)

    def _warn_of_random_ops(self, name: str, made: Any) -> None:
        """Logs a warning, once in a fit, if a traced function draws random numbers from
        ops whose state cannot be saved."""
        traced = self._fit.traceable(made, trains=None)
        if traced is None or self._is_warned or self._fit.runs_eagerly():
            return
        adapters = frameworks.adapters("values")
        found = [op for each in adapters for op in each.hidden_draws(traced)]
        if found:
            self._is_warned = True
            log.warning(_RANDOM_OPS, name, ", ".join(found[:3]))

    def take_over(self, name: str) -> bool:
        """Replaces the model's current train or test function, if Keras or a callback
        has made a new function since the last replacement.

        For example, a callback that unfreezes layers calls make_train_function().

        Args:
            name: name of the function, "train" or "test".

        Returns:
            Whether Keras or a callback had made a new function.
        """
        made = getattr(self._fit.model, f"{name}_function")
        if made is None or made is self._ours[name]:
            return False
        self._made[name] = made
        setattr(self._fit.model, f"{name}_function", self._ours[name])
        if name == "train":
            self._steps.inner = self._fit.as_step(name, made)
            self._steps.stop_at = 0  # the next step traces
        return True

    def trace_again(self, *, only_for_settings: bool) -> None:
        """Makes a function again if its trace used other values than were restored.

        Args:
            only_for_settings: whether only changed settings are a reason; see
                `Attributes.must_trace_again`.
        """
        model = self._fit.model
        is_eager = self._fit.runs_eagerly()
        for name in self._ours:
            if is_eager or self._is_own(name):
                # The function may run Python code in every step, and so use the current
                # values, not the values from the time of the trace.
                self._attributes.forget_trace(name)
            elif self._attributes.traces[name].outdated and (
                self._attributes.must_trace_again(
                    name, only_for_settings=only_for_settings
                )
            ):
                getattr(type(model), f"make_{name}_function")(model, force=True)
                self.take_over(name)

    def _made_again(self, method: str, result: Any, *args: Any, **options: Any) -> Any:
        """Replaces the function that a method of `_MAKERS` may have made.

        Called after every call of such a method.

        Args:
            method: name of the method, called by Keras or a callback.
            result: result of the method.
            *args: arguments of the method.
            **options: keyword arguments of the method.

        Returns:
            The result for the caller of the method.
        """
        if not is_running(self._fit):  # an error has ended the fit: change nothing
            return result
        if method == "compile":
            self._attributes.lose(
                "the effect of compile() inside fit",
                "commits have the optimizer of the start of the fit. Call compile() "
                "between two fits, each with a separate checkpoint_dir",
            )
            self.take_over("train")
            for name in self._ours:
                self._attributes.forget_trace(name)
            return result
        name = "test" if method == "make_test_function" else "train"
        # Creating the first test function is no change: a restarted process creates one
        # as well.
        is_first = name == "test" and self._made[name] is None
        is_again = not is_first or args or any(options.values())
        if self.take_over(name) and is_again:
            self._attributes.forget_trace(name)
        return result if result is None else self._ours[name]
