"""The values of TensorFlow's and Keras' objects, for `unsaved_state_check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.iterator_state import KEEP_SERVICE_OUT, reads_data_service
from tfpreempt.checkpoint.shuffle_seeds import parts
from tfpreempt.checkpoint.untracked import attach
from tfpreempt.checkpoint.variables import local_parts, walk
from tfpreempt.core import seams

SAVED_WHOLE = (tf.train.experimental.PythonState, tf.train.Checkpoint)
REPLACED = (tf.Tensor,)
ADVICE = (
    "Put variables, models, optimizers and metrics into the tf.train.Checkpoint; a "
    "metric of Keras 3 is no object for it: make it an attribute of a model that is "
    "there (model.mean = mean). Numbers, lists and arrays go into a named State "
    "(tfpreempt.states), or numbers into a tf.Variable."
)
_MAKE_OURS = (
    "TensorFlow cannot save a distributed iterator; make it with "
    "tfpreempt.data.distribute(dataset, strategy), which gives the same batches, and "
    "put it into the "
)


def saved(checkpoint: Any) -> tuple[list[Any], list[Any]]:
    """Returns the objects and variables that a save of a Checkpoint writes, and those
    objects among them of which the save writes the attributes."""
    if checkpoint is None:
        return [], []
    found = [each for _, each in (*attach(checkpoint).own, *walk(checkpoint))]
    parts_of = [part for each in found for part in local_parts(each)]
    states = [
        each for each in found if isinstance(each, tf.train.experimental.PythonState)
    ]
    return [*found, *parts_of], states


def variables(value: Any) -> Sequence[Any]:
    """Returns the local tf.Variables of a variable, model, optimizer, metric or
    generator; none for another object."""
    if found := local_parts(value):
        return found
    if isinstance(value, type):
        return []
    if hasattr(type(value), "variables"):
        try:
            all_of_it = value.variables
            many = all_of_it() if callable(all_of_it) else all_of_it
        except ValueError:  # a layer that is not built
            return []
        return [part for each in many for part in local_parts(each)]
    if isinstance(value, tf.random.Generator):
        return local_parts(value.state)
    return local_parts(getattr(value, "__dict__", {}).get("state"))


def sample(thing: Any, size: int) -> np.ndarray[Any, Any] | None:
    """Returns about `size` elements of a variable or tensor; None of other things."""
    if not isinstance(thing, tf.Variable | tf.Tensor):
        return None
    flat = tf.reshape(thing, [-1])
    elements: np.ndarray[Any, Any] = flat[:: max(1, len(flat) // size)].numpy()
    return elements


def restarts(iterator: Any) -> bool:
    """Returns whether an object is a dataset iterator that a restarted run reads from
    the beginning, unless a commit holds its position."""
    found = _datasets(iterator)
    if not found or None in found:
        return False
    return not any(map(_begins_late, parts(*found)))


def advice_on_iterators(unread: Mapping[str, Any]) -> str:
    """Returns what happens to iterators that no commit holds, and what to do.

    Args:
        unread: iterators for which `restarts` is true, by name.
    """
    if all(reads_data_service(*_datasets(each)) for each in unread.values()):
        return f"{KEEP_SERVICE_OUT}."
    is_theirs = any(map(_is_of_tensorflow, unread.values()))
    return (
        "A restarted run reads them from the beginning. "
        + (_MAKE_OURS if is_theirs else "Put the iterator into the ")
        + "tf.train.Checkpoint, or let it begin behind what was read: "
        "iter(dataset.skip(handler.total_run_calls))."
    )


def _datasets(iterator: Any) -> list[Any]:
    """Returns the datasets below a dataset iterator; none for another object."""
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return [
            getattr(each, "iterator", each)._dataset for each in iterator._iterators
        ]
    if isinstance(iterator, tf.data.Iterator | tf.data.NumpyIterator):
        return [getattr(iterator, "_iterator", iterator)._dataset]
    return []


def _begins_late(dataset: Any) -> bool:
    """Whether a part of a pipeline leaves out what comes first: the steps before."""
    kind = type(dataset).__name__
    return kind == "_SkipDataset" or (kind == "_RangeDataset" and dataset._start != 0)


def _is_of_tensorflow(iterator: Any) -> bool:
    """Whether TensorFlow made it for a strategy, so that nobody can save it."""
    is_distributed = isinstance(iterator, tf.distribute.DistributedIterator)
    return is_distributed and not isinstance(iterator, seams.trackable_base.Trackable)
