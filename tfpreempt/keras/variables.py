"""Variables that a tf.train.Checkpoint of the model does not hold, or not exactly.

Metrics are summed over replicas when they are read, and a restored sum does not go on
bit for bit, so each worker keeps the parts of its own replicas. Seed generators, step
counters and the like are kept in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.tf_state import distributed, walk
from tfpreempt.keras.fit import Fit


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
        fit: knows the model's variables; all of them exist.
        checkpoint: what a save writes otherwise.
    """
    written = {id(part) for _, obj in walk(checkpoint) for part in _parts(obj)}
    seen: set[int] = set()
    kept = []
    for variables, also in ((fit.per_replica(), True), (fit.other_variables(), False)):
        for variable in variables:
            parts = {id(part) for part in _parts(variable)}
            if parts and not parts & seen and (also or not parts & written):
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
    """The values of all local replicas.

    Returns:
        A JSON header for each variable, and the bytes of each replica's value.
    """
    header, parts = [], []
    for variable in variables:
        arrays = [part.numpy() for part in _parts(variable)]
        header.append(
            {
                "name": _name(variable),
                "dtype": tf.as_dtype(variable.dtype).name,
                "shapes": [array.shape for array in arrays],
            }
        )
        parts += [array.tobytes() for array in arrays]
    return header, parts


def write(variables: Sequence[Any], header: Any, parts: Sequence[bytes]) -> None:
    """Assigns what `read` gave, to variables that `check` has let pass."""
    left = iter(parts)
    for variable, entry in zip(variables, header, strict=True):
        dtype = tf.as_dtype(entry["dtype"])
        for part, shape in zip(_parts(variable), entry["shapes"], strict=True):
            array = np.frombuffer(next(left), dtype.as_numpy_dtype).reshape(shape)
            with tf.device(part.device):
                part.assign(tf.constant(array, dtype=dtype))


def check(variables: Sequence[Any], header: Any) -> None:
    """Compares variables with a header that `read` gave.

    Raises:
        CheckpointMismatchError: it is of others.
    """
    now = [
        (tf.as_dtype(v.dtype).name, [tuple(p.shape.as_list()) for p in _parts(v)])
        for v in variables
    ]
    saved = [(entry["dtype"], [tuple(s) for s in entry["shapes"]]) for entry in header]
    if now == saved:
        return
    names = [_name(variable) for variable in variables]
    raise errors.CheckpointMismatchError(
        "The metrics, seed generators or optimizer variables are others than in the "
        f"checkpoint. In the model: {_listed(names, now)}. In the checkpoint: "
        f"{_listed([entry['name'] for entry in header], saved)}. Compile the model "
        "as the interrupted run did (metrics, loss, optimizer, replicas on a worker), "
        "or use another checkpoint directory."
    )


def _listed(names: Sequence[str], kinds: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {dtype}{list(shapes[0]) if shapes else ''} x {len(shapes)}"
        for name, (dtype, shapes) in zip(names, kinds, strict=True)
    )


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _parts(variable: Any) -> tuple[Any, ...]:
    """The local tf.Variables of a variable of TensorFlow or Keras."""
    found = distributed(variable)
    if found is not None:
        return tuple(found.values)
    inner = getattr(variable, "_value", variable)
    return (inner,) if isinstance(inner, tf.Variable) else ()
