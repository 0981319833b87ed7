"""The gather of a save: all workers read the values, and large tensors are taken out.

An ON_READ variable is reduced across all workers when the variable is read, so a save
needs every worker at the same time, in the same order. The order is equal by
construction: all workers call the same `_gather_serialized_tensors` of the checkpoint's
saver, and directly after that call the same loop turns every value that may need peers
into a plain tensor. The chief then writes those tensors; the others stop there.
TensorFlow itself would evaluate the same callables while it writes, in an order that
depends on devices.

Between the gather and TensorFlow's write, large dense values are taken away, because
threads of tfpreempt write them. TensorFlow writes the rest: strings, variants, slices
of a partitioned variable, objects that save themselves, values on other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.partitioning import DenseTensor
from tfpreempt.checkpoint.tensors.variables import (
    distributed,
    is_on_read,
    local_parts,
)
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads

_log = logging.getLogger(__name__)


_THEIRS = ("tensorflow.", "keras.")  # modules whose variables save their value alone

Value = tuple[Any, str, tf.Tensor]
"""The owner, the key and the value of a variable."""


@dataclasses.dataclass(eq=False)
class Read:
    """One read of all values that a checkpoint saves.

    Attributes:
        extract: given the values, by owner and name, and the values of variables that
            an `ObjectGraph` has read, returns the values that TensorFlow is to write;
            None: all of them.
    """

    extract: Callable[[Any, Sequence[Value]], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The result of one search for objects.

    Attributes:
        objects: in the order of the walk.
        edges: of each object, the names and numbers of its children.
        variables: number and key of each plain variable, and the variable.
        others: number and keys of each other object that has values.
        graph: the value that describes the graph, by key.
        rest: of what the saver returns, all but the values.
    """

    objects: list[weakref.ref[Any]]
    edges: list[Any]
    variables: list[tuple[int, str, weakref.ref[Any]]]
    others: list[tuple[int, list[str]]]
    graph: dict[str, tf.Tensor]
    rest: tuple[Any, ...]


class ObjectGraph:
    """The objects that the last save of a checkpoint found; main thread.

    TensorFlow computes the keys, the specifications and the graph of all objects in
    each save. A save with an `ObjectGraph` walks over the objects. If the walk finds
    the same objects under the same names, the save reads their values, and uses the
    keys and the graph of the last save. An object that the program has dropped is not
    kept alive.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None

    def values(
        self, checkpoint: tf.train.Checkpoint
    ) -> tuple[list[Value], tuple[Any, ...]] | None:
        """Returns what the checkpoint's saver gathers, without a search for objects.

        Args:
            checkpoint: the checkpoint that `keep` was given.

        Returns:
            The values of plain variables; and the saver's result for all other objects.
            None if the objects have changed, or are not known.
        """
        known, self._known = self._known, None  # unless all values are found
        is_copied = getattr(checkpoint._saver, "_object_map", None)  # by TensorFlow
        if is_copied or known is None:
            return None
        objects, edges = _walk(checkpoint)
        if edges != known.edges or not all(
            before() is now for before, now in zip(known.objects, objects, strict=True)
        ):
            return None
        here, variables = _here(), []
        for number, key, before in known.variables:
            variable = _plain_variable(objects[number], here)
            if variable is None or before() is not variable:
                return None
            if (value := _memory_of(variable)) is None:
                return None
            variables.append((objects[number], key, value))
        tensors = seams.object_identity.ObjectIdentityDictionary()
        for number, keys in known.others:
            owner, values = _serialized(objects[number], keys[0])
            if list(values) != keys:
                return None
            tensors[owner] = values
        tensors[None] = dict(known.graph)
        self._known = known
        return variables, (tensors, *known.rest)

    def keep(self, checkpoint: tf.train.Checkpoint, gathered: tuple[Any, ...]) -> None:
        """Keeps the result of TensorFlow's search for the next save.

        Args:
            checkpoint: is saved.
            gathered: the result of the checkpoint's saver.
        """
        self._known = None
        tensors, fed, savers, _ = gathered
        objects, edges = _walk(checkpoint)
        here = _here()
        numbers = {id(each): number for number, each in enumerate(objects)}
        variables: list[tuple[int, str, weakref.ref[Any]]] = []
        others: list[tuple[int, list[str]]] = []
        if fed or savers or any(map(_has_slots, objects)):
            return
        for owner, values in tensors.items():
            if owner is None:
                continue
            if not values:
                if _saves_itself(_object(owner)):
                    return  # it may have values in the next save
                continue
            number = numbers.get(id(_object(owner)))
            if number is None:
                return
            variable = _plain_variable(objects[number], here)
            if len(values) == 1 and variable is not None:
                [key] = values
                variables.append((number, key, weakref.ref(variable)))
            else:
                others.append((number, list(values)))
        with contextlib.suppress(TypeError):  # of an object without weak references
            self._known = _Known(
                objects=[weakref.ref(each) for each in objects],
                edges=edges,
                variables=variables,
                others=others,
                graph=dict(tensors[None]),
                rest=gathered[1:],
            )


def _serialized(obj: Any, key: str) -> tuple[Any, dict[str, Any]]:
    """Serializes an object as TensorFlow's search does.

    Args:
        obj: an object that is not a plain variable.
        key: the key of one of its values in the last save.

    Returns:
        The owner of the values for TensorFlow's saver; and the values by key, none if
        only TensorFlow's search can find them.
    """
    utils = seams.trackable_utils
    path = utils.extract_object_name(key)
    of_objects = seams.saveable_object_util
    older_name = seams.saveable_compat.get_saveable_name(obj)
    if of_objects.trackable_has_serialize_to_tensor(obj) and not older_name:
        values = {}
        for name, value in obj._serialize_to_tensors().items():
            name = utils.checkpoint_key(path, utils.escape_local_name(name))
            if isinstance(value, seams.saveable_object.SaveSpec):
                value.name, value.slice_spec = name, ""
            values[name] = value
        return obj, values
    saveables = []
    for name, make in of_objects.saveable_objects_from_trackable(obj).items():
        if not callable(make):
            return obj, {}
        saveables.append(make(name=utils.checkpoint_key(path, older_name or name)))
        if not hasattr(saveables[-1], "specs"):
            return obj, {}
    owner = of_objects.SaveableCompatibilityConverter(obj, saveables)
    return owner, owner._serialize_to_tensors()


def _walk(checkpoint: tf.train.Checkpoint) -> tuple[list[Any], list[Any]]:
    """The objects in TensorFlow's order; the names and numbers of their children."""
    view = checkpoint._saver._graph_view
    objects = [view.root]
    numbers = {id(view.root): 0}
    edges = []
    for each in objects:
        children = []
        for name, child in view.list_children(each):
            number = numbers.setdefault(id(child), len(objects))
            if number == len(objects):
                objects.append(child)
            children.append((name, number))
        edges.append(children)
    return objects, edges


