"""Names of a fit's variables that are equal on every backend of Keras 3.

A name is the kind of owner and the path that Keras gives the variable, such as
`model/sequential/dense/kernel`. On JAX the variables are saved under these names. On
TensorFlow a commit has a table of the names, so that each backend can read the
variables that the other backend has saved.

Keras does not find every variable, for example those of a second optimizer or of the
program's own objects. A search of the model finds these variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfpreempt import errors
from tfpreempt.core import object_graph
from tfpreempt.keras.fit_protocol import Fit


class NamedVariables:
    """Finds the variables of a fit, and names them. Use on the main thread only.

    Args:
        fit: the fit.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        # Objects found by the newest search, and the variables among them.
        self._reached: object_graph.Reached | None = None
        self._found: list[Any] = []

    def find(self) -> dict[str, Any]:
        """Returns the variables by name, in an order that is equal on every backend."""
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
                if id(each) in seen or not isinstance(each, keras.Variable):
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


def _put(variable: Any, value: Any) -> None:
    variable.assign(value)


def assign(
    named: Mapping[str, Any],
    saved_names: Sequence[str],
    arrays: Mapping[str, Any],
    *,
    put: Callable[[Any, Any], None] = _put,
) -> None:
    """Assigns the arrays of a commit to the variables of a fit.

    Integers may have another number of bits than in the commit, because Keras chooses
    the number by the backend.

    Args:
        named: the variables, from `NamedVariables.find`.
        saved_names: names of the variables in the commit, in the order of `find`. The
            names may differ from those of this process: Keras numbers its layers in
            the order in which a program makes them.
        arrays: arrays of the commit, by saved name.
        put: function that assigns an array to a variable.

    Raises:
        CheckpointMismatchError: the variables differ from the arrays; nothing was
            assigned.
    """
    # The numbers of the names may differ, unless the model has all saved names.
    is_same = sorted(named) == sorted(saved_names)
    compared: Callable[[str], str] = str if is_same else _without_numbers
    problems, fitting = [], []
    if len(named) != len(saved_names):
        only = set(map(compared, named)) ^ set(map(compared, saved_names))
        problems.append(
            f"the model has {len(named)} variables, the checkpoint {len(saved_names)} "
            f"variables; only one of the two has {', '.join(sorted(only))}"
        )
    for (name, variable), saved_name in zip(
        () if problems else named.items(), saved_names, strict=not problems
    ):
        shape, dtype = tuple(variable.shape), str(variable.dtype)
        if (saved := arrays.get(saved_name)) is None:
            problems.append(f"{saved_name} is missing in the checkpoint")
        elif compared(name) != compared(saved_name):
            problems.append(f"{name} has the position of {saved_name}")
        elif saved.shape != shape:
            problems.append(
                f"{name} has shape {shape}, and {saved.shape} in the checkpoint"
            )
        elif (value := _converted(saved, dtype)) is None:
            problems.append(
                f"{name} has dtype {dtype}, and {saved.dtype.name} in the checkpoint"
            )
        else:
            fitting.append((variable, value))
    if problems:
        raise errors.CheckpointMismatchError(
            "The checkpoint was written by another model; nothing was restored: "
            f"{'; '.join(problems)}. Use the model that wrote it, or another "
            "checkpoint directory."
        )
    for variable, value in fitting:
        put(variable, value)


def _converted(saved: Any, dtype: str) -> Any | None:
    """Returns an array as an array of a dtype; None if the dtypes differ in more than
    the number of bits of an integer, or if a value is too large."""
    if saved.dtype.name == dtype:
        return saved
    if saved.dtype.kind not in "iu" or "int" not in dtype:
        return None
    value = saved.astype(dtype)
    return value if np.array_equal(value, saved) else None


def _without_numbers(name: str) -> str:
    """Returns a variable's name without the numbers that Keras adds to names, and
    without the names of optimizers: on some backends an optimizer inside a
    LossScaleOptimizer has both names in the paths."""
    name = re.sub(r"^optimizer/.*/", "optimizer/", name)
    return re.sub(r"_\d+(?=[_/]|$)", "", name)
