"""Finds the variables of a tf.train.Checkpoint, without reading any value.

Values must not be read here: reading a variable that is reduced across workers needs
all workers at once.

A tf.train.Checkpoint does not track every variable of a Keras 3 model: it misses layers
and optimizers in lists and dicts, metrics, and seed generators. `attach` finds such
objects in Python's attributes. Layers and optimizers become part of the Checkpoint,
under a path such as `m.blocks[0]`. Metrics and seed generators differ between workers,
so every worker saves its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from tfpreempt.checkpoint.state.state import State
from tfpreempt.core import object_graph, private_api

T = TypeVar("T")

private_api.check_available("checkpoints")
_base: Any = private_api.trackable_base
_Trackable: Any = _base.Trackable


def walk(checkpoint: tf.train.Checkpoint) -> list[tuple[str, Any]]:
    """Returns the objects reachable from a checkpoint, with their paths, in a fixed
    order.

    TensorFlow's own save has the same order and paths. Order and paths are equal on all
    workers, and after a restart.
    """
    objects, edges = _walk(checkpoint)
    return list(zip(paths(edges), objects, strict=True))


Edges = list[list[tuple[str, int]]]
"""For each object, the children: name and number of the child, which is the child's
index in the list of objects."""


def _walk(checkpoint: tf.train.Checkpoint) -> tuple[list[Any], Edges]:
    """Traverses the object graph of a checkpoint. Returns the objects in TensorFlow's
    order, and the children of every object."""
    view = checkpoint._saver._graph_view
    objects = [view.root]
    numbers = {id(view.root): 0}
    edges: Edges = []
    for each in objects:
        children = []
        for reference in _children(view, each):
            child = reference.ref
            number = numbers.setdefault(id(child), len(objects))
            if number == len(objects):
                objects.append(child)
            children.append((reference.name, number))
        edges.append(children)
    return objects, edges


def _children(view: Any, obj: Any) -> Iterable[Any]:
    """Returns references to the children of an object, as `view.list_children` does.

    Variables, and layers and optimizers of Keras 3, have the list of children in an
    attribute defined by TensorFlow. The attribute is read directly, because
    `list_children` takes ten times as long.
    """
    kind: Any = type(obj)
    own = getattr(obj, "__dict__", {})
    if (
        obj is view.root
        or "_trackable_children" in own
        or not _has_list_of_children(kind, kind._trackable_children)
    ):
        found: Iterable[Any] = view.list_children(obj)
    else:
        found = own.get(_LIST, ())
    return found


# Attribute in which TensorFlow lists the children.
_LIST = "_self_unconditional_checkpoint_dependencies"
_LISTING = frozenset({"Trackable", "AutoTrackable", "TFLayer"})
"""Classes of TensorFlow and Keras that keep the children in the attribute `_LIST`."""


@functools.cache
def _has_list_of_children(kind: type, method: Any) -> bool:
    """Returns whether objects of a class have their children in the attribute `_LIST`:
    only classes in `_LISTING` define the methods for children.

    Args:
        kind: the class.
        method: the class's `_trackable_children`; part of the cache key, because a
            program may replace the method later.
    """
    methods = (
        *("_trackable_children", "_maybe_initialize_trackable"),
        *("_unconditional_checkpoint_dependencies", _LIST),
    )
    return all(
        base.__name__ in _LISTING
        and base.__module__.partition(".")[0] in object_graph.FRAMEWORKS
        for base in kind.__mro__
        if not vars(base).keys().isdisjoint(methods)
    )


def paths(edges: Edges) -> list[str]:
    """Returns the path of every object: the path of its first parent, and the object's
    name there.

    Args:
        edges: for each object, its children as (name, number); see `Edges`.
    """
    found = [""]
    # `found` grows in the loop, to the length of `edges`.
    for path, children in zip(found, edges, strict=False):
        for name, number in children:
            if number == len(found):
                name = private_api.trackable_utils.escape_local_name(name)
                found.append(f"{path}/{name}" if path else name)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainVariable:
    """A variable that a later save can read directly, without TensorFlow's search.

    Attributes:
        number: index of the variable's object in `Graph.objects`.
        key: key of the value in the checkpoint.
        variable: weak reference to the tf.Variable on this machine.
        is_large: whether a read must not copy the value; see `gather.is_large`.
    """

    number: int
    key: str
    variable: weakref.ref[Any]
    is_large: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of TensorFlow's search for the keys of all objects, to be used again
    in later saves.

    Attributes:
        variables: the plain variables, by device and type.
        others: for every other object with values: index in `Graph.objects`, and the
            keys of the values.
        described: the serialized object graph, by key.
        rest: the remaining items of the saver's result, after the values.
    """

    variables: dict[tuple[str, tf.DType], list[PlainVariable]]
    others: list[tuple[int, list[str]]]
    described: dict[str, tf.Tensor]
    rest: tuple[Any, ...]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Graph:
    """The objects found by a traversal of the object graph. The references are weak:
    objects that the program drops are not kept alive.

    Attributes:
        objects: the objects, in the order of the traversal.
        kinds: classes of the objects, because a program may assign another class to an
            object.
        values: for each object, the variable in the attribute `_value` of Keras
            objects; else None.
        edges: for each object, its children as (name, number in `objects`).
        holders: path and number of every object that may hold untracked objects.
        search: result of TensorFlow's search for these objects. None before a search,
            or if a later save may have a different result.
    """

    objects: list[weakref.ref[Any]]
    kinds: list[type]
    values: list[weakref.ref[Any] | None]
    edges: Edges
    holders: list[tuple[str, int]]
    search: Search | None = None

    def is_same(self, objects: list[Any], edges: Edges) -> bool:
        """Returns whether a later traversal found the same objects under the same
        names.

        Args:
            objects: objects of the later traversal.
            edges: for each object of the later traversal, its children as (name, number
                in `objects`).
        """
        if edges != self.edges or list(map(type, objects)) != self.kinds:
            return False
        return all(
            before() is now and (value and value()) is inner_variable(now)
            for before, value, now in zip(
                self.objects, self.values, objects, strict=True
            )
        )


