"""The variables behind a tf.train.Checkpoint, found without a read of any value.

The read of a variable that is reduced across workers needs all workers at once.

A tf.train.Checkpoint does not track every variable of a Keras 3 model: neither layers
and optimizers in lists and dicts, nor metrics and seed generators. These are found in
Python's attributes. Layers and optimizers become part of the Checkpoint, under a path
such as `m.blocks[0]`; metrics and seed generators differ between workers, and each
worker saves its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf

from tfpreempt.core import reach, seams

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


def device_prefixes() -> tuple[str, ...]:
    """The prefixes of the names of this process's devices."""
    host = seams.eager_context.context().host_address_space()
    return f"{host}/device:CPU:", f"{host}/device:GPU:"


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


NAME = "tfpreempt_untracked"
_HOLDING = ("variables", "reset_state", "make_seed_for_stateless_op")
"""What layers, optimizers and modules have; tf_keras' list of metrics, and its random
generators."""
_SETTINGS = ("._steps_per_execution",)  # variables that hold what a user has set


seams.require("checkpoints")
_base: Any = seams.trackable_base
_Trackable: Any = _base.Trackable


class Attached(_Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """One for each Checkpoint, as a child of it: the objects found by `attach`.

    Main thread. Objects that the Checkpoint does not track are saved as children.

    Attributes:
        found: layers, optimizers and variables that the Checkpoint does not track, by
            path.
        own: path and variable of the metrics and generators, in a fixed order.
        differing: path and variable, of those that the Checkpoint tracks, whose value
            each replica assigns itself.
        iterators: the dataset iterators that the Checkpoint tracks, by path; held
            weakly, because an iterator that the program replaced has threads.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.own: list[tuple[str, Any]] = []
        self.differing: list[tuple[str, Any]] = []
        self.iterators: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.found)


def attach(checkpoint: tf.train.Checkpoint) -> Attached:
    """Makes untracked objects part of a Checkpoint, and sorts the tracked ones.

    Called ahead of a save or a restore, on all workers. An object that an earlier call
    found keeps the path of that call.
    """
    if not hasattr(checkpoint, NAME):
        setattr(checkpoint, NAME, Attached())
    attached: Attached = getattr(checkpoint, NAME)
    objects = walk(checkpoint)
    tracked = {id(obj) for _, obj in objects}
    own: dict[int, tuple[str, Any]] = {}
    new: list[tuple[str, Any]] = []
    held: set[int] = set()
    for place in reach.walk(dict(objects), _may_hold, leaves=False):
        path, value = place.path, place.value
        kind: type = type(value)
        if place.owner is not None:
            held.add(id(value))
        if id(value) in tracked or path.endswith(_SETTINGS):
            continue
        if _is_own(kind):
            has_many = hasattr(kind, "variables")
            variables = list(value.variables) if has_many else [value.state]
            for number, variable in enumerate(variables):
                own.setdefault(id(variable), (f"{path}[{number}]", variable))
        elif _may_be_tracked(kind):
            new.append((path, value))
            view = seams.graph_view.ObjectGraphView(value)
            tracked.update(map(id, view.breadth_first_traversal()[0]))
    found = attached.found
    for path, value in new:  # under a name that no object has which is still there
        names = itertools.chain([path], (f"{path} ({n})" for n in itertools.count(2)))
        found[next(n for n in names if id(found.get(n)) not in held)] = value
    attached.own = [
        (path, variable)
        for path, variable in own.values()
        if id(variable) not in tracked and local_parts(variable)
    ]
    _sort(attached, walk(checkpoint) if new else objects)
    return attached


def _sort(attached: Attached, objects: list[tuple[str, Any]]) -> None:
    """Finds the iterators, and the variables that differ between replicas."""
    statistics = {
        id(variable)
        for _, layer in objects
        for variable in getattr(layer, "__dict__", {}).get(
            "_non_trainable_variables", ()
        )
    }
    attached.differing = [
        (path, variable)
        for path, obj in objects
        if (variable := distributed(obj)) is not None
        and (is_on_read(variable) or id(obj) in statistics)
    ]
    attached.iterators.clear()
    for path, obj in objects:
        if isinstance(obj, seams.iterator_ops.OwnedIterator):
            attached.iterators[path] = obj


@functools.cache
def _is_own(kind: type) -> bool:
    """Whether it is a worker's own: metrics count its rows, generators may differ."""
    is_metric = hasattr(kind, "reset_state") and hasattr(kind, "variables")
    is_seed = kind.__name__ == "SeedGenerator" and kind.__module__.startswith("keras.")
    return is_metric or is_seed or issubclass(kind, tf.random.Generator)


@functools.cache
def _may_be_tracked(kind: type) -> bool:
    """Whether it is a layer, optimizer, module or variable; lists are looked into."""
    if not issubclass(kind, seams.trackable_base.Trackable) or issubclass(
        kind, seams.data_structures.TrackableDataStructure
    ):
        return False
    is_variable = issubclass(kind, tf.Variable) or hasattr(kind, "_deferred_initialize")
    return is_variable or hasattr(kind, "variables")


@functools.cache
def _may_hold(kind: type) -> bool:
    """Whether attributes may hold variables: those of models, and of users' objects."""
    if _is_own(kind) or hasattr(kind, "_create_or_restore_slot_variable"):
        return False  # an old optimizer, whose slots TensorFlow finds by itself
    return any(hasattr(kind, n) for n in _HOLDING) or reach.is_of_program(kind)
