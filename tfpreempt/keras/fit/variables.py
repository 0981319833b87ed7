"""Variables that a tf.train.Checkpoint of the model does not hold, or not exactly.

Metrics are summed over replicas when they are read, and a restored sum does not go on
bit for bit, so each worker keeps the parts of its own replicas. Seed generators are
kept in the same way.
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


def uncovered(fit: Fit, checkpoint: Any) -> list[Any]:
    """The variables to keep apart, in a fixed order.

    Args:
        fit: knows what replicas differ in; all of the model's variables exist.
        checkpoint: what a save writes otherwise.
    """
    seen: set[int] = set()
    kept = []
    for variable in [*fit.per_replica(), *attach(checkpoint).own]:
        parts = {id(part) for part in local_parts(variable)}
        if parts and not parts & seen:
            seen |= parts
            kept.append(variable)
    return kept


def matching(fit: Fit, checkpoint: Any, header: Any, iterator: Any) -> list[Any]:
    """The variables that a header is of.

    Args:
        fit: knows the model's variables.
        checkpoint: what a save writes otherwise.
        header: of a checkpoint.
        iterator: of the training data; a test step may have to be built.

    Raises:
        CheckpointMismatchError: there are others.
    """
    kept = uncovered(fit, checkpoint)
    if len(kept) < len(header):  # metrics that a validation had made
        fit.build_test(iterator)
        kept = uncovered(fit, checkpoint)
    check(kept, header)
    return kept


def read(variables: Sequence[Any]) -> tuple[list[Any], list[bytes]]:
    """The values of all local replicas; see `per_replica.read`."""
    return per_replica.read((_name(variable), variable) for variable in variables)


def write(variables: Sequence[Any], header: Any, parts: Sequence[bytes]) -> None:
    """Assigns what `read` gave, to variables that `check` has let pass."""
    values = per_replica.arrays_of(header, parts)
    for variable, arrays in zip(variables, values, strict=True):
        per_replica.assign(variable, arrays)


def check(variables: Sequence[Any], header: Any) -> None:
    """Compares variables with a header that `read` gave.

    Raises:
        CheckpointMismatchError: it is of others.
    """
    if any("path" not in entry for entry in header):
        raise errors.CheckpointMismatchError(
            "The checkpoint is of an earlier tfpreempt, which kept the metrics and "
            "seeds of a fit in another order. Finish that run with the version that "
            "began it, or begin anew in another checkpoint directory; the weights can "
            "be restored with tf.train.Checkpoint."
        )
    now = [
        (tf.as_dtype(v.dtype).name, [tuple(p.shape.as_list()) for p in local_parts(v)])
        for v in variables
    ]
    saved = [(entry["dtype"], [tuple(s) for s in entry["shapes"]]) for entry in header]
    if now == saved:
        return
    names = [_name(variable) for variable in variables]
    raise errors.CheckpointMismatchError(
        "The metrics, seed generators or optimizer variables are others than in the "
        f"checkpoint. In the model: {_listed(names, now)}. In the checkpoint: "
        f"{_listed([entry['path'] for entry in header], saved)}. Compile the model "
        "as the interrupted run did (metrics, loss, optimizer, replicas on a worker), "
        "or use another checkpoint directory."
    )


def _listed(names: Sequence[str], kinds: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {dtype}{list(shapes[0]) if shapes else ''} x {len(shapes)}"
        for name, (dtype, shapes) in zip(names, kinds, strict=True)
    )


def _name(variable: Any) -> str:
    is_of_keras = hasattr(type(variable), "path")
    return str(variable.path if is_of_keras else variable.name)
