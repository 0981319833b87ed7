"""Callbacks and helpers for `model.fit` of Keras 3 and tf_keras.

The names are loaded on first use, so that importing this imports neither Keras.

attributes        plain Python values of a model that its training changes: counts
callback          preemptionCallback: what a user of `model.fit` adds
callbacks_check   callbacks that do not go together with ours
callbacks_files   the file of a CSVLogger: its whole text is kept
callbacks_known   what the callbacks of Keras 3 and tf_keras remember, class by class
callbacks_state   the state of the other callbacks of a fit: captured at a commit
callbacks_values  what callbacks remember as JSON and raw bytes, bit for bit
capture           what a save takes of a running fit: its progress, its variables
crowd             the other callbacks of a fit, as one thing
data              input pipelines whose position is a few numbers
fit               a running `model.fit`, as the callback sees it
fit_handler       the handler inside `model.fit`
host_iterator     a distributed iterator whose position can be saved
keras3            `model.fit` of Keras 3 with the TensorFlow backend
legacy            `model.fit` of tf_keras 2.x
multi_worker      makes `fit`
pipeline          what a tf.data pipeline is built of: its generators
plan              what a fit has to do, given the checkpoint and the fits before it
position          where training is in its data, saved with the step and found again
position_choice   which way of keeping the place a pipeline allows
progress          how far a fit is, as a frozen value
replica_slices    the slices of global batches that this process's replicas train on
rounds            which fit of a program this is
schedule          when to commit without a notice: `save_freq` in terms of train steps
sequence          the position in a PyDataset (Keras 3) or Sequence (tf_keras): an index
settings          what the user of the callback asked for, checked
snapshot          the state of a fit as two named States: what all workers share
tally             counts of one fit: batches of the epoch and of the iterator
train_function    what stands in for `model.train_function`
training          one fit under the callback, from `on_train_begin` to `on_train_end`
variables         variables that a tf.train.Checkpoint of the model does not hold
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