def _saves_itself(obj: Any) -> bool:
    """Whether the class of an object says what is saved of it."""
    base, own = seams.trackable_base.Trackable, type(obj)
    return bool(
        seams.saveable_object_util.trackable_has_serialize_to_tensor(obj)
        or own._gather_saveables_for_checkpoint
        is not base._gather_saveables_for_checkpoint
    )


def _has_slots(obj: Any) -> bool:
    return hasattr(type(obj), "_create_or_restore_slot_variable")


def _plain_variable(obj: Any, here: tuple[str, ...]) -> Any:
    """The variable of this machine whose memory is the value of an object; or None.

    A class of the program that serializes itself may save something else.
    """
    parts = local_parts(obj)
    if not parts or is_on_read(obj):
        return None
    base = seams.resource_variable_ops.BaseResourceVariable
    variable = parts[0]
    is_plain = (
        isinstance(variable, base)
        and type(variable)._serialize_to_tensors is base._serialize_to_tensors
        and type(obj)._serialize_to_tensors.__module__.startswith(_THEIRS)
        and getattr(variable, "_save_slice_info", None) is None
        and variable.device.startswith(here)
    )
    return variable if is_plain else None


def _memory_of(variable: Any) -> tf.Tensor | None:
    """The value of a plain variable, without a copy; None: it has no value."""
    handle = variable.handle
    try:
        tf.raw_ops.DisableCopyOnRead(resource=handle)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
    except tf.errors.FailedPreconditionError:
        return None
    is_empty = not value.shape.num_elements()  # as that of a variable without a value
    return None if is_empty and not variable.is_initialized() else value


