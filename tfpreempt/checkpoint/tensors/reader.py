"""Restores a tf.train.Checkpoint; reports a mismatch before any value is assigned.

The structure of the saved checkpoint is compared with the program's objects first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError

from tfpreempt import errors
from tfpreempt.checkpoint.tensors.bundle_reader import ReadAhead, reading_in_threads
from tfpreempt.checkpoint.tensors.iterator_state import (
    Objects,
    keep_seeds,
    other_positions,
    positions_kept,
)
from tfpreempt.checkpoint.tensors.variables import (
    NAME,
    Edges,
    attach,
    device_prefixes,
    is_on_read,
    local_parts,
    plain_message,
    variable_shape,
)
from tfpreempt.core import private_api

_log = logging.getLogger(__name__)
# Key of the object graph; files of TensorFlow 1 have no such key.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
COUNTERS = {"checkpointed_runs", "save_counter"}

_SHOWN = 20
VALUE = "VARIABLE_VALUE"  # name of the attribute that has a variable's value


def problem(here: tf.TensorSpec, saved: tf.TensorSpec | None) -> str | None:
    """Compares a variable with its saved value. Returns the difference as text for
    people; None if the value fits.

    Args:
        here: shape and type of the variable in this program.
        saved: shape and type in the checkpoint; None if the variable is missing there.
    """
    if saved is None:
        return (
            f"the model has a variable of shape {here.shape} and type "
            f"{here.dtype.name}, the checkpoint has no value"
        )
    if saved.dtype != here.dtype:
        return (
            f"the model has type {here.dtype.name}, the checkpoint {saved.dtype.name}"
        )
    if not here.shape.is_compatible_with(saved.shape):
        return f"the model has shape {here.shape}, the checkpoint {saved.shape}"
    return None


def mismatch(prefix: str, problems: Sequence[str], unused: Sequence[str]) -> Exception:
    """Returns an error for a checkpoint of another model, with the differences.

    Args:
        prefix: prefix of the checkpoint, for the message.
        problems: differences of the program's variables.
        unused: names in the checkpoint for which the program has no object. Listed only
            as a hint: the names may belong to layers built later.
    """
    more = f"\nIn the checkpoint but not in the model: {listed(unused)}"
    return errors.CheckpointMismatchError(
        f"The checkpoint {prefix!r} was written by another model; nothing was "
        f"restored. Differences ({len(problems)}):\n  "
        + "\n  ".join(problems[:_SHOWN])
        + (f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")
        + (more if unused else "")
        + "\nUse the model that wrote the checkpoint, or another checkpoint directory. "
        "A PreemptionCheckpointHandler, but not a fit, can restore the variables that "
        'fit (restore="partial").'
    )


def listed(names: Sequence[str]) -> str:
    """Returns text for people: the first 20 names, and the number of further names."""
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def match(objects: Sequence[Any], edges: Edges, graph: Any) -> dict[int, int]:
    """Finds, for each object of the program, the saved node from which TensorFlow would
    restore the object.

    Args:
        objects: the program's objects, from `reached`; the first is the checkpoint.
        edges: for each object, its children as (name, number in `objects`).
        graph: the saved TrackableObjectGraph.

    Returns:
        Node number by id() of the object.
    """
    matched: dict[int, int] = {}
    numbers = {0: 0}  # node -> number of the object
    for node_id in (todo := [0]):
        number = numbers[node_id]
        matched.setdefault(id(objects[number]), node_id)
        children = dict(edges[number])
        for edge in graph.nodes[node_id].children:
            if edge.local_name in children and edge.node_id not in numbers:
                numbers[edge.node_id] = children[edge.local_name]
                todo.append(edge.node_id)
    return matched


def _unused(graph: Any, nodes: Collection[int]) -> list[str]:
    """Returns the names of variables that exist only in the checkpoint, without the
    counters of tfpreempt and TensorFlow.

    Args:
        graph: the saved TrackableObjectGraph.
        nodes: nodes from which the program's objects are restored.
    """
    matched = set(nodes)
    # Leave out slot variables: the optimizer creates them later, at the first use.
    for index in nodes:
        matched.update(
            s.slot_variable_node_id for s in graph.nodes[index].slot_variables
        )
    return _names(graph, set(range(len(graph.nodes))) - matched)


def _created_later(graph: Any, nodes: Collection[int]) -> list[str]:
    """Returns the names of variables of the checkpoint that objects of the program
    create at their first use, and have not created yet.

    An optimizer of Keras has its variables in a list. Old optimizers, which have slot
    variables, have their other variables in attributes.

    Args:
        graph: the saved TrackableObjectGraph.
        nodes: nodes from which the program's objects are restored.
    """
    found = set[int]()
    for index in nodes:
        slots, children = graph.nodes[index].slot_variables, graph.nodes[index].children
        found.update(each.slot_variable_node_id for each in slots)
        found.update(
            each.node_id for each in children if slots or each.local_name.isdigit()
        )
    return _names(graph, found - set(nodes))


def _names(graph: Any, nodes: Iterable[int]) -> list[str]:
    """Returns the names of the variables at some nodes, without the counters of
    tfpreempt and TensorFlow."""
    found = {
        attribute.checkpoint_key.split("/.ATTRIBUTES/")[0]
        for index in nodes
        for attribute in graph.nodes[index].attributes
        if attribute.name == VALUE
    }
    return sorted(found - COUNTERS)


def called(variable: Any) -> str:
    """Returns the name that Keras gave to a variable, including the layer's name, such
    as `dense/kernel`; "" without such a name."""
    is_of_keras = hasattr(type(variable), "path")
    name = variable.path if is_of_keras else getattr(variable, "name", "")
    return str(name).partition(":")[0] if "/" in str(name) else ""


def saved_key(graph: Any, node_id: int | None) -> str | None:
    """Returns the key under which a node's value is stored in the checkpoint. None if
    the node has no value.

    Args:
        graph: the saved TrackableObjectGraph.
        node_id: number of the node, or None.
    """
    if node_id is None:
        return None
    for attribute in graph.nodes[node_id].attributes:
        if attribute.name == VALUE:
            return str(attribute.checkpoint_key)
    return None


def check(prefix: str) -> None:
    """Checks that TensorFlow can read a checkpoint's index and object graph, which
    `restore` reads first. Assigns nothing.

    Args:
        prefix: prefix of TensorFlow's files.

    Raises:
        CheckpointCorruptedError: TensorFlow cannot read the files.
    """
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(prefix)
        if reader.has_tensor(_OBJECT_GRAPH):
            private_api.checkpoint.object_metadata(prefix)
    except (tf.errors.OpError, RuntimeError, ValueError, DecodeError) as error:
        raise errors.CheckpointCorruptedError(
            f"TensorFlow cannot read {prefix!r}: {type(error).__name__}: {error}"
        ) from error


def restore(
    checkpoint: tf.train.Checkpoint,
    prefix: str,
    options: Any,
    with_data: bool,
    ahead: ReadAhead | None = None,
    is_partial: bool = False,
) -> Callable[..., Sequence[str]]:
    """Compares the structure of a checkpoint with the program's objects, then restores
    the objects.

    Args:
        checkpoint: checkpoint with the objects to restore. Objects that the program
            creates later are restored when created.
        prefix: prefix of TensorFlow's files.
        options: tf.train.CheckpointOptions, or None.
        with_data: whether to restore the positions of dataset iterators; False if the
            files have the positions of another worker. Iterators with the same position
            on every worker are restored in any case.
        ahead: result of `bundle_reader.read_ahead` for the same files; None to read the
            tensors from the files.
        is_partial: whether variables that do not fit the checkpoint keep their values;
            a warning names the variables.

    Returns:
        Function that returns the names of saved variables for which the program has no
        object yet, for example an optimizer's variables before the first step. With
        `later=True`, only those that an object of the program creates at its first use.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another model, and
            `is_partial` is False; nothing was assigned.
        CheckpointCorruptedError: TensorFlow cannot read the files.
    """
    attached = attach(checkpoint)
    for iterator in attached.iterators.values():
        keep_seeds(iterator)
    checkpoint.sync()
    objects, edges = attached.tracked()
    unmoved = contextlib.nullcontext() if with_data else positions_kept(objects)
    try:
        unfit = _check_structure(objects, edges, prefix, is_partial)
        directly = assigning_directly(prefix, unfit)
        with unmoved, reading_in_threads(prefix, ahead), directly:
            status = checkpoint.restore(prefix, options=options)
    except tf.errors.OpError as error:
        raise errors.CheckpointCorruptedError(
            f"TensorFlow cannot read {prefix!r}: {plain_message(error)}"
        ) from error
    status.expect_partial()
    return follow_later_restores(status, prefix)


def _check_structure(
    objects: Objects, edges: Edges, prefix: str, is_partial: bool
) -> set[int]:
    """Compares the variables with the checkpoint, before the restore.

    Returns the `id` of each variable that does not fit, if `is_partial`.
    """
    try:
        graph = private_api.checkpoint.object_metadata(prefix)
    except ValueError:
        return set()  # a name-based checkpoint of TensorFlow 1 has no structure
    # This read cannot fail: TensorFlow has just read the index.
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    nodes = match([obj for _, obj in objects], edges, graph)
    problems, new, unfit = [], [], set[int]()
    for path, variable in objects:
        if (shape := variable_shape(variable)) is None:
            continue
        here = tf.TensorSpec(shape, variable.dtype)
        key, saved = saved_key(graph, nodes.get(id(variable))), None
        if key in dtypes:
            saved = tf.TensorSpec(shapes[key], dtypes[key])
        elif path.startswith(f"{NAME}/"):
            new.append(path)
            continue
        elif path in COUNTERS:
            continue
        if difference := problem(here, saved):
            name = called(variable)
            label = f"{name} ({path})" if name else path
            problems.append(f"{label}: {difference}")
            unfit.add(id(variable))
    if problems and not is_partial:
        raise mismatch(prefix, problems, _unused(graph, nodes.values()))
    if problems:
        _log.warning(
            '%s is restored in part (restore="partial"). These variables keep the '
            "initial values of the program (%d):\n  %s",
            prefix,
            len(problems),
            "\n  ".join(problems),
        )
    if new:
        _log.warning(
            "%s does not have %s, which are in lists, dicts or objects of the program; "
            "these variables keep the initial values of the program.",
            prefix,
            listed(sorted(new)),
        )
    if begun := other_positions(objects, graph, nodes):
        _log.warning(
            "%s has the position in the data of %s for another number of workers or "
            "replicas, which divided the data in another way: these data start from "
            "the beginning.",
            prefix,
            listed(begun),
        )
    return unfit


class _RestoredObjectMap(weakref.WeakValueDictionary[int, Any]):
    """TensorFlow's map from nodes of a restored checkpoint to objects, for layers built
    later.

    Keras traces a Keras 3 model that has no `build` method, to create the model's
    variables. When TensorFlow matches such a variable with its node, the variable has
    no value yet. A restore of the variable would fail; Keras would attribute the
    failure to the tracing, and continue with a fresh value. So this map gives the saved
    value to the variable as its initial value.

    Args:
        coordinator: TensorFlow's coordinator of the restore, with the object graph.
        prefix: path prefix of the checkpoint's files.
    """

    def __init__(self, coordinator: Any, prefix: str) -> None:
        super().__init__(coordinator.object_by_proto_id)
        self._uid = coordinator.restore_uid
        self._graph = coordinator.object_graph_proto
        self._prefix = prefix

    def __setitem__(self, node: int, matched: Any) -> None:
        key = saved_key(self._graph, node)
        is_of_keras = hasattr(type(matched), "_deferred_initialize")
        if key is not None and is_of_keras and matched._value is None:
            matched._initializer = functools.partial(self._read, key)
            # Tells TensorFlow that the variable is restored.
            matched._update_uid = self._uid
        super().__setitem__(node, matched)

    def _read(self, key: str, shape: Any, dtype: Any) -> Any:
        reader = tf.compat.v1.train.NewCheckpointReader(self._prefix)
        value = tf.constant(reader.get_tensor(key))
        if (tuple(value.shape), value.dtype) != (tuple(shape), tf.as_dtype(dtype)):
            raise errors.CheckpointMismatchError(
                "A layer that was built after the restore does not match the "
                f"checkpoint: {key} has shape {value.shape} and type "
                f"{value.dtype.name} in the checkpoint, and shape {shape} and type "
                f"{dtype} in the program. Build the layer as the interrupted run did, "
                "or use another checkpoint directory"
            )
        return value


def follow_later_restores(status: Any, prefix: str) -> Callable[..., Sequence[str]]:
    """Lets layers that are built after the restore get their saved values, too.

    If such a layer does not match the checkpoint, the program gets a
    CheckpointMismatchError where it builds the layer. Variables created by Keras during
    the tracing of a model are restored as well.

    Args:
        status: result of `tf.train.Checkpoint.restore`.
        prefix: path prefix of the checkpoint's files.

    Returns:
        Function that returns the names of saved variables for which the program has no
        object yet, as in `restore`.
    """
    coordinator = status._checkpoint
    if not hasattr(coordinator, "object_graph_proto"):
        return tuple  # a name-based checkpoint of TensorFlow 1 is completely restored
    inner = coordinator.restore_saveables

    def restore_saveables(saveables: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(saveables, *args, **kwargs)
        except (ValueError, tf.errors.OpError) as error:
            names = ", ".join(sorted(map(str, saveables)))
            raise errors.CheckpointMismatchError(
                "A layer that was built after the restore does not match the "
                f"checkpoint {prefix!r}: {names}: {error}. Build the layer as the "
                "interrupted run did, or use another checkpoint directory"
            ) from error

    coordinator.restore_saveables = restore_saveables
    coordinator.object_by_proto_id = _RestoredObjectMap(coordinator, prefix)
    graph, matched = coordinator.object_graph_proto, coordinator.object_by_proto_id

    def unrestored(*, later: bool = False) -> list[str]:
        return (_created_later if later else _unused)(graph, list(matched))

    return unrestored


# --- plain variables ------------------------------------------------------------------
# For every variable, TensorFlow creates a description of the save, wraps the
# description twice, and restores the value through both wrappers. With thousands of
# variables, this takes longer than reading the bytes. A plain variable only needs an
# assignment.

_Target = tuple[str, Sequence[Any]]
"""A restore of a plain variable: the key of the saved value, and the variables of this
machine to which the value is assigned (a variable for every local replica)."""

_CLASSES = ("tensorflow.", "keras.", "tf_keras.")
"""Modules whose classes restore a variable only by an assignment."""


@contextlib.contextmanager
def assigning_directly(prefix: str, unfit: Collection[int] = ()) -> Iterator[None]:
    """Returns a context in which a restore only assigns the saved value to a plain
    variable: a variable on this machine, of a class whose restore is an assignment. Use
    on the main thread.

    Every value is read before the first value is assigned. Plain variables are assigned
    before TensorFlow restores other objects, because these may use the variables.

    Args:
        prefix: prefix of TensorFlow's files; restores from other files are unchanged.
        unfit: `id` of each variable that is not restored.
    """
    positions = private_api.checkpoint_restore.CheckpointPosition
    coordinators = private_api.checkpoint._CheckpointRestoreCoordinator
    gather = positions.gather_ops_or_named_saveables
    restore = coordinators.restore_saveables
    thread = threading.get_ident()
    here = device_prefixes()
    targets: list[_Target] = []

    @functools.cache
    def has_slots(coordinator: Any) -> bool:
        """Returns whether the checkpoint has slot variables of an old optimizer.
        TensorFlow restores slot variables during the search for objects."""
        return any(node.slot_variables for node in coordinator.object_graph_proto.nodes)

    def is_ours(coordinator: Any) -> bool:
        return (
            coordinator.save_path_string == prefix
            and threading.get_ident() == thread
            and tf.executing_eagerly()
            and not has_slots(coordinator)
        )

    def gather_others(position: Any) -> Any:
        if is_ours(position.checkpoint) and (target := _target(position, here)):
            targets.append(target)
            return [], {}, [], {}
        is_here = position.checkpoint.save_path_string == prefix
        if is_here and id(position.trackable) in unfit:
            return [], {}, [], {}
        return gather(position)

    def restore_all(coordinator: Any, saveables: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(coordinator) or not targets:
            return restore(coordinator, saveables, *args, **kwargs)
        found, targets[:] = list(targets), []
        values = list(zip(found, _read(coordinator, found), strict=True))
        read = private_api.io_ops.restore_v2

        def assign() -> None:
            for (_, variables), value in values:
                for variable in variables:
                    _assign(variable, value)
            values.clear()

        def read_others(*args: Any, **kwargs: Any) -> Any:
            others = read(*args, **kwargs)
            if threading.get_ident() == thread and tf.executing_eagerly():
                assign()
            return others

        if not saveables:  # TensorFlow reads nothing else from these files
            assign()
        private_api.io_ops.restore_v2 = read_others
        try:
            result = restore(coordinator, saveables, *args, **kwargs)
        finally:
            private_api.io_ops.restore_v2 = read
        assign()
        return result

    positions.gather_ops_or_named_saveables = gather_others
    coordinators.restore_saveables = restore_all
    try:
        yield
    finally:
        positions.gather_ops_or_named_saveables = gather
        coordinators.restore_saveables = restore


def _target(position: Any, here: tuple[str, ...]) -> _Target | None:
    """Returns the key of a saved node's value, and the plain variables that get the
    value; None if the node needs TensorFlow's own restore. `position` has the saved
    node, and the object of the program that is restored from the node."""
    node, obj = position.object_proto, position.trackable
    reshards = getattr(position, "has_non_trivial_reshard_callback", lambda: False)
    if len(node.attributes) != 1 or reshards():
        return None
    [attribute] = node.attributes
    if attribute.name != VALUE or node.HasField("registered_saver"):
        return None
    variables = local_parts(obj)
    if (
        not variables
        or not _assigns(obj.__class__)
        or "_restore_from_tensors" in getattr(obj, "__dict__", {})
        or is_on_read(obj)
        or private_api.registration.get_registered_saver_name(obj)
    ):
        return None
    key, coordinator = attribute.checkpoint_key, position.checkpoint
    shape = coordinator.shape_map.get(key)
    dtype = coordinator.dtype_map.get(key)
    is_plain = shape is not None and all(
        _is_plain(each.__class__)
        and getattr(each, "_save_slice_info", None) is None
        and each.device.startswith(here)
        and each.dtype == dtype
        and each.shape.is_compatible_with(shape)
        for each in variables
    )
    return (key, variables) if is_plain else None


@functools.cache
def _assigns(kind: type) -> bool:
    """Returns whether the restore of an object of a class only assigns the value."""
    return kind.__module__.startswith(_CLASSES)


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Returns whether a class of variables inherits the restore of TensorFlow's
    resource variables without a change."""
    base = private_api.resource_variable_ops.BaseResourceVariable
    return (
        issubclass(kind, base)
        and kind._restore_from_tensors is base._restore_from_tensors
        and kind._gather_saveables_for_checkpoint
        is base._gather_saveables_for_checkpoint
    )


def _read(coordinator: Any, targets: Sequence[_Target]) -> Any:
    """Reads the saved values for plain variables into the memory of the CPU; returns
    the values in the order of `targets`."""
    device = coordinator.options.experimental_io_device or "cpu:0"
    with tf.init_scope(), tf.device(device):
        return private_api.io_ops.restore_v2(
            coordinator.save_path_tensor,
            [key for key, _ in targets],
            [""] * len(targets),
            [variables[0].dtype for _, variables in targets],
        )


def _assign(variable: Any, value: Any) -> None:
    if variable.device != value.device:
        with tf.device(variable.device):
            value = tf.identity(value)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