def inner_variable(obj: Any) -> Any:
    """Returns TensorFlow's variable inside a variable of Keras; None for other objects.

    The attribute is looked up in `__dict__`, because a distributed variable reads its
    value when asked for a missing attribute.
    """
    found = getattr(obj, "__dict__", {}).get("_value")
    kinds = tf.Variable, private_api.distribute_values.DistributedVariable
    return found if isinstance(found, kinds) else None


def distributed(obj: Any) -> Any | None:
    """Returns an object's distributed variable: the object itself, or a variable
    wrapped by the object; else None."""
    for attribute in (None, "_value", "_variable"):
        candidate = obj if attribute is None else getattr(obj, attribute, None)
        if isinstance(candidate, private_api.distribute_values.DistributedVariable):
            return candidate
    return None


def is_on_read(obj: Any) -> bool:
    """Returns whether an object is, or wraps, a variable that is reduced across
    replicas when read."""
    variable = distributed(obj)
    return (
        variable is not None
        and variable.synchronization == tf.VariableSynchronization.ON_READ
    )


def is_replicated(obj: Any, workers: int) -> bool:
    """Returns whether an object is, or wraps, a variable with the same value on all
    workers.

    True only if a MultiWorkerMirroredStrategy with this number of workers keeps the
    replicas equal. False for a variable that only the first replica assigns.

    Args:
        obj: any object.
        workers: number of workers.
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
    """Returns the tf.Variables that a variable of TensorFlow or Keras has on this
    machine: a tf.Variable for every local replica. Empty for other objects."""
    found = distributed(variable)
    if found is not None:
        return tuple(found.values)
    inner = getattr(variable, "_value", variable)
    return (inner,) if isinstance(inner, tf.Variable) else ()


def unequal_parts(variable: Any) -> tuple[Any, ...]:
    """Returns the `local_parts` of a variable whose values may differ: only the first
    part, unless the variable is reduced across replicas when read."""
    parts = local_parts(variable)
    return parts if is_on_read(variable) else parts[:1]


def device_prefixes() -> tuple[str, ...]:
    """Returns the prefixes of the names of this process's CPUs and GPUs."""
    host = private_api.eager_context.context().host_address_space()
    return f"{host}/device:CPU:", f"{host}/device:GPU:"