@contextlib.contextmanager
def reading(
    checkpoint: tf.train.Checkpoint, *, are_others: bool, graph: ObjectGraph
) -> Iterator[Read]:
    """Makes the checkpoint's saver evaluate the values of peers as soon as it gathers.

    The saver gathers once, whatever happens: at the end, or when the body fails, unless
    the body has written the checkpoint already.

    Args:
        checkpoint: is saved.
        are_others: whether there are other workers, which may wait for this worker.
        graph: the objects of the save before this one.

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
            variables: Sequence[Value] = ()
            if (known := graph.values(checkpoint)) is not None:
                variables, (tensors, *others) = known
            else:
                tensors, *others = found = gather(object_graph_tensor)
                graph.keep(checkpoint, found)
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
        if read.extract is not None:
            return read.extract(tensors, variables), *others
        for owner, key, value in variables:
            tensors[owner] = {key: value}
        return tensors, *others

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
    """Returns a tensor in place of a value that may need peers; else the value.

    Tensors, plain variables and mirrored variables are known to be local.
    """
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return value
    is_spec = isinstance(value, seams.saveable_object.SaveSpec)
    # In this order: a variable that is asked for an attribute that it lacks reads its
    # value.
    variable = distributed(value)
    if variable is None:
        variable = distributed(getattr(owner, "obj", owner))
    if variable is not None:
        may_need_peers = is_on_read(variable)
    else:
        is_lazy = is_spec and callable(value._tensor)
        is_variable = isinstance(getattr(owner, "obj", owner), tf.Variable)
        may_need_peers = is_lazy and not is_variable
    if not may_need_peers:
        return value
    with tf.device(value.device if is_spec else None):
        tensor = value.tensor if is_spec else value
        if tensor is None:  # TensorFlow writes the object, and no value of it
            return value
        return tf.convert_to_tensor(tensor)


# Some of those that TensorFlow puts together again (`BundleReader::GetSliceValue`).
_CUT = (tf.float32, tf.float64, tf.bfloat16, tf.int32, tf.int64, tf.uint8, tf.int8)

IsReplicated = Callable[[Any], bool]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

NONE_SPARE: Mapping[str, Bytes] = types.MappingProxyType({})
"""No memory to be used again."""

_COPIED_AT_ONCE = 1 << 24  # bytes: so that one large tensor keeps all threads busy


@dataclasses.dataclass(eq=False)
class LargeTensors:
    """The large tensors of one save, which TensorFlow does not write.

    Args:
        small_bytes: a tensor with fewer bytes is written by TensorFlow.
        worth_bytes: if all large tensors have fewer bytes, TensorFlow writes them too.
        replication: returns what says whether all workers hold the same of a variable;
            called where something is taken. None: the workers hold nothing alike.

    Attributes:
        found: the tensors that were taken.
    """

    small_bytes: int
    worth_bytes: int
    replication: Callable[[], IsReplicated] | None = None
    found: list[DenseTensor] = dataclasses.field(default_factory=list)

    def extract(self, tensors: Any, variables: Sequence[Value] = ()) -> Any:
        """Takes the large tensors out of the values that a checkpoint's saver gathered.

        Args:
            tensors: by owner and name.
            variables: more values.

        Returns:
            The rest.
        """
        tensors, large = _read(tensors, self.small_bytes)
        known = [each for each in variables if _is_dense(each[2].dtype)]
        size = sum(_size(value) for *_, value in (*large, *known))
        taken: list[Value] = []
        if size >= self.worth_bytes:
            for owner, name, _ in large:
                del tensors[owner][name]
            replication = self.replication
            is_replicated = replication() if replication is not None else None
            taken = [*large, *known]
            for owner, name, value in taken:
                # Of small values the other workers deal out none (`replicated`).
                is_held = (
                    is_replicated is not None
                    and _size(value) >= self.small_bytes
                    and is_replicated(_object(owner))
                )
                self.found.append(_in_memory(name, value, is_held))
        names = {name for _, name, _ in taken}
        for owner, name, value in variables:
            if name not in names:
                tensors[owner] = {name: value}
        return tensors


def replicated(
    checkpoint: tf.train.Checkpoint,
    *,
    small_bytes: int,
    worth_bytes: int,
    is_replicated: IsReplicated,
    wanted: Callable[[Sequence[DenseTensor]], Collection[str]],
) -> list[DenseTensor]:
    """The tensors that the chief extracts, and that this worker holds as well.

    Only those that it wants are copied from a GPU; of the others the bytes are none.

    Args:
        checkpoint: gathers, and writes nothing.
        small_bytes: see `LargeTensors`.
        worth_bytes: if these tensors have fewer bytes, none is read.
        is_replicated: whether all workers hold the same of a variable.
        wanted: the names of those that this worker wants, by all of them.
    """
    tensors, *_ = checkpoint._saver._gather_serialized_tensors()
    held = seams.object_identity.ObjectIdentityDictionary()
    most = 0.0  # bytes that there can be
    for owner, values in tensors.items():
        if is_replicated(_object(owner)):
            held[owner] = values
            most += _most(distributed(_object(owner)))
    if most < worth_bytes:
        return []
    _, large = _read(held, small_bytes)
    unread = [_unread(name, value, True) for _, name, value in large]
    names = wanted(unread)
    return [
        _in_memory(name, value, True) if name in names else each
        for (_, name, value), each in zip(large, unread, strict=True)
    ]


def copied(
    tensors: Sequence[DenseTensor],
    threads: int,
    spare: Mapping[str, Bytes] = NONE_SPARE,
) -> list[DenseTensor]:
    """The same in memory of their own, which nothing else writes into.

    A tensor that was read from a variable may be the variable's memory. What TensorFlow
    assigns then goes elsewhere; what writes in place, or into an array of NumPy's that
    the tensor was made of, does not. What came from a GPU is a copy already.

    Args:
        tensors: none of which is changed meanwhile.
        threads: how many copy.
        spare: memory that nobody needs any more, by the names of tensors; it is used
            where it has the size. What is new has to be cleared by the kernel first,
            which takes longer than to copy.
    """
    copies = [
        dataclasses.replace(each, data=_memory(each, spare), is_shared=False)
        if each.is_shared
        else each
        for each in tensors
    ]
    pieces = [
        (copy.data[start:][:_COPIED_AT_ONCE], each.data[start:][:_COPIED_AT_ONCE])
        for copy, each in zip(copies, tensors, strict=True)
        if each.is_shared
        for start in range(0, each.data.nbytes, _COPIED_AT_ONCE)
    ]
    map_in_threads(
        lambda piece: np.copyto(*piece), pieces, threads=threads, name="tfpreempt-copy"
    )
    return copies


def _memory(tensor: DenseTensor, spare: Mapping[str, Bytes]) -> Bytes:
    found = spare.get(tensor.name)
    if found is None or found.nbytes != tensor.data.nbytes:
        return np.empty_like(tensor.data)
    return found


def _object(owner: Any) -> Any:
    """Whose tensors they are; TensorFlow wraps what has the older way to be saved.

    A distributed variable that is asked for what it has not got reads its value.
    """
    converter = seams.saveable_object_util.SaveableCompatibilityConverter
    return owner.obj if isinstance(owner, converter) else owner


def _here() -> tuple[str, ...]:
    """The prefixes of the names of this process's devices."""
    host = seams.eager_context.context().host_address_space()
    return f"{host}/device:CPU:", f"{host}/device:GPU:"


