"""The read that all workers take part in when a checkpoint is saved.

An ON_READ variable is reduced across all workers when the variable is read, so a save
needs every worker at the same time, in the same order. The order is equal by
construction: all workers call the same `_gather_serialized_tensors` of the checkpoint's
saver, and directly after that call the same loop turns every value that may need peers
into a plain tensor. The chief then writes those tensors; the others stop there.
TensorFlow itself would evaluate the same callables while it writes, in an order that
depends on devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.variables import distributed, is_on_read
from tfpreempt.core import seams

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Read:
    """One read of all values that a checkpoint saves.

    Attributes:
        extract: given the values, by owner and name, returns the values that TensorFlow
            is to write; None: all of them.
    """

    extract: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def reading(checkpoint: tf.train.Checkpoint, *, are_others: bool) -> Iterator[Read]:
    """Makes the checkpoint's saver evaluate the values of peers as soon as it gathers.

    The saver gathers once, whatever happens: at the end, or when the body fails, unless
    the body has written the checkpoint already.

    Args:
        checkpoint: is saved.
        are_others: whether there are other workers, which may wait for this worker.

    Yields:
        The read; `extract` is called within the body's write of the checkpoint.

    Raises:
        CollectiveReadError: other workers wait, and this worker cannot gather.
    """
    saver = checkpoint._saver
    gather = saver._gather_serialized_tensors
    read = Read()
    calls: list[None] = []

    def gather_and_evaluate(object_graph_tensor: Any = None) -> Any:
        calls.append(None)
        try:
            tensors, *others = gather(object_graph_tensor)
            tensors = _evaluate(tensors)
        except (MemoryError, OSError, RuntimeError) as error:  # none is TensorFlow's
            if not are_others:
                raise
            raise errors.CollectiveReadError(
                "this worker could not take part in the read that needs all workers: "
                f"{type(error).__name__}: {error}. The others wait in it, so all "
                "workers must start again; the last commit stands. Give this worker "
                "more memory, or save less."
            ) from error
        return tensors if read.extract is None else read.extract(tensors), *others

    saver._gather_serialized_tensors = gather_and_evaluate
    try:
        yield read
        if not calls:
            saver._gather_serialized_tensors()
    except Exception:
        # The peers are in the collective read, or about to enter it, and would wait.
        try:
            if not calls:
                saver._gather_serialized_tensors()
        except errors.CollectiveReadError:
            raise  # more important than the error of the body: the peers wait
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
        tensor = value.tensor if is_spec else value
        if tensor is None:  # TensorFlow writes the object, and no value of it
            return value
        return tf.convert_to_tensor(tensor)


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
