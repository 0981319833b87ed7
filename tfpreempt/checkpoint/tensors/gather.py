"""Reads the values of a save on every worker, in the same order; extracts large
tensors.

A read of a variable with ON_READ synchronization reduces the variable across all
workers. So in a save all workers must read such variables at the same time, in the same
order. The order is the same, because every worker runs the same code:
`_gather_serialized_tensors` of the checkpoint's saver lists the values, and a loop
directly after the call reads every value that may need other workers. Then the chief
(worker 0) lets TensorFlow write the values; the other workers do not. Without this
module, TensorFlow would read the values only during the write, in an order that depends
on devices.

After the read, large dense values are extracted (taken out of TensorFlow's write),
because tfpreempt writes large tensors with several threads. TensorFlow writes all other
values: strings, tf.variant tensors, slices of a partitioned variable, objects with a
registered saver, values on other machines.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.bundles.partitioning import DenseTensor
from tfpreempt.checkpoint.tensors.iterator_state import replacing
from tfpreempt.checkpoint.tensors.variables import (
    Attached,
    Graph,
    PlainVariable,
    Search,
    device_prefixes,
    distributed,
    inner_variable,
    is_on_read,
    local_parts,
    variable_shape,
)
from tfpreempt.core import private_api

_log = logging.getLogger(__name__)


# A save of a variable of these modules stores only the value.
_THEIRS = ("tensorflow.", "keras.")

Value = tuple[Any, str, tf.Tensor]
"""A value to save: the object that owns the value, the key in the checkpoint, and the
value as a tensor."""


@dataclasses.dataclass(eq=False)
class Read:
    """The result of a `reading` context. In the context, the program may set `extract`
    to choose the values that TensorFlow writes.

    Attributes:
        extract: function such as `LargeTensors.extract`. The first argument has the
            values by owner and name, the second argument has the values of plain
            variables (see `_plain_variable`). The function returns the values that
            TensorFlow writes. None: TensorFlow writes every value.
    """

    extract: Callable[[Any, Sequence[Value]], Any] | None = None


def known_values(
    checkpoint: tf.train.Checkpoint, graph: Graph | None
) -> tuple[list[Value], tuple[Any, ...]] | None:
    """Reads the values to save without TensorFlow's search for objects, if possible.

    The search: in every save, TensorFlow computes the keys, the specifications and the
    graph of the objects. If `attach` has found the same objects as before the last
    search, this function uses the keys and the graph of the last search, and reads only
    the values. Called on the main thread.

    Args:
        checkpoint: checkpoint to save.
        graph: the objects found by `attach`, with the result of the last search; None
            if `attach` could not store the objects.

    Returns:
        The values of plain variables (see `_plain_variable`); and the saver's result
        for the other objects. None if the objects have changed, or no result of a
        search is stored.
    """
    if graph is None or getattr(checkpoint._saver, "_object_map", None):
        return None  # with an object map, TensorFlow saves copies of the objects
    # None until the values are read: after an error, the next save searches again.
    search, graph.search = graph.search, None
    if search is None:
        return None
    objects = [each() for each in graph.objects]
    if (variables := _values(search, objects)) is None:
        return None
    tensors = private_api.object_identity.ObjectIdentityDictionary()
    for number, keys in search.others:
        owner, values = _serialized(objects[number], keys[0])
        if list(values) != keys:
            return None
        tensors[owner] = values
    tensors[None] = dict(search.described)
    graph.search = search
    return variables, (tensors, *search.rest)


def keep(gathered: tuple[Any, ...], graph: Graph | None) -> list[Value]:
    """Stores the result of TensorFlow's search in `graph`, for the next save.

    Args:
        gathered: result of the saver's `_gather_serialized_tensors`. The values of
            plain variables are removed from the result.
        graph: the objects found by `attach`; None if `attach` could not store them.

    Returns:
        The removed values of plain variables. If the next save cannot use the result,
        the function stores and removes nothing, and returns an empty list.
    """
    if graph is None or (search := _find(gathered, graph)) is None:
        return []
    variables = _values(search, [each() for each in graph.objects])
    if variables is None:
        return []
    graph.search = search
    tensors, keys = gathered[0], {key for _, key, _ in variables}
    for owner, values in list(tensors.items()):
        if owner is not None and values and keys.issuperset(values):
            del tensors[owner]
    return variables


def prepare(checkpoint: tf.train.Checkpoint, found: Attached) -> None:
    """Runs TensorFlow's search for the keys of all objects before the first save, to
    shorten the first save.

    Reads no value. Called on the main thread. Does nothing in three cases:

    - The search would need all workers: a variable is reduced across workers.
    - The search would call code of the program, which expects calls only in saves.
    - The first save could not use the result; see `_find`.

    Args:
        checkpoint: checkpoint to save later.
        found: the result of `attach`, which was just called.
    """
    graph, iterators = found.graph, list(found.iterators.values())
    if graph is None or graph.search is not None:
        return
    objects = [each() for each in graph.objects]
    known = set(map(id, iterators))
    for each in objects:
        is_known = id(each) in known or _is_variable(each) or not _saves_itself(each)
        if not is_known or is_on_read(each) or has_slots(each):
            return
    # TensorFlow finds the keys of the iterators, but reads no position.
    empty = {"_STATE": tf.constant("")}
    with replacing(iterators, "_serialize_to_tensors", lambda: empty):
        gathered = checkpoint._saver._gather_serialized_tensors()
    graph.search = _find(gathered, graph)


def _find(gathered: tuple[Any, ...], graph: Graph) -> Search | None:
    """Converts `gathered`, the result of TensorFlow's search for the objects in
    `graph`, into a `Search`. Returns None if a later save cannot use the result, for
    example because an object may have other keys in the next save."""
    tensors, fed, savers, _ = gathered
    if fed or savers:
        return None
    objects = [each() for each in graph.objects]
    if any(map(has_slots, objects)):
        return None
    here = device_prefixes()
    numbers = {id(each): number for number, each in enumerate(objects)}
    variables: dict[tuple[str, tf.DType], list[PlainVariable]] = {}
    others: list[tuple[int, list[str]]] = []
    for owner, values in tensors.items():
        if owner is None:
            continue
        if not values:
            if _saves_itself(_object(owner)):
                # The object has no values now, but may have values in the next save.
                return None
            continue
        number = numbers.get(id(_object(owner)))
        if number is None or _is_unknown(_object(owner)):
            return None
        variable = _plain_variable(objects[number], here)
        if len(values) != 1 or variable is None:
            others.append((number, list(values)))
            continue
        # TensorFlow's save omits an uninitialized variable.
        if not variable.is_initialized():
            return None
        [key] = values
        plain = PlainVariable(
            number=number,
            key=key,
            variable=weakref.ref(variable),
            is_large=is_large(variable),
        )
        kind = variable.device, variable.dtype
        variables.setdefault(kind, []).append(plain)
    return Search(
        variables=variables,
        others=others,
        described=dict(tensors[None]),
        rest=gathered[1:],
    )


def _values(search: Search, objects: Sequence[Any]) -> list[Value] | None:
    """Reads the plain variables (see `_plain_variable`) that a search has found;
    returns their values. None if a variable no longer exists.

    The caller has called `attach`, which checks that every object still has the same
    variable as at the search.
    """
    found: list[Value] = []
    for (device, dtype), variables in search.variables.items():
        handles = []
        for each in variables:
            if (variable := each.variable()) is None:
                return None
            handles.append(variable.handle)
            if each.is_large:
                tf.raw_ops.DisableCopyOnRead(resource=handles[-1])
        read = read_variables(device, dtype, handles)
        found += [
            (objects[each.number], each.key, value)
            for each, value in zip(variables, read, strict=True)
        ]
    return found


def is_large(variable: Any) -> bool:
    """Returns whether a variable is so large that a copy by a read takes too long and
    must be prevented; see `_UNCOPIED_BYTES`."""
    return _most(variable) >= _UNCOPIED_BYTES


def read_variables(
    device: str, dtype: tf.DType, handles: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Reads many variables with few operations, without a copy.

    For every new number of variables, TensorFlow prepares a new operation, which takes
    as long as reading the variables separately. So every operation reads the same
    number of variables; the last operation reads its last variable several times.

    Args:
        device: device on which all variables are stored.
        dtype: type of all variables.
        handles: resource handles of the variables.

    Returns:
        The values, in the order of the handles.
    """
    found: list[tf.Tensor] = []
    attributes = (
        "N",
        _READ_AT_ONCE,
        "dtypes",
        _READ_AT_ONCE * [dtype.as_datatype_enum],
    )
    with tf.device(device):
        for start in range(0, len(handles), _READ_AT_ONCE):
            read = list(handles[start : start + _READ_AT_ONCE])
            read += read[-1:] * (_READ_AT_ONCE - len(read))
            found += private_api.eager_execute.execute(
                b"_ReadVariablesOp",
                _READ_AT_ONCE,
                read,
                attributes,
                private_api.eager_context.context(),
            )
    return found[: len(handles)]


