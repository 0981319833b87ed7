"""Callbacks and helpers for `model.fit` of Keras 3 and tf_keras.

The names are loaded on first use, so that importing this imports neither Keras.

callback      PreemptionCallback: what a user of `model.fit` adds
interface     a running `model.fit` of either Keras line, as this room sees it
multi_worker  makes `fit` of Keras 3 work with two workers or more
record        what a commit holds of a fit besides the Checkpoint, as a State
callbacks/    the other callbacks of a fit: what they remember, kept and given back
data/         the place in the data; in public
fit/          one `model.fit`: its loop, its phases, and what a save takes of it

Imported by cli, keras/callbacks, keras/data, keras/fit, tfpreempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpreempt.core.loading import loader

if TYPE_CHECKING:
    from tfpreempt.keras import data
    from tfpreempt.keras.callback import PreemptionCallback
    from tfpreempt.keras.multi_worker import enable_multi_worker

__all__ = ["PreemptionCallback", "data", "enable_multi_worker"]

_HOMES = {
    "PreemptionCallback": "tfpreempt.keras.callback",
    "data": "tfpreempt.keras.data",
    "enable_multi_worker": "tfpreempt.keras.multi_worker",
}
__getattr__ = loader(__name__, _HOMES)
