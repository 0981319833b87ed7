"""Which way of keeping the position a pipeline allows, and what it cannot give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.iterator_state import hidden_state, reads_generator
from tfpreempt.checkpoint.variables import plain_message
from tfpreempt.keras.data import pipeline
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.host_iterator import owned_iterators
from tfpreempt.keras.data.position import (
    AGAIN,
    IndexTracker,
    IteratorTracker,
    ReplayTracker,
    Tracker,
    serialize,
)
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)


def tracker_of(kind: str, fit: Fit, data: CountedDataset) -> Tracker:
    """The way that a position was saved in."""
    if kind == "iterator":
        return IteratorTracker(data)
    return IndexTracker(fit, data) if kind == "index" else ReplayTracker(fit, data)


def choose(fit: Fit, data: CountedDataset, iterator: Any) -> Tracker:
    """The best way for this pipeline; warns of what it cannot give."""
    tracker, problem = _choose(fit, data, iterator)
    if problem is not None:
        log.warning("tfpreempt: %s.", problem)
    return tracker


def _choose(
    fit: Fit, data: CountedDataset, iterator: Any
) -> tuple[Tracker, str | None]:
    """The best way for this pipeline, by trying on an iterator that was not read.

    Args:
        fit: the fit.
        data: its data.
        iterator: the first one that it trains with.

    Returns:
        The way, and what of an exact resume it cannot give, for people.
    """
    if fit.array_way == "index":
        return IndexTracker(fit, data), None
    if fit.array_way == "replay":
        return ReplayTracker(fit, data), f'{AGAIN} (shuffle="batch")'
    if not (owned := list(owned_iterators(iterator))):
        return ReplayTracker(fit, data), f"{AGAIN} ({type(iterator).__name__})"
    roots = pipeline.roots(data.dataset)
    if reads_generator(*roots):
        return ReplayTracker(fit, data), f"{AGAIN} (a Python generator)"
    if pipeline.concatenated_shuffles(data.dataset):
        return ReplayTracker(fit, data), f"{AGAIN} (a shuffle within concatenate)"
    if problem := _refusal(owned):
        return ReplayTracker(fit, data), f"{AGAIN} ({problem})"
    if fit.array_way is None and (problem := hidden_state(*roots)):
        return IteratorTracker(data), f"{_RANDOM} ({problem})"
    if pipeline.repeated_shuffles(data.dataset):
        return IteratorTracker(data), _REPEATED
    if pipeline.caches_in_memory(data.dataset):
        return IteratorTracker(data), _CACHED
    return IteratorTracker(data), None


def validation_problem(data: Any) -> str | None:
    """Why a resumed validation may differ in the last bits; None if it does not.

    Args:
        data: `validation_data` of the fit.
    """
    if hasattr(data, "__next__"):
        return _READ_ON
    is_pipeline = isinstance(data, tf.data.Dataset)
    return _SHUFFLED if is_pipeline and pipeline.shuffles(data) else None


_READ_ON = (
    "validation_data is a Python generator, which each validation reads on from; a "
    "restarted run begins it anew, so it validates with other batches than an "
    "undisturbed run. Pass arrays, a keras.utils.PyDataset or a tf.data.Dataset"
)
_SHUFFLED = (
    "validation_data are shuffled, and the order is not kept: val_loss of a restarted "
    "run differs in its last bits from an undisturbed run. Leave the shuffle out"
)
_RANDOM = (
    "the input pipeline has an op whose own state cannot be saved: a resumed run takes "
    "every sample once and in order, but what this op does differs from an undisturbed "
    "run. Use tf.random.stateless_* with a seed from the element, or augment in layers "
    "of the model"
)
_REPEATED = (
    "the input pipeline repeats a shuffle a finite number of times: the order of "
    "epochs after a resumed one may differ from an undisturbed run. Leave out "
    "repeat(n) and raise epochs, or use repeat() with steps_per_epoch"
)


_CACHED = (
    "the input pipeline caches in memory, and what it has cached becomes part of every "
    "commit in the middle of an epoch. Cache to a file (cache(path)), or load the data "
    "before the pipeline, for instance with tfpreempt.keras.data.from_arrays"
)


def _refusal(iterators: Sequence[Any]) -> str | None:
    """Why a state cannot be had; None if it can."""
    for iterator in iterators:
        try:
            serialize(iterator)
        except tf.errors.OpError as error:
            return plain_message(error)
    return None
