"""The variables of a fit on JAX, and earlier values of them for a later save.

A single checkpoint contains all variables (weights, seed generators, optimizer and
metrics) under the paths that Keras gives the variables. During an epoch Keras keeps the
values outside of the variables; `Fit.sync` puts the values into the variables.

Keras does not pass every variable to the step (`named_variables.py` finds all), but an
eager step and a callback may change any variable.

With `keras.distribution`, the values are arrays on several devices, perhaps of several
processes. If every process holds every element of a value, the value is in the
checkpoint, which process 0 writes. Otherwise (with `keras.distribution.ModelParallel`)
every process saves its shards of the value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.array_contents import ArrayCheckpoint, Arrays
from tfpreempt.checkpoint.state.state import REGISTRY, State
from tfpreempt.jax.shards import (
    DividedArray,
    Shards,
    is_whole,
    local_shards,
    placed,
    start_copies,
    unread,
    wide_sum,
)
from tfpreempt.keras.backends.named_variables import NamedVariables, assign
from tfpreempt.keras.fit_protocol import Fit, FitVariables, WorkerVariable


class JaxVariables(ArrayCheckpoint, FitVariables):
    """Implements `fit_protocol.FitVariables` for a fit on JAX.

    Args:
        fit: the fit.

    Raises:
        ConfigurationError: the processes have separate values of a variable.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._named = NamedVariables(fit)
        self._saved_names: Sequence[str] = ()
        # Values of the restored commit that are divided among the processes.
        self._loaded: Mapping[str, DividedArray] = {}
        self._refuse_separate_values()
        self.checkpoint = self
        shards = Shards("tfpreempt.keras.shards", self, REGISTRY)
        self.states: Sequence[State] = (shards,)

    def _refuse_separate_values(self) -> None:
        everyone = set(range(jax.process_count()))
        for name, each in self._named.find().items():
            devices = each.value.sharding.device_set
            if {device.process_index for device in devices} != everyone:
                raise errors.ConfigurationError(
                    f"The variable {name!r} is not on the devices of every process of "
                    "jax.distributed, so each process may have another value. Call "
                    "keras.distribution.set_distribution before the variable is made."
                )

    def arrays(self) -> Mapping[str, Any]:
        return {
            name: value if value.is_fully_addressable else unread(value)
            for name, value in self._values().items()
            if is_whole(value)
        }

    def start_copies(self, arrays: Mapping[str, Any]) -> None:
        start_copies(arrays.values())

    def divided(self) -> Mapping[str, jax.Array]:
        """Returns the values that are divided among the processes."""
        return {
            name: value for name, value in self._values().items() if not is_whole(value)
        }

    def _values(self) -> dict[str, jax.Array]:
        return {name: each.value for name, each in self._named.find().items()}

    def described(self, name: str) -> str:
        """Returns a text for errors that describes a variable."""
        return f"The variable {name}"

    def take(self, loaded: Mapping[str, DividedArray]) -> None:
        """Takes the divided values of a commit, which `assign` assigns."""
        self._loaded = loaded

    def assign(self, arrays: Arrays) -> None:
        self.assign_named(self._saved_names, {**arrays, **self._loaded})
        self._loaded = {}

    def assign_named(self, names: Sequence[str], arrays: Mapping[str, Any]) -> None:
        assign(self._named.find(), names, arrays, put=_put)

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
            for name, each in self._named.find().items()
        ]

    def expect(self, names: Sequence[str]) -> None:
        self._saved_names = names

    def sums(self, variables: Sequence[Any]) -> Sequence[float]:
        found = [[*map(wide_sum, local_shards(each.value))] for each in variables]
        # The device is waited for only now.
        return [sum(map(float, each)) for each in found]

    def elements(self, variable: Any) -> Any:
        parts = local_shards(variable.value)
        return np.concatenate([np.asarray(part).ravel() for part in parts])

    def hold(self) -> HeldJaxValues:
        self._fit.sync()
        return HeldJaxValues(self._fit, list(self._named.find().values()))


def _put(variable: Any, value: Any) -> None:
    """Gives a variable a value of a commit, with the layout of the variable."""
    at = value.at if isinstance(value, DividedArray) else value.__getitem__
    variable.assign(placed(variable.shape, at, variable.value))


class HeldJaxValues:
    """The values of a fit's variables at the time of construction.

    The values are copied, because JAX reuses the memory of a test step's arguments for
    its results. The values of the optimizer are not copied, because a test step does
    not get these values, except averages of weights: a `SwapEMAWeights` exchanges the
    weights and the averages.

    Args:
        fit: the fit, whose variables have the current values.
        variables: the variables.
    """

    def __init__(self, fit: Fit, variables: Sequence[Any]) -> None:
        self._fit = fit
        self._variables = variables
        of_optimizer = () if fit.optimizer is None else fit.optimizer.variables
        kept = {id(each) for each in of_optimizer if "average" not in each.path}
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