def read_parts(parts: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the values of variables of this worker, without a copy if possible.

    Args:
        parts: variables on one device each, see `local_parts`.
    """
    kinds: dict[Any, list[int]] = collections.defaultdict(list)
    for number, part in enumerate(parts):
        kinds[part.device, part.dtype].append(number)
        if is_large(part):
            tf.raw_ops.DisableCopyOnRead(resource=part.handle)
    values: dict[int, tf.Tensor] = {}
    for (device, dtype), numbers in kinds.items():
        handles = [parts[number].handle for number in numbers]
        read = read_variables(device, dtype, handles)
        values |= zip(numbers, read, strict=True)
    return [values[number] for number in range(len(parts))]


def sums(parts: Sequence[Any]) -> list[float]:
    """Returns the sum of the elements of each variable. A sum is finite only if all
    elements are finite; the sum of finite elements may be infinite.

    Args:
        parts: floating-point variables on one device each, see `local_parts`.
    """
    found = []
    for value in read_parts(parts):
        with tf.device(value.device):
            # A sum in 16 bits would often be infinite.
            wide = value if value.dtype.size > 2 else tf.cast(value, tf.float32)
            found.append(tf.reduce_sum(wide))
    return [float(each) for each in found]  # waits for the device only now


def _serialized(obj: Any, key: str) -> tuple[Any, dict[str, Any]]:
    """Serializes an object in the same way as TensorFlow's search for objects to save.

    Args:
        obj: an object, not a plain variable.
        key: key of one of the object's values in the last save.

    Returns:
        The owner: the object under which TensorFlow's saver lists the values (`obj`, or
        a wrapper); and the values by key. The values are empty if only TensorFlow's
        search can find them.
    """
    utils = private_api.trackable_utils
    path = utils.extract_object_name(key)
    of_objects = private_api.saveable_object_util
    older_name = private_api.saveable_compat.get_saveable_name(obj)
    if of_objects.trackable_has_serialize_to_tensor(obj) and not older_name:
        values = {}
        for name, value in obj._serialize_to_tensors().items():
            name = utils.checkpoint_key(path, utils.escape_local_name(name))
            if isinstance(value, private_api.saveable_object.SaveSpec):
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


def _saves_itself(obj: Any) -> bool:
    """Returns whether the class of an object defines how the object is saved."""
    base, own = private_api.trackable_base.Trackable, type(obj)
    return bool(
        private_api.saveable_object_util.trackable_has_serialize_to_tensor(obj)
        or own._gather_saveables_for_checkpoint
        is not base._gather_saveables_for_checkpoint
    )


def _is_variable(obj: Any) -> bool:
    """Returns whether an object is a variable that is serialized only by code of
    TensorFlow or Keras, and by no method of the program."""
    kind = type(obj)
    methods = kind._serialize_to_tensors, kind._gather_saveables_for_checkpoint
    return variable_shape(obj) is not None and all(
        each.__module__.startswith(_THEIRS) for each in methods
    )


def has_slots(obj: Any) -> bool:
    """Returns whether an object is an optimizer with slot variables. At every save,
    TensorFlow gets the current slots of the optimizer, which may include new slots."""
    return hasattr(type(obj), "get_slot_names")


def _is_unknown(obj: Any) -> bool:
    """Returns whether an object may get a different variable between two saves, and
    `attach`, which compares the objects of the saves, would not detect the change.

    An example: a class of the program has a property `_value` that returns the
    variable.
    """
    kinds = tf.Variable, private_api.distribute_values.DistributedVariable
    is_known = isinstance(obj, kinds) or inner_variable(obj) is not None
    return not is_known and bool(local_parts(obj))


def _plain_variable(obj: Any, here: tuple[str, ...]) -> Any:
    """Returns the local variable of an object if the object is plain: a save stores the
    bytes of this variable and nothing else. Otherwise returns None.

    An object is not plain if a class of the program defines its serialization, because
    the object may save a different value. `here` has the prefixes of the names of this
    process's devices.
    """
    parts = local_parts(obj)
    if not parts or is_on_read(obj):
        return None
    base = private_api.resource_variable_ops.BaseResourceVariable
    variable = parts[0]
    is_plain = (
        isinstance(variable, base)
        and type(variable)._serialize_to_tensors is base._serialize_to_tensors
        and type(obj)._serialize_to_tensors.__module__.startswith(_THEIRS)
        and getattr(variable, "_save_slice_info", None) is None
        and variable.device.startswith(here)
    )
    return variable if is_plain else None


@contextlib.contextmanager
def reading(
    checkpoint: tf.train.Checkpoint,
    *,
    are_others: bool,
    graph: Graph | None,
) -> Iterator[Read]:
    """Returns a context for a save, in which all workers together read the values whose
    read needs all workers.

    Patches the checkpoint's saver. Within the context the saver reads ("gathers") the
    values at least once. The read is part of the write of the checkpoint in the body of
    the context. If the body writes no checkpoint, or raises an error before the write,
    the read is at the end of the body, because the other workers wait for this worker
    in the read.

    Args:
        checkpoint: checkpoint to save.
        are_others: whether there are other workers. If True, an error of the read is
            raised as CollectiveReadError, because the other workers wait for this
            worker.
        graph: the objects that `attach` has just found; None if `attach` could not
            store the objects.

    Yields:
        A `Read`. Its function `extract`, if set by the body, is called during the write
        of the checkpoint.

    Raises:
        CollectiveReadError: this worker cannot gather, and other workers wait.
    """
    saver = checkpoint._saver
    gather = saver._gather_serialized_tensors
    read = Read()
    calls: list[None] = []

    def gather_and_evaluate(object_graph_tensor: Any = None) -> Any:
        calls.append(None)
        try:
            if (found := known_values(checkpoint, graph)) is not None:
                variables, (tensors, *others) = found
            else:
                tensors, *others = gathered = gather(object_graph_tensor)
                variables = keep(gathered, graph)
            tensors = _evaluate(tensors)
        # TensorFlow's errors (OpError) are raised unchanged.
        except (MemoryError, OSError, RuntimeError) as error:
            if not are_others:
                raise
            raise errors.CollectiveReadError(
                "this worker failed while all workers read the state together: "
                f"{type(error).__name__}: {error}. The other workers are blocked in "
                "this read, so restart all workers; the last commit is still valid. "
                "Give this worker more memory, or save less state."
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
        # The other workers are in the collective read, or about to enter the read, and
        # wait there for this worker.
        try:
            if not calls:
                saver._gather_serialized_tensors()
        except errors.CollectiveReadError:
            raise  # more important than the body's error: other workers wait
        except Exception as error:  # noqa: BLE001  (the body's error is raised)
            _log.warning(
                "the read of the state by all workers failed, too, in addition to the "
                "raised error: %s",
                error,
            )
        raise
    finally:
        del saver._gather_serialized_tensors  # uncover the method of the class


def _evaluate(tensors: Any) -> Any:
    """Reads those values of a save whose read may need other workers. Returns all
    values in the same order, with a tensor in place of each value that was read.

    Args:
        tensors: the values by owner and key, from `_gather_serialized_tensors`.
    """
    evaluated = private_api.object_identity.ObjectIdentityDictionary()
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
    """Reads a value if the read may need other workers; returns the tensor. Otherwise
    returns the value unchanged.

    Reads of tensors, plain variables and mirrored variables need no other worker.
    """
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return value
    is_spec = isinstance(value, private_api.saveable_object.SaveSpec)
    # Check `value` before `value.obj`: the access to a missing attribute of a variable
    # reads the value of the variable.
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
        if tensor is None:  # the variable has no value; TensorFlow handles the object
            return value
        return tf.convert_to_tensor(tensor)


# TensorFlow reassembles tensors of these types from slices
# (`BundleReader::GetSliceValue`).
_CUT = (tf.float32, tf.float64, tf.bfloat16, tf.int32, tf.int64, tf.uint8, tf.int8)
_can_be_cut = functools.cache(_CUT.__contains__)

IsReplicated = Callable[[Any], bool]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_UNCOPIED_BYTES = 1 << 20
"""A read copies a variable whose rows were assigned separately
(`tf.Variable.scatter_update`), unless the operation DisableCopyOnRead was called first.
For a variable of fewer bytes, the operation takes longer than the copy."""

_READ_AT_ONCE = 64  # number of variables that one operation reads


@dataclasses.dataclass(eq=False)
class LargeTensors:
    """Extracts the large tensors of a save, and all plain variables, so that TensorFlow
    does not write these values.

    Args:
        small_bytes: minimum size of a large tensor in bytes. TensorFlow writes smaller
            tensors, except plain variables.
        worth_bytes: if the large tensors and the plain variables together have fewer
            bytes, TensorFlow writes every tensor.
        is_replicated: predicate of a variable: whether every worker holds the same
            value. None: no tensor is marked as replicated.

    Attributes:
        found: the extracted tensors.
    """

    small_bytes: int
    worth_bytes: int
    is_replicated: IsReplicated | None = None
    found: list[DenseTensor] = dataclasses.field(default_factory=list)

    def extract(self, tensors: Any, variables: Sequence[Value] = ()) -> Any:
        """Moves large tensors from the values gathered by a checkpoint's saver to
        `found`.

        Args:
            tensors: values by owner and name; the method modifies this mapping.
            variables: values of plain variables, from `known_values` or `keep`.

        Returns:
            The remaining values for TensorFlow's write, by owner and name.
        """
        tensors, large = _read(tensors, self.small_bytes)
        known = [each for each in variables if _is_dense(each[2].dtype)]
        sizes = (_size(value) for *_, value in (*large, *known))
        # any() stops at the first sufficient sum, so few sizes are computed.
        sums = itertools.accumulate(sizes, initial=0)
        taken: list[Value] = []
        if any(size >= self.worth_bytes for size in sums):
            for owner, name, _ in large:
                del tensors[owner][name]
            taken = [*large, *known]
            for owner, name, value in taken:
                # Mark only large values as replicated: only large values are divided
                # between the workers.
                is_held = (
                    self.is_replicated is not None
                    and _size(value) >= self.small_bytes
                    and self.is_replicated(_object(owner))
                )
                self.found.append(_dense(name, value, _bytes(value), is_held))
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
    """Returns the replicated large tensors: the large tensors with the same value on
    the chief and on this worker, which is not the chief.

    Only the tensors named by `wanted` are copied from a GPU; other tensors have only
    name, shape and type.

    Args:
        checkpoint: checkpoint whose values are gathered; nothing is written.
        small_bytes: minimum size of a large tensor in bytes.
        worth_bytes: minimum total size of the replicated values in bytes. If their size
            is smaller, no tensor is read, and the result is empty.
        is_replicated: predicate of a variable: whether every worker holds the same
            value.
        wanted: function that receives the tensors without bytes, and returns the names
            of the tensors to read.
    """
    tensors, *_ = checkpoint._saver._gather_serialized_tensors()
    held = private_api.object_identity.ObjectIdentityDictionary()
    most = 0.0  # upper limit of the total size in bytes
    for owner, values in tensors.items():
        if is_replicated(_object(owner)):
            held[owner] = values
            most += _most(distributed(_object(owner)))
    if most < worth_bytes:
        return []
    _, large = _read(held, small_bytes)
    # An unread tensor has bytes of the right size, but only zeros.
    unread = [
        _dense(name, value, np.broadcast_to(np.uint8(0), (_size(value),)), True)
        for _, name, value in large
    ]
    names = wanted(unread)
    return [
        each._replace(data=_bytes(value)) if each.name in names else each
        for (*_, value), each in zip(large, unread, strict=True)
    ]


def _object(owner: Any) -> Any:
    """Returns the object whose values TensorFlow's saver lists under an owner: the
    owner itself, or the object inside TensorFlow's wrapper for older kinds of savers.

    The wrapper is recognized by type, not by `hasattr`: the access to a missing
    attribute of a distributed variable reads the value of the variable.
    """
    converter = private_api.saveable_object_util.SaveableCompatibilityConverter
    return owner.obj if isinstance(owner, converter) else owner


def _read(tensors: Any, small_bytes: int) -> tuple[Any, list[Value]]:
    """Reads now the values that TensorFlow would otherwise read during the write.

    Values on another machine or on another kind of device, and variables without a
    value, are not read.

    Returns:
        The values by owner and name, with tensors for the values read; and owner, name
        and tensor of the large dense tensors on this process's CPUs and GPUs.
    """
    here = device_prefixes()
    read = private_api.object_identity.ObjectIdentityDictionary()
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
    is_spec = isinstance(value, private_api.saveable_object.SaveSpec)
    # Under a strategy, the value of a Keras 3 object is a variable.
    is_variable = isinstance(value, tf.Variable)
    if not (is_spec or is_variable) or not str(value.device).startswith(here):
        return value
    if is_spec and value.slice_spec:
        return value
    with tf.device(value.device):
        tensor = value.tensor if is_spec else tf.convert_to_tensor(value)
    return value if tensor is None else tensor


@functools.cache
def _is_dense(kind: tf.DType) -> bool:
    """Returns whether tensors of a type are plain memory: numbers and booleans, not
    strings or resources."""
    return bool(kind.is_floating or kind.is_integer or kind.is_complex or kind.is_bool)


def _size(tensor: Any) -> int:
    """Returns the size in bytes of a tensor, or of a variable of known shape."""
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def _most(variable: Any) -> float:
    """Returns the size of a variable in bytes; infinite if a dimension is unknown."""
    return math.inf if variable.shape.num_elements() is None else _size(variable)


def _bytes(tensor: tf.Tensor) -> Bytes:
    """Returns the bytes of a tensor: on a CPU the memory of the tensor itself, on a GPU
    a copy."""
    try:
        array = np.asarray(tensor)
    except ValueError:  # NumPy cannot hold a bfloat16 scalar, for example
        array = np.asarray(tf.reshape(tensor, [1]))
    return array.reshape(-1).view(np.uint8)


def _dense(
    name: str, tensor: tf.Tensor, data: Bytes, is_replicated: bool
) -> DenseTensor:
    dtype = tensor.dtype
    return DenseTensor(
        name=name,
        dtype=dtype.as_datatype_enum,
        shape=tuple(tensor.shape),
        data=data,
        can_be_cut=_can_be_cut(dtype),
        is_shared="device:CPU:" in tensor.backing_device,
        is_replicated=is_replicated,
    )
