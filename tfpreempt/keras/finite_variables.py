"""Checks that the variables of a fit are finite."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from tfpreempt.keras.fit_protocol import Fit, FitVariables

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def find_not_finite(fit: Fit, variables: FitVariables) -> str:
    """Returns a text that names a variable with NaN or infinity; "" if there is none.

    Infinity counts only in variables that a step trains: other variables may be
    infinite on purpose, as a mask is. Metrics do not count, because they never change a
    weight, and may be NaN for a while.

    Args:
        fit: the fit; on JAX, its variables have the current values (`Fit.sync`).
        variables: the variables of the fit, as a checkpoint.
    """
    found = _variables(fit)
    sums = variables.sums([variable for variable, _ in found])
    # A sum is finite only if all elements are finite. A sum of finite elements may be
    # infinite, so then the elements are read.
    for (variable, is_trained), total in zip(found, sums, strict=True):
        if math.isnan(total) or (is_trained and math.isinf(total)):
            array = np.asarray(variables.elements(variable), np.float64)
            is_nan = np.isnan(array).any()
            if is_nan or (is_trained and np.isinf(array).any()):
                value = "NaN" if is_nan else "infinity"
                name = variable.path if hasattr(variable, "path") else variable.name
                return f"the variable {name!r} contains {value}"
    return ""


def _variables(fit: Fit) -> list[tuple[Any, bool]]:
    """Returns the floating-point variables, and for each whether a step trains the
    variable; the trained variables come first."""
    model, optimizer = fit.model, fit.model.optimizer
    slots = () if optimizer is None else optimizer.variables
    trained, weights = [*(slots() if callable(slots) else slots)], []
    # tf_keras raises ValueError for a model without variables so far.
    with contextlib.suppress(ValueError):
        weights = model.weights
        trained += model.trainable_variables
    seen = {id(each) for metric in model.metrics for each in metric.variables}
    found = []
    for variables, is_trained in ((trained, True), (weights, False)):
        for each in variables:
            dtype = getattr(each, "dtype", None)  # None: a vocabulary of tf_keras
            is_float = getattr(dtype, "name", dtype) in _FLOATS
            if is_float and id(each) not in seen:
                seen.add(id(each))
                found.append((each, is_trained))
    return found