def variable_shape(obj: Any) -> tuple[int | None, ...] | None:
    """Returns the shape of a variable of TensorFlow or Keras; None for other
    objects."""
    is_variable = isinstance(obj, tf.Variable) or distributed(obj) is not None
    if not is_variable and not hasattr(type(obj), "_deferred_initialize"):
        return None
    shape = tf.TensorShape(obj.shape)
    return None if shape.rank is None else tuple(shape.as_list())


def held_bytes(checkpoint: tf.train.Checkpoint) -> int:
    """Returns the total size in bytes of a checkpoint's variables, without reading any.

    Variables of unknown shape are not counted.
    """
    sizes: dict[int, int] = {}
    for _, obj in walk(checkpoint):
        shape = variable_shape(obj)
        if shape is None or None in shape:
            continue
        # A variable of Keras holds TensorFlow's variable: count the variable once.
        counted = next(iter(local_parts(obj)), obj)
        count = math.prod(each or 0 for each in shape)
        sizes[id(counted)] = int(count * tf.as_dtype(obj.dtype).size)
    return sum(sizes.values())


def plain_message(error: tf.errors.OpError) -> str:
    """Returns the message of an op's error, without the names of ops and nodes."""
    return str(error.message).rpartition("}} ")[2].split(" [Op:")[0].strip()


def out_of_scope(make: Callable[[], T]) -> T:
    """Creates a variable outside of any strategy scope of the caller.

    In the scope of a MultiWorkerMirroredStrategy a variable is created by a broadcast
    from worker 0. Every worker would have to create the variable at the same moment,
    without waiting for another worker in between. A scope applies only to the thread
    that entered it, so another thread creates the variable.

    Args:
        make: function that creates the variable.

    Returns:
        The result of `make`.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


NAME = "tfpreempt_untracked"
_HOLDING = ("variables", "reset_state", "make_seed_for_stateless_op")
"""An object with such an attribute may hold variables. In order: attribute of layers,
optimizers and modules; of tf_keras' list of metrics; of tf_keras' random generators."""
_OF_REPLICAS = ("_non_trainable_variables", "_accumulated_gradients")
"""Attributes of Keras 3 with the variables to which each replica assigns a value of its
own: the batch statistics of a layer, and the gradients that an optimizer accumulates
with gradient_accumulation_steps."""
_SETTINGS = ("._steps_per_execution",)  # variables with settings of the user: not saved


class Attached(_Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """The objects of a Checkpoint, as found by `attach`.

    Created once for each Checkpoint, as a child of the Checkpoint. Objects that the
    Checkpoint does not track are saved as children of this object. Use on the main
    thread only.

    Attributes:
        found: layers, optimizers and variables that the Checkpoint does not track, by
            path.
        own: path and variable, for the variables of metrics and random generators, in a
            fixed order; every worker saves its values.
        differing: path and variable, for the tracked variables to which every replica
            assigns a different value.
        iterators: the dataset iterators tracked by the Checkpoint, by path. Weak
            references, because an iterator has threads, which must end when the program
            replaces the iterator.
        graph: the objects found by the last `attach`. The next call keeps the graph if
            it finds the same objects.
        reached: the objects entered by the last search for untracked objects. While
            these objects are unchanged, `attach` does not search again. None if the
            last search found a new object.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.own: list[tuple[str, Any]] = []
        self.differing: list[tuple[str, Any]] = []
        self.iterators: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )
        self.graph: Graph | None = None
        self.reached: object_graph.Reached | None = None

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.found)

    def tracked(self) -> tuple[list[tuple[str, Any]], Edges]:
        """Returns the objects of the Checkpoint in TensorFlow's order, with their paths
        as in `walk`, and the children of every object.

        Called after `attach`, whose traversal is used.
        """
        assert self.graph is not None
        objects = [each() for each in self.graph.objects]
        edges = self.graph.edges
        return list(zip(paths(edges), objects, strict=True)), edges


