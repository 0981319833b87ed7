"""Adds the number of seeds drawn by its shuffles to a dataset iterator's state.

A shuffle draws a seed for each pass over its input, from a generator shared by all
iterators of a dataset. TensorFlow saves the generator's count with the shuffle's own
state. A shuffle has no state before its first read, nor after its last element was
taken, even if the element still waits in a batch or a prefetch above the shuffle. A
restored iterator then draws seeds of earlier passes again, and later epochs have
another order.

So every shuffle gets a *probe*: an iterator over the shuffle alone, never read. The
state of the probe holds the count at any time, and restoring a state with another count
sets the generator. The counts are appended to the iterator's state under names unknown
to TensorFlow, so TensorFlow restores such a state too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import private_api

_COUNT = b"epoch_num_random_samples"
_SEPARATOR = b"@@"  # in the metadata of an element: a prefix, then names of values
_PREFIX = b"tfpreempt::Shuffle"
SEEDS = "_tfpreempt_shuffle_seeds"
"""Attribute with the counts of drawn seeds, on an iterator and its first dataset."""

DRAWS_SEEDS = "_tfpreempt_draws_seeds"
"""Attribute of tfpreempt's datasets that draw a seed for each iterator."""


def parts(*datasets: Any) -> Iterator[Any]:
    """Yields datasets and, recursively, their input datasets."""
    for dataset in datasets:
        yield dataset
        yield from parts(*dataset._inputs())


def reshuffles(node: Any) -> bool:
    """Returns whether a dataset draws a new seed for every iterator over the
    dataset."""
    if hasattr(node, DRAWS_SEEDS):
        return True
    if isinstance(node, private_api.random_op._RandomDataset):
        return bool(node._rerandomize)
    is_shuffle = isinstance(node, private_api.shuffle_op._ShuffleDataset)
    return is_shuffle and node._reshuffle_each_iteration is not False


def seeds_of(*datasets: Any) -> ShuffleSeeds:
    """Returns the counts of the shuffles in datasets, stored on the first dataset."""
    first = datasets[0]
    if not hasattr(first, SEEDS):
        setattr(first, SEEDS, ShuffleSeeds(datasets))
    seeds: ShuffleSeeds = getattr(first, SEEDS)
    return seeds


class ShuffleSeeds:
    """The counts of the seeds drawn by the shuffles of datasets.

    Args:
        datasets: datasets with the shuffles.

    Attributes:
        probes: a probe for every shuffle with a new seed for each pass.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        nodes = {id(node): node for node in parts(*datasets) if reshuffles(node)}
        self.probes = [_Probe(node) for node in nodes.values()]
        self._held: list[Element] | None = None
        self._is_symbolic = any(
            each.options().experimental_symbolic_checkpoint for each in datasets
        )

    def add_to(self, serialize: Callable[[], Any]) -> Any:
        """Returns a state with the counts of the same moment appended.

        A thread of tf.data may begin the next pass between two reads; then state and
        counts are read again.

        Args:
            serialize: function that returns an iterator's state.
        """
        if self._held is not None:
            return self._with_counts(serialize(), self._held)
        before = self._read()
        while True:
            state = serialize()
            after = self._read()
            if [each.count for each in before] == [each.count for each in after]:
                return self._with_counts(state, after)
            before = after

    def hold(self) -> None:
        """Makes states hold the present counts until `release`, despite later draws."""
        if self._held is None:
            self._held = self._read()

    def release(self) -> None:
        """Makes states hold the counts at the moment of the save again."""
        self._held = None

    @property
    def resources(self) -> Sequence[Any]:
        """The probes' iterator resources, to be serialized inside a tf.function."""
        return [probe.resource for probe in self.probes]

    def join(self, state: Any, probe_states: Sequence[Any]) -> Any:
        """Appends the counts in serialized probes to a state of the same moment."""
        return self._with_counts(state, [_find(each)[1] for each in probe_states])

    def restore(self, state: Any) -> None:
        """Sets the counts from a state; does nothing for a state without counts."""
        if not self.probes:
            return
        found = [Element(each) for each in state[-len(self.probes) :]]
        if all(each.prefix.startswith(_PREFIX) for each in found):
            for probe, each in zip(self.probes, found, strict=True):
                probe.set(each.count)

    def _read(self) -> list[Element]:
        return [probe.read()[1] for probe in self.probes]

    def _with_counts(self, state: Any, elements: Sequence[Element]) -> Any:
        """Appends counts, except to a symbolic state with counts of its own.

        A symbolic state has the counts at the last taken element. A probe also counts
        the seeds of elements read ahead.
        """
        if self._is_symbolic and any(Element(each).has_count for each in state):
            return state
        return _appended(state, elements)


