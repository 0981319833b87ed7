"""The part of a save that all workers do at once, in the same order.

An ON_READ variable is reduced across all workers when it is read, so a save needs every
worker at once, in the same order. The order is equal by construction: all workers call
the same `_gather_serialized_tensors` of the checkpoint's saver, and directly behind it
the same loop turns every value that may need peers into a plain tensor. The chief goes
on to write those tensors; the others stop there. TensorFlow itself would evaluate the
same callables while it writes, in an order that depends on devices.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.variables import distributed, is_on_read
from tfpreempt.core import seams

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def gathering(checkpoint: tf.train.Checkpoint, *, are_others: bool) -> Iterator[None]:
    """Makes the checkpoint's saver evaluate what needs peers as soon as it gathers.

    It gathers once, whatever happens: at the end, or when the body fails, unless the
    body has done so already.

    Args:
        checkpoint: is saved.
        are_others: whether there are other workers, who may wait for this one.

    Raises:
        CollectiveReadError: they do, and it cannot gather.
    """
    saver = checkpoint._saver
    gather = saver._gather_serialized_tensors
    calls: list[None] = []

    def gather_and_evaluate(object_graph_tensor: Any = None) -> Any:
        calls.append(None)
        try:
            tensors, *others = gather(object_graph_tensor)
            return _evaluate(tensors), *others
        except (MemoryError, OSError, RuntimeError) as error:  # none is TensorFlow's
            if not are_others:
                raise
            raise errors.CollectiveReadError(
                "this worker could not take part in the read that needs all workers: "
                f"{type(error).__name__}: {error}. The others wait in it, so all "
                "workers must start again; the last commit stands. Give this worker "
                "more memory, or save less."
            ) from error

    saver._gather_serialized_tensors = gather_and_evaluate
    try:
        yield
        if not calls:
            saver._gather_serialized_tensors()
    except Exception:
        # The peers are in the collective read, or about to enter it, and would wait.
        try:
            if not calls:
                saver._gather_serialized_tensors()
        except errors.CollectiveReadError:
            raise  # what the others wait for counts more
        except Exception as error:  # noqa: BLE001  (the body's error counts)
            _log.warning(
                "tfpreempt: the read that all workers take part in failed too, beside "
                "the error that is raised: %s",
                error,
            )
        raise
    finally:
        del saver._gather_serialized_tensors  # uncovers the class's own


def _evaluate(tensors: Any) -> Any:
    """Replaces every value that may need peers by a tensor, in the given order."""
    evaluated = seams.object_identity.ObjectIdentityDictionary()
    for owner, values in tensors.items():
        evaluated[owner] = {
            key: (
                {spec: _value(owner, value) for spec, value in slices.items()}
                if isinstance(slices, dict)
                else _value(owner, slices)
            )
            for key, slices in values.items()
        }
    return evaluated


def _value(owner: Any, value: Any) -> Any:
    if not _may_need_peers(owner, value):
        return value
    is_spec = isinstance(value, seams.saveable_object.SaveSpec)
    with tf.device(value.device if is_spec else None):
        return tf.convert_to_tensor(value.tensor if is_spec else value)


def _may_need_peers(owner: Any, value: Any) -> bool:
    """Known to be local: tensors, plain variables, mirrored ones. All else may not."""
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return False
    # In this order: a variable that is asked for what it has not got reads its value.
    variable = distributed(value)
    if variable is None:
        variable = distributed(getattr(owner, "obj", owner))
    if variable is not None:
        return is_on_read(variable)
    is_lazy = isinstance(value, seams.saveable_object.SaveSpec) and callable(
        value._tensor
    )
    return is_lazy and not isinstance(getattr(owner, "obj", owner), tf.Variable)