class AttachedState(State):
    """Base class of the States that every worker saves for the objects of a Checkpoint.

    Args:
        attached: the objects.
    """

    _is_reserved = True
    _name: ClassVar[str]  # name of the State

    def __init__(self, attached: Attached) -> None:
        super().__init__(self._name, per_worker=True, registry=None)
        self._attached = attached


def attach(checkpoint: tf.train.Checkpoint) -> Attached:
    """Finds the objects that a Checkpoint does not track, and makes the Checkpoint
    track them. Also finds the iterators, and the variables with a value per replica.

    Call before a save or a restore, on all workers. An object found by an earlier call
    keeps its path.

    Returns:
        The found objects, stored on the Checkpoint.
    """
    if not hasattr(checkpoint, NAME):
        setattr(checkpoint, NAME, Attached())
    found = attached(checkpoint)
    objects, edges = _walk(checkpoint)
    graph = found.graph
    if graph is None or not graph.is_same(objects, edges):
        graph = found.reached = None
    holders = _holders(objects, edges) if graph is None else graph.holders
    if (found.reached is None or not found.reached.is_unchanged()) and (
        _attach_untracked(found, objects, holders)
    ):
        objects, edges = _walk(checkpoint)
        graph = None
        holders = _holders(objects, edges)
    if graph is None:
        values = map(inner_variable, objects)
        found.graph = Graph(
            objects=[weakref.ref(each) for each in objects],
            kinds=list(map(type, objects)),
            values=[each if each is None else weakref.ref(each) for each in values],
            edges=edges,
            holders=holders,
        )
        _sort(found, found.tracked()[0])
    return found


def attached(checkpoint: tf.train.Checkpoint) -> Attached:
    """Returns the result of the last `attach`. The caller has called `attach` earlier
    in the same save."""
    found: Attached = getattr(checkpoint, NAME)
    return found


def _holders(objects: list[Any], edges: Edges) -> list[tuple[str, int]]:
    """Returns path and number of every object whose attributes or items may be objects
    that the Checkpoint does not track."""

    def may_hold(obj: Any) -> bool:
        kind: type = type(obj)
        return object_graph.is_container(obj) or _may_hold(kind)

    return [
        (path, number)
        for number, path in enumerate(paths(edges))
        if may_hold(objects[number])
    ]


def _attach_untracked(
    attached: Attached, objects: list[Any], holders: list[tuple[str, int]]
) -> bool:
    """Finds the objects that the Checkpoint does not track, and stores the objects in
    `attached`. Returns whether it found an object that no earlier call had found.

    Args:
        attached: receives the objects.
        objects: the objects that the Checkpoint tracks.
        holders: path and index in `objects` of each object where the search begins.
    """
    roots = {path: objects[number] for path, number in holders}
    before = set(map(id, objects))
    tracked = set(before)
    own: dict[int, tuple[str, Any]] = {}
    new: list[tuple[str, Any]] = []

    def leads_nowhere(value: Any) -> bool:
        """Returns whether the search can skip a value: the value is tracked (the search
        starts at tracked holders anyway), or of no interest."""
        kind: type = type(value)
        return id(value) in before or not _is_of_interest(kind)

    def skips(value: Any) -> bool:
        if leads_nowhere(value):
            return True
        if not object_graph.is_container(value):
            return False
        # Copy first: another thread of the program may change the container.
        items = list(value.values() if isinstance(value, dict) else value)
        return all(map(leads_nowhere, items))

    reached = object_graph.Reached()
    for location in object_graph.walk(roots, _may_hold, skips=skips, reached=reached):
        path, value = location.path, location.value
        kind: type = type(value)
        if id(value) in tracked or path.endswith(_SETTINGS):
            continue
        if _is_own(kind):
            reached.add(value, _parts_of_own)
            for number, variable in enumerate(_variables_of_own(value)):
                own.setdefault(id(variable), (f"{path}[{number}]", variable))
        elif _may_be_tracked(kind):
            new.append((path, value))
            view = private_api.graph_view.ObjectGraphView(value)
            tracked.update(map(id, view.breadth_first_traversal()[0]))
    if new:
        _name(attached.found, new, roots)
    attached.own = [
        (path, variable)
        for path, variable in own.values()
        if id(variable) not in tracked and local_parts(variable)
    ]
    attached.reached = None if new else reached
    return bool(new)


