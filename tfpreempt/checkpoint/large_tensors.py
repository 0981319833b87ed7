"""The large tensors of a save, taken out of what TensorFlow writes.

A checkpoint's saver gathers what is to be saved, by object and name, and then writes
it. In between, the values that are large and dense are taken away. TensorFlow writes
the rest, with whatever is special about it: strings, variants, slices of a partitioned
variable, objects that save themselves, what lies on other machines.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.shares import DenseTensor
from tfpreempt.checkpoint.variables import distributed
from tfpreempt.core import seams
from tfpreempt.core.threads import map_in_threads

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

    def extract(self, tensors: Any) -> Any:
        """Takes the large tensors out of the values that a checkpoint's saver gathered.

        Args:
            tensors: by owner and name.

        Returns:
            The rest.
        """
        here = _here()
        tensors = _read(tensors, here)
        large = list(_large(tensors, here, self.small_bytes))
        if sum(_size(value) for *_, value in large) >= self.worth_bytes:
            replication = self.replication
            is_replicated = replication() if replication is not None else None
            for owner, name, value in large:
                del tensors[owner][name]
                is_held = is_replicated is not None and is_replicated(_object(owner))
                self.found.append(_in_memory(name, value, is_held))
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
    here = _here()
    large = [
        (name, value) for _, name, value in _large(_read(held, here), here, small_bytes)
    ]
    unread = [_unread(name, value, True) for name, value in large]
    names = wanted(unread)
    return [
        _in_memory(name, value, True) if name in names else each
        for (name, value), each in zip(large, unread, strict=True)
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
    return owner if distributed(owner) is not None else getattr(owner, "obj", owner)


def _here() -> tuple[str, ...]:
    """What the devices of this process begin with."""
    host = seams.eager_context.context().host_address_space()
    return f"{host}/device:CPU:", f"{host}/device:GPU:"


def _large(
    tensors: Any, here: tuple[str, ...], small_bytes: int
) -> Iterator[tuple[Any, str, tf.Tensor]]:
    """Owner, name and tensor of those that are dense, and not small."""
    for owner, values in tensors.items():
        for name, value in values.items():
            if _is_dense(value, here) and _size(value) >= small_bytes:
                yield owner, name, value


def _read(tensors: Any, here: tuple[str, ...]) -> Any:
    """The same with tensors in place of what would be read while it is written.

    What lies on another machine, or on a device of another kind, is left as it is, and
    so is a variable that has no value yet.
    """
    read = seams.object_identity.ObjectIdentityDictionary()
    for owner, values in tensors.items():
        read[owner] = {name: _value(value, here) for name, value in values.items()}
    return read


def _value(value: Any, here: tuple[str, ...]) -> Any:
    is_spec = isinstance(value, seams.saveable_object.SaveSpec)
    is_variable = isinstance(value, tf.Variable)  # Keras 3 gives those of a strategy
    if not (is_spec or is_variable) or not str(value.device).startswith(here):
        return value
    if is_spec and value.slice_spec:
        return value
    with tf.device(value.device):
        tensor = value.tensor if is_spec else tf.convert_to_tensor(value)
    return value if tensor is None else tensor


def _is_dense(value: Any, here: tuple[str, ...]) -> bool:
    """Whether it is its memory, and that is here."""
    if not isinstance(value, tf.Tensor) or not value.device.startswith(here):
        return False
    kind = value.dtype
    return bool(kind.is_floating or kind.is_integer or kind.is_complex or kind.is_bool)


def _size(tensor: Any) -> int:
    """Bytes of a tensor, or of a variable whose shape is known."""
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def _most(variable: Any) -> float:
    """Bytes that a variable can have; with an open dimension they may be many."""
    return math.inf if variable.shape.num_elements() is None else _size(variable)


def _in_memory(name: str, tensor: tf.Tensor, is_replicated: bool) -> DenseTensor:
    """A tensor's bytes: copied from a GPU, the same memory otherwise."""
    return dataclasses.replace(
        _unread(name, tensor, is_replicated),
        data=np.asarray(tf.reshape(tensor, [-1])).view(np.uint8),
    )


def _unread(name: str, tensor: tf.Tensor, is_replicated: bool) -> DenseTensor:
    """A tensor without its bytes: they are as many, but one 0 that repeats itself."""
    return DenseTensor(
        name=name,
        dtype=tensor.dtype.as_datatype_enum,
        shape=tuple(tensor.shape),
        data=np.broadcast_to(np.uint8(0), (_size(tensor),)),
        can_be_cut=tensor.dtype in _CUT,
        is_shared="device:CPU:" in tensor.backing_device,
        is_replicated=is_replicated,
    )