class _Probe:
    """A never-read iterator over one shuffle. Making a probe changes no count."""

    def __init__(self, node: Any) -> None:
        self._iterator = iter(node)
        _, before = self.read()
        self._iterator = iter(node)
        _, after = self.read()
        # both iterators draw equally many
        self.set(max(0, 2 * before.count - after.count))

    @property
    def resource(self) -> Any:
        return self._iterator._iterator_resource

    def read(self) -> tuple[int, Element]:
        """Returns the index of the element with the count in the probe's state, and the
        element."""
        return _find(self._state())

    def set(self, count: int) -> None:
        """Sets the count of the generator shared by the iterators of the shuffle."""
        state = self._state()
        index, element = _find(state)
        changed = _replaced(state, index, [element.with_count(count)])
        self._iterator._restore_from_tensors({"_STATE": changed})

    def _state(self) -> Any:
        return self._iterator._serialize_to_tensors()["_STATE"]


class Element:
    """An element of an iterator's state: some values by name.

    The format is defined in tensorflow/core/data/serialization_utils.cc: a
    VariantTensorDataProto whose metadata are a prefix and the names, and whose tensor
    is a CompressedElement.

    Args:
        variant: a scalar of a state.
    """

    def __init__(self, variant: Any) -> None:
        raw = tf.io.serialize_tensor(variant).numpy()
        self._outer = private_api.tensor_pb2.TensorProto.FromString(raw)
        content, start = self._outer.tensor_content, 1
        while content[start - 1] & 0x80:  # the length of the rest, a varint
            start += 1
        self._data = private_api.tensor_pb2.VariantTensorDataProto.FromString(
            content[start:]
        )
        self.prefix, *self.names = self._data.metadata.split(_SEPARATOR)

        counts = [i for i, name in enumerate(self.names) if name.endswith(_COUNT)]
        self._index = counts[0] if counts else -1

    def numbers(self, name: bytes, kind: bytes) -> list[int]:
        """Returns the value of a name, in a list; empty for an element of other
        iterators."""
        if not self.prefix.endswith(kind) or name not in self.names:
            return []
        return [int(self._values()[self.names.index(name)])]

    @property
    def has_count(self) -> bool:
        return self._index >= 0

    @property
    def count(self) -> int:
        return int(self._values()[self._index])

    def with_count(self, count: int) -> Any:
        """Returns the variant with another count."""
        values = list(self._values())
        values[self._index] = tf.constant(count, tf.int64)
        compressed = tf.raw_ops.CompressElement(components=values)
        self._data.tensors[0].ParseFromString(
            tf.io.serialize_tensor(compressed).numpy()
        )
        return self._variant()

    def named(self, prefix: bytes) -> Any:
        """Returns the variant under another prefix."""
        self._data.metadata = _SEPARATOR.join([prefix, *self.names])
        return self._variant()

    def _values(self) -> Sequence[Any]:
        [proto] = self._data.tensors
        metadata = proto.variant_val[0].metadata
        element = private_api.dataset_pb2.CompressedElement.FromString(metadata)
        kinds = [each.dtype for each in element.component_metadata]
        return tf.raw_ops.UncompressElement(  # type: ignore[no-any-return]
            compressed=tf.io.parse_tensor(proto.SerializeToString(), tf.variant),
            output_types=kinds,
            output_shapes=[[]] * len(kinds),
        )

    def _variant(self) -> Any:
        data = self._data.SerializeToString()
        length, rest = b"", len(data)
        while rest > 0x7F:
            length += bytes([rest & 0x7F | 0x80])
            rest >>= 7
        self._outer.tensor_content = length + bytes([rest]) + data
        return tf.io.parse_tensor(self._outer.SerializeToString(), tf.variant)


def _find(state: Any) -> tuple[int, Element]:
    """Returns the index of the element with the count in a probe's state, and the
    element."""
    # Among the first elements; the slots of the shuffle's buffer follow.
    for index in range(len(state)):
        element = Element(state[index])
        if element.has_count:
            return index, element
    raise AssertionError("a shuffle's state has no count")


def _appended(state: Any, elements: Sequence[Element]) -> Any:
    """Returns a state with the counts of shuffles behind its elements."""
    if not elements:
        return state
    counts = [
        each.named(b"%s::%d" % (_PREFIX, number))
        for number, each in enumerate(elements)
    ]
    return _replaced(state, len(state), counts)


def _replaced(state: Any, start: int, elements: Sequence[Any]) -> Any:
    """Returns a state with other elements from an index on; the index may be the
    end."""
    # Among the ops for joining tensors, dynamic_stitch accepts variants.
    indices = [tf.range(len(state)), tf.range(start, start + len(elements))]
    return tf.dynamic_stitch(indices, [state, tf.stack(elements)])
