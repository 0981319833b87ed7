"""The variables of a fit on JAX, and earlier values of them for a later save.

A single checkpoint contains all variables (weights, seed generators, optimizer and
metrics) under the paths that Keras gives the variables. During an epoch Keras keeps the
values outside of the variables; `Fit.sync` puts the values into the variables.

Keras does not find every variable, for example those of a second optimizer or of the
program's own objects. A search of the model finds these variables. Keras does not pass
them to the step, but an eager step and a callback may change them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import keras

from tfpreempt import errors
from tfpreempt.checkpoint.state.array_contents import ArrayCheckpoint, Arrays
from tfpreempt.core import object_graph
from tfpreempt.keras.fit_protocol import Fit, WorkerVariable


class JaxVariables(ArrayCheckpoint):
    """Implements `fit_protocol.FitVariables` for a fit on JAX.

    Args:
        fit: the fit.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._saved_names: Sequence[str] = ()
        # Objects found by the newest search, and the variables among them.
        self._reached: object_graph.Reached | None = None
        self._found: list[Any] = []
        self.checkpoint = self

    def named(self) -> dict[str, Any]:
        """Returns the variables by name: the kind of owner, and the path in Keras."""
        model, optimizer = self._fit.model, self._fit.optimizer
        groups = {
            "model": model.variables,
            "optimizer": () if optimizer is None else optimizer.variables,
            "metrics": model.metrics_variables,
            "objects": self._search(),
        }
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for group, variables in groups.items():
            for each in variables:
                if id(each) in seen:
                    continue
                seen.add(id(each))
                name = base = f"{group}/{each.path}"
                number = 1
                while name in found:  # two layers may have the same name
                    number += 1
                    name = f"{base}#{number}"
                found[name] = each
        return found

    def _search(self) -> list[Any]:
        """Returns the variables in the model and in objects that the model holds."""
        if self._reached is None or not self._reached.is_unchanged():
            model, reached = self._fit.model, object_graph.Reached()
            # A commit has the optimizer with which the fit began: after a `compile`
            # inside the fit, a restart has no other optimizer before its first step.
            now = model.optimizer
            self._found = [
                location.value
                for location in object_graph.walk(
                    {"model": model},
                    object_graph.may_have_state,
                    skips=lambda value: now is not None and value is now,
                    reached=reached,
                )
                if isinstance(location.value, keras.Variable)
            ]
            self._reached = reached
        return self._found

    def arrays(self) -> Mapping[str, Any]:
        return {name: each.value for name, each in self.named().items()}

    def assign(self, arrays: Arrays) -> None:
        named = self.named()
        # The numbers of the names may differ, unless the model has all saved names.
        is_same = sorted(named) == sorted(self._saved_names)
        compared: Callable[[str], str] = str if is_same else _without_numbers
        pairs = list(zip(named.items(), self._saved_names, strict=True))
        problems = []
        for (name, variable), saved_name in pairs:
            if (saved := arrays.get(saved_name)) is None:
                problems.append(f"{saved_name} is missing in the checkpoint")
            elif compared(name) != compared(saved_name):
                problems.append(f"{name} has the position of {saved_name}")
            elif saved.shape != tuple(variable.shape):
                problems.append(
                    f"{name} has shape {tuple(variable.shape)}, and {saved.shape} in "
                    "the checkpoint"
                )
        if problems:
            raise errors.CheckpointMismatchError(
                "The checkpoint was written by another model; nothing was restored: "
                f"{'; '.join(problems)}. Use the model that wrote it, or another "
                "checkpoint directory."
            )
        for (_, variable), saved_name in pairs:
            variable.assign(arrays[saved_name])

    def of_worker(self, *, is_attached: bool = False) -> list[WorkerVariable]:
        """Returns all variables of the fit: every worker has the same values, so a
        commit has a single value of each variable."""
        return [
            WorkerVariable(
                name=name,
                kind=f"{each.dtype}{list(each.shape) or ''}",
                variable=each,
                parts=(),
            )
            for name, each in self.named().items()
        ]

    def expect(self, names: Sequence[str]) -> None:
        # The names may differ from those of this process: Keras numbers its layers in
        # the order in which a program makes them.
        self._saved_names = names

    def hold(self) -> HeldJaxValues:
        self._fit.sync()
        return HeldJaxValues(self._fit, list(self.named().values()))


def _without_numbers(name: str) -> str:
    """Returns a variable's name without the numbers that Keras adds to names."""
    return re.sub(r"_\d+(?=[_/]|$)", "", name)


class HeldJaxValues:
    """The values of a fit's variables at the time of construction.

    The values are copied, because JAX reuses the memory of a test step's arguments for
    its results. The values of the optimizer are not copied, because a test step does
    not get these values.

    Args:
        fit: the fit, whose variables have the current values.
        variables: the variables.
    """

    def __init__(self, fit: Fit, variables: Sequence[Any]) -> None:
        self._fit = fit
        self._variables = variables
        of_optimizer = () if fit.optimizer is None else fit.optimizer.variables
        kept = set(map(id, of_optimizer))
        self._values = [
            each.value if id(each) in kept else jnp.copy(each.value)
            for each in variables
        ]

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Context manager: gives the variables the kept values, until the body ends.

        Raises:
            SaveError: a value of the optimizer was lost, because the program has
                trained the model during the validation.
        """
        self._fit.sync()
        now = [each.value for each in self._variables]
        if any(each.is_deleted() for each in self._values):
            raise errors.SaveError(
                "the model was trained during a validation of this fit, so the state "
                "from before the validation is lost. Train the model between two fits"
            )
        self._put(self._values)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
