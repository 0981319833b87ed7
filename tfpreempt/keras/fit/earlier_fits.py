"""The fits of this process that came to their end, for each checkpoint directory.

A program that calls `fit` twice and is interrupted in the second is started from its
top again. Its first call must then train nothing, and its second go on. So the fits
that came to their end are counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

_histories: dict[str, list[Any]] = {}


def histories(directory: str) -> list[Any]:
    """Those of the fits, oldest first."""
    return list(_histories.get(os.path.realpath(directory), []))


def add(directory: str, history: Any) -> None:
    """A fit came to its end.

    Args:
        directory: the checkpoint directory.
        history: Keras' History callback.
    """
    values = {name: list(map(plain, each)) for name, each in history.history.items()}
    past = {"epoch": [int(epoch) for epoch in history.epoch], "history": values}
    _histories.setdefault(os.path.realpath(directory), []).append(past)


def forget(directory: str) -> None:
    """The directory holds no checkpoint any more: count from the beginning."""
    _histories.pop(os.path.realpath(directory), None)


def plain(value: Any) -> Any:
    """A log value that can be kept: a number, array, text, or a dict or list of them.

    What is none of these becomes None: a commit is worth more than a log.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            array = array.astype("float64")  # a bfloat16, say
    except (TypeError, ValueError):
        return None
    return array if array.ndim else array.item()
