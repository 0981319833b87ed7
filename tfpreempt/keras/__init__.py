"""Callbacks and helpers for `model.fit` of Keras 3 and tf_keras.

The names are loaded on first use, so that importing this imports neither Keras.

callback      PreemptionCallback: what a user of `model.fit` adds
interface     a running `model.fit` of either Keras line, as this room sees it
multi_worker  makes `fit` of Keras 3 work with two workers or more
callbacks/    the other callbacks of a fit: what they remember, kept and given back
data/         the place in the data; in public
fit/          one `model.fit`: its loop, its phases, and what a save takes of it
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfpreempt.keras import data
    from tfpreempt.keras.callback import PreemptionCallback
    from tfpreempt.keras.multi_worker import enable_multi_worker

__all__ = ["PreemptionCallback", "data", "enable_multi_worker"]

_HOMES = {
    "PreemptionCallback": "tfpreempt.keras.callback",
    "enable_multi_worker": "tfpreempt.keras.multi_worker",
}


def __getattr__(name: str) -> object:
    """Loads a public name on first use and keeps it."""
    if name == "data":
        value: object = importlib.import_module("tfpreempt.keras.data")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(
            f"module 'tfpreempt.keras' has no attribute {name!r}; its public names are "
            f"{', '.join(__all__)}"
        )
    globals()[name] = value
    return value