def _variables_of_own(own: Any) -> list[Any]:
    """Returns the variables of a metric, random generator or moving average. Later
    calls may return more variables."""
    if isinstance(own, tf.train.ExponentialMovingAverage):
        return [*own._averages.values()]
    return list(own.variables) if hasattr(type(own), "variables") else [own.state]


def _parts_of_own(own: Any) -> list[Any]:
    """Returns the variables of a metric or random generator, and the tf.Variables
    inside the variables."""
    return [
        part for each in _variables_of_own(own) for part in (each, *local_parts(each))
    ]


def _name(
    found: dict[str, Any], new: list[tuple[str, Any]], roots: dict[str, Any]
) -> None:
    """Adds the new objects to `found`, by path. If `found` has another object under the
    path, which the program still uses, a number is appended to the new path.

    Args:
        found: the untracked objects found so far, by path.
        new: path and object of each new object.
        roots: the objects where the search for untracked objects begins, by path.
    """
    locations = object_graph.walk(roots, _may_hold, skips=lambda value: value is None)
    held = {id(location.value) for location in locations if location.owner is not None}
    for path, value in new:
        names = itertools.chain([path], (f"{path} ({n})" for n in itertools.count(2)))
        found[next(n for n in names if id(found.get(n)) not in held)] = value


def _sort(attached: Attached, objects: list[tuple[str, Any]]) -> None:
    """Searches the tracked objects for dataset iterators, and for variables that differ
    between replicas; stores both in `attached`."""
    of_replicas = {
        id(variable)
        for _, owner in objects
        for name in _OF_REPLICAS
        if isinstance(found := getattr(owner, "__dict__", {}).get(name), list | tuple)
        for variable in found
    }
    attached.differing = [
        (path, variable)
        for path, obj in objects
        if (variable := distributed(obj)) is not None
        and (is_on_read(variable) or id(obj) in of_replicas)
    ]
    attached.iterators.clear()
    for path, obj in objects:
        if isinstance(obj, private_api.iterator_ops.OwnedIterator):
            attached.iterators[path] = obj


@functools.cache
def _is_own(kind: type) -> bool:
    """Returns whether a class is a metric, random generator or moving average, saved
    by each worker itself.

    A metric counts the worker's own rows of data, and generators may differ between
    workers.
    """
    is_metric = hasattr(kind, "reset_state") and hasattr(kind, "variables")
    is_seed = kind.__name__ == "SeedGenerator" and kind.__module__.startswith("keras.")
    others = tf.random.Generator, tf.train.ExponentialMovingAverage
    return is_metric or is_seed or issubclass(kind, others)


@functools.cache
def _may_be_tracked(kind: type) -> bool:
    """Returns whether a class is a layer, optimizer, module or variable.

    Trackable lists and dicts are not included: the search enters lists and dicts, and
    finds the items.
    """
    if not issubclass(kind, private_api.trackable_base.Trackable) or issubclass(
        kind, private_api.data_structures.TrackableDataStructure
    ):
        return False
    is_variable = issubclass(kind, tf.Variable) or hasattr(kind, "_deferred_initialize")
    return is_variable or hasattr(kind, "variables")


@functools.cache
def _is_of_interest(kind: type) -> bool:
    """Returns whether the search for objects that a Checkpoint does not track must look
    at objects of a class: the object may be such an object, or hold such objects."""
    holds = object_graph.may_be_container(kind) or _may_hold(kind)
    return holds or _is_own(kind) or _may_be_tracked(kind)


@functools.cache
def _may_hold(kind: type) -> bool:
    """Returns whether the search for variables enters objects of a class: models, and
    objects of the program's own classes."""
    if _is_own(kind) or hasattr(kind, "_create_or_restore_slot_variable"):
        return False  # TensorFlow itself finds the slot variables of old optimizers
    return any(hasattr(kind, n) for n in _HOLDING) or object_graph.is_user_code(kind)
