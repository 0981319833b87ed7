"""Adapter for JAX: the arrays that a step replaces, for the check of unsaved state.

Implements the functions of `Values` in `checkpoint/state/unsaved_state_check.py`. JAX
has no variables and no iterators over data: a step computes new arrays, and the program
assigns the arrays to attributes and names of Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tfpreempt.jax.shards import local_numbers

SAVED_WHOLE: tuple[type, ...] = ()
REPLACED: tuple[type, ...] = (jax.Array,)
ADVICE = (
    "Put arrays and random keys into a tfpreempt.states.PyTreeState, and other values "
    "into a named State (tfpreempt.states)."
)


def saved(checkpoint: Any) -> tuple[list[Any], list[Any]]:
    """Returns no objects, because JAX has no checkpoint object: named States save the
    arrays."""
    return [], []


def variables(value: Any) -> Sequence[Any]:
    """Returns no variables, because JAX has arrays only."""
    return ()


def sample(thing: Any, size: int) -> np.ndarray[Any, Any] | None:
    """Returns the bytes of about `size` elements of an array, or of all arrays in a
    pytree; None for an object without arrays of JAX.

    Leaves out arrays that were donated to a computation, because they have no values.
    """
    arrays = [each for each in jax.tree.leaves(thing) if isinstance(each, jax.Array)]
    if not arrays:
        return None
    found = [
        part.reshape(-1)[:: max(1, part.size * len(arrays) // size)].tobytes()
        for each in arrays
        if not each.is_deleted()
        for part in local_numbers(each)
    ]
    return np.frombuffer(b"".join(found), np.uint8)


def restarts(iterator: Any) -> bool:
    """Returns False, because JAX has no dataset iterators."""
    return False


def advice_on_iterators(unread: Mapping[str, Any]) -> str:
    """Returns an empty text, because JAX has no dataset iterators."""
    return ""
