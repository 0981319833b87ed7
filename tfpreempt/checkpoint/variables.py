"""The variables behind a tf.train.Checkpoint: found, and known, without being read.

To read a variable that is reduced across workers needs all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf

from tfpreempt.core import seams

T = TypeVar("T")


def walk(checkpoint: tf.train.Checkpoint) -> list[tuple[str, Any]]:
    """Every object that a checkpoint reaches, with its path, in a fixed order.

    The order and the paths are those of TensorFlow's own save, so they are the same on
    all workers and after a restart.
    """
    view = checkpoint._saver._graph_view
    objects, paths = view.breadth_first_traversal()
    return [(seams.trackable_utils.object_path_to_string(paths[o]), o) for o in objects]


def distributed(obj: Any) -> Any | None:
    """The distributed variable that an object is or wraps; or None."""
    for attribute in (None, "_value", "_variable"):
        candidate = obj if attribute is None else getattr(obj, attribute, None)
        if isinstance(candidate, seams.distribute_values.DistributedVariable):
            return candidate
    return None


def is_on_read(obj: Any) -> bool:
    """Whether an object is, or wraps, a variable that is reduced when it is read."""
    variable = distributed(obj)
    return (
        variable is not None
        and variable.synchronization == tf.VariableSynchronization.ON_READ
    )


def is_replicated(obj: Any, workers: int) -> bool:
    """Whether an object is, or wraps, a variable that so many workers hold the same of.

    It is where MultiWorkerMirroredStrategy keeps its replicas equal, and they are on so
    many workers. What only the first replica assigns is not taken for that.
    """
    variable = distributed(obj)
    if variable is None or is_on_read(variable):
        return False
    first_only = tf.VariableAggregation.ONLY_FIRST_REPLICA
    strategy = variable.distribute_strategy
    return (
        variable.aggregation != first_only
        and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.num_replicas_in_sync == workers * len(variable.values)
    )


def local_parts(variable: Any) -> tuple[Any, ...]:
    """The local tf.Variables of a variable of TensorFlow or Keras; none for others."""
    found = distributed(variable)
    if found is not None:
        return tuple(found.values)
    inner = getattr(variable, "_value", variable)
    return (inner,) if isinstance(inner, tf.Variable) else ()


def variable_shape(obj: Any) -> tuple[int | None, ...] | None:
    """The shape of a variable of TensorFlow or Keras; None for other objects."""
    is_variable = isinstance(obj, tf.Variable) or distributed(obj) is not None
    if not is_variable and not hasattr(type(obj), "_deferred_initialize"):
        return None
    shape = tf.TensorShape(obj.shape)
    return None if shape.rank is None else tuple(shape.as_list())


def held_bytes(checkpoint: tf.train.Checkpoint) -> int:
    """How many bytes the variables have that a checkpoint reaches, without reading any.

    Those of unknown shape are left out.
    """
    sizes: dict[int, int] = {}
    for _, obj in walk(checkpoint):
        shape = variable_shape(obj)
        if shape is None or None in shape:
            continue
        # A variable of Keras holds TensorFlow's. A distributed variable looks for an
        # attribute that it lacks in its value, which all workers have to reduce.
        inner = distributed(obj)
        if inner is None:
            inner = getattr(obj, "_value", None)
        count = math.prod(each or 0 for each in shape)
        size = count * tf.as_dtype(obj.dtype).size
        sizes[id(obj if inner is None else inner)] = int(size)
    return sum(sizes.values())


def plain_message(error: tf.errors.OpError) -> str:
    """What an op's error says, without the names of ops and nodes."""
    return str(error.message).rpartition("}} ")[2].split(" [Op:")[0].strip()


def out_of_scope(make: Callable[[], T]) -> T:
    """Makes a variable of ours outside any strategy's scope that the caller is in.

    In the scope of MultiWorkerMirroredStrategy a variable is made by a broadcast from
    worker 0, so all would have to make it at the same moment, and no wait of one worker
    for another could come between. A scope belongs to the thread that entered it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
