"""The variables of a model under `fit` that are not the same on all workers.

Weights and the optimizer are in the tf.train.Checkpoint; metrics and seed generators
are in each worker's part of the commit, as for every loop (`per_replica.py` of
checkpoint/). What they look like is compared here, before anything is assigned. A
validation changes them, and is repeated: then they are kept as it found them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint import per_replica
from tfpreempt.checkpoint.untracked import attach
from tfpreempt.checkpoint.variables import local_parts
from tfpreempt.keras.interface import Fit


def checkpoint_of(model: Any) -> tf.train.Checkpoint:
    """What a save writes, and stock TensorFlow restores: weights and optimizer."""
    tracked = {"model": model, "optimizer": model.optimizer}
    return tf.train.Checkpoint(
        **{name: each for name, each in tracked.items() if each is not None}
    )


def count_slots(model: Any) -> int:
    """How many variables the model's optimizer has, once it is built."""
    slots = getattr(getattr(model, "optimizer", None), "variables", ())
    return len(slots() if callable(slots) else slots)


def of_worker(fit: Fit, checkpoint: tf.train.Checkpoint) -> list[tuple[str, Any]]:
    """Name and variable of metrics and seed generators, in a fixed order.

    Args:
        fit: knows the model's metrics; all of them are made.
        checkpoint: what a save writes otherwise.
    """
    metrics = [(_name(each), each) for each in fit.metrics_variables()]
    seen: set[int] = set()
    found = []
    for name, variable in [*metrics, *attach(checkpoint).own]:
        parts = {id(part) for part in local_parts(variable)}
        if parts and not parts & seen:
            seen |= parts
            found.append((name, variable))
    return found


def looks(variables: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Name and kind of each; the kinds are equal on all workers."""
    found = []
    for name, variable in variables:
        shape = local_parts(variable)[0].shape.as_list()
        found.append((name, f"{tf.as_dtype(variable.dtype).name}{shape or ''}"))
    return found


def replicas(variables: Sequence[tuple[str, Any]]) -> list[int]:
    """How many replicas of this worker have a value of their own of each."""
    return [len(local_parts(variable)) for _, variable in variables]


def write(
    variables: Sequence[tuple[str, Any]], header: Any, parts: Sequence[bytes]
) -> None:
    """Assigns what `per_replica.read` gave of the same variables."""
    values = per_replica.arrays_of(header, parts)
    for (_, variable), arrays in zip(variables, values, strict=True):
        per_replica.assign(variable, arrays)


def check(saved: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> None:
    """Compares what `looks` gave; a name may change until all variables are made.

    Raises:
        CheckpointMismatchError: it is of others.
    """
    if [kind for _, kind in saved] != [kind for _, kind in now]:
        raise errors.CheckpointMismatchError(
            "The metrics, seed generators or optimizer variables are others than in "
            f"the checkpoint. In the model: {', '.join(map(' '.join, now))}. In the "
            f"checkpoint: {', '.join(map(' '.join, saved))}. Compile the model as the "
            "interrupted run did (metrics, loss, optimizer), or use another "
            "checkpoint directory."
        )


def check_replicas(saved: Sequence[int], now: Sequence[tuple[str, Any]]) -> None:
    """Compares what `replicas` gave with variables that look the same.

    Raises:
        CheckpointMismatchError: this worker trained on more devices, or fewer.
    """
    for (name, _), before, here in zip(now, saved, replicas(now), strict=True):
        if here != before:
            raise errors.CheckpointMismatchError(
                f"{name} has values of {here} replica(s) on this worker, and of "
                f"{before} in its part of the checkpoint. Train under the same "
                "strategy, on as many devices as the interrupted run, or use another "
                "checkpoint directory."
            )


def _name(variable: Any) -> str:
    is_of_keras = hasattr(type(variable), "path")
    return str(variable.path if is_of_keras else variable.name)