def _read(
    tensors: Any, small_bytes: int
) -> tuple[Any, list[tuple[Any, str, tf.Tensor]]]:
    """Reads the values that TensorFlow would read while it writes them.

    What lies on another machine, or on a device of another kind, is left as it is, and
    so is a variable that has no value yet.

    Returns:
        The values by owner and name, with tensors where they could be read; and owner,
        name and tensor of those that are dense, not small, and in the memory of this
        process.
    """
    here = _here()
    read = seams.object_identity.ObjectIdentityDictionary()
    large = []
    for owner, values in tensors.items():
        read[owner] = {name: _host_value(value, here) for name, value in values.items()}
        for name, value in read[owner].items():
            if not isinstance(value, tf.Tensor) or not value.device.startswith(here):
                continue
            if _is_dense(value.dtype) and _size(value) >= small_bytes:
                large.append((owner, name, value))
    return read, large


def _host_value(value: Any, here: tuple[str, ...]) -> Any:
    is_spec = isinstance(value, seams.saveable_object.SaveSpec)
    is_variable = isinstance(value, tf.Variable)  # Keras 3 gives those of a strategy
    if not (is_spec or is_variable) or not str(value.device).startswith(here):
        return value
    if is_spec and value.slice_spec:
        return value
    with tf.device(value.device):
        tensor = value.tensor if is_spec else tf.convert_to_tensor(value)
    return value if tensor is None else tensor


@functools.cache
def _is_dense(kind: tf.DType) -> bool:
    """Whether a tensor of this type is its memory."""
    return bool(kind.is_floating or kind.is_integer or kind.is_complex or kind.is_bool)


def _size(tensor: Any) -> int:
    """Bytes of a tensor, or of a variable whose shape is known."""
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def _most(variable: Any) -> float:
    """Bytes that a variable can have; with an open dimension they may be many."""
    return math.inf if variable.shape.num_elements() is None else _size(variable)


def _in_memory(name: str, tensor: tf.Tensor, is_replicated: bool) -> DenseTensor:
    """A tensor's bytes: copied from a GPU, the same memory otherwise."""
    # A scalar of some types is no array of NumPy.
    array = np.asarray(tensor if tensor.shape.rank else tf.reshape(tensor, [1]))
    data = array.reshape(-1).view(np.uint8)
    return _dense(name, tensor, data, is_replicated)


def _unread(name: str, tensor: tf.Tensor, is_replicated: bool) -> DenseTensor:
    """A tensor without its bytes: they are as many, but one 0 that repeats itself."""
    data = np.broadcast_to(np.uint8(0), (_size(tensor),))
    return _dense(name, tensor, data, is_replicated)


def _dense(
    name: str, tensor: tf.Tensor, data: Bytes, is_replicated: bool
) -> DenseTensor:
    return DenseTensor(
        name=name,
        dtype=tensor.dtype.as_datatype_enum,
        shape=tuple(tensor.shape),
        data=data,
        can_be_cut=tensor.dtype in _CUT,
        is_shared="device:CPU:" in tensor.backing_device,
        is_replicated=is_replicated,
    )
