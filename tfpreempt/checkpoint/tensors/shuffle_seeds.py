"""Adds to a dataset iterator's state how many seeds its shuffles have drawn, and the
content of caches behind shuffles.

A shuffle draws a seed for each pass over its input, from a generator shared by all
iterators of a dataset. TensorFlow saves the number of drawn seeds with the shuffle's
own state. But a shuffle has no state before its first read, nor after its last element
was taken, even if the element still waits in a later batch or prefetch. A restored
iterator then draws the seeds of earlier passes again, and later epochs have a different
order.

So every shuffle gets a *probe*: a second iterator over the shuffle alone, never read.
The state of the probe contains the number of drawn seeds at any time. To set the number
in the generator, the probe is restored from a state with another number. The numbers
("counts") are appended to the iterator's state under names unknown to TensorFlow, so
TensorFlow can restore such a state too.

A cache in memory keeps the order of a shuffle before the cache. TensorFlow saves the
content of the cache with the iterator that reads the cache, but an iterator with a
shuffle behind the cache has no such iterator before its first read, nor after its end.
So the content of a complete cache is appended in the same way, and a restart does not
fill the cache in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import private_api

_COUNT = b"epoch_num_random_samples"
_SEPARATOR = b"@@"  # separates prefix and value names in the metadata of an element
_PREFIX = b"tfpreempt::Shuffle"
_CACHE_PREFIX = b"tfpreempt::Cache"
_CACHED = b"cache_completed"
SEEDS = "_tfpreempt_shuffle_seeds"
"""Attribute of an iterator, and of its first dataset: the `ShuffleSeeds`."""

DRAWS_SEEDS = "_tfpreempt_draws_seeds"
"""Attribute that marks a dataset of tfpreempt as drawing a seed for each iterator."""


def parts(*datasets: Any) -> Iterator[Any]:
    """Yields datasets and, recursively, their input datasets."""
    for dataset in datasets:
        yield dataset
        yield from parts(*dataset._inputs())


def reshuffles(node: Any) -> bool:
    """Returns whether every new iterator over a dataset draws a new seed."""
    if hasattr(node, DRAWS_SEEDS):
        return True
    if isinstance(node, private_api.random_op._RandomDataset):
        return bool(node._rerandomize)
    is_shuffle = isinstance(node, private_api.shuffle_op._ShuffleDataset)
    return is_shuffle and node._reshuffle_each_iteration is not False


def is_memory_cache(node: Any) -> bool:
    """Returns whether a dataset is a cache in memory."""
    return type(node).__name__ == "CacheDataset" and not node._filename.numpy()


def is_ordered_cache(node: Any) -> bool:
    """Returns whether a dataset is a cache in memory that keeps the order in which a
    shuffle has given the elements."""
    return is_memory_cache(node) and any(map(reshuffles, parts(node)))


def seeds_of(*datasets: Any) -> ShuffleSeeds:
    """Returns the `ShuffleSeeds` of an iterator's datasets. The first call creates the
    object and stores the object in the first dataset."""
    first = datasets[0]
    if not hasattr(first, SEEDS):
        setattr(first, SEEDS, ShuffleSeeds(datasets))
    seeds: ShuffleSeeds = getattr(first, SEEDS)
    return seeds


class ShuffleSeeds:
    """Reads and sets the counts of some datasets: for every shuffle, the number of
    seeds drawn so far. Also reads and fills the caches behind these shuffles.

    Args:
        datasets: datasets with the shuffles.

    Attributes:
        probes: a `_Probe` for every shuffle that draws a seed for each pass over its
            input.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        nodes = {id(node): node for node in parts(*datasets) if reshuffles(node)}
        self.probes = [_Probe(node) for node in nodes.values()]
        caches = {id(node): node for node in filter(is_ordered_cache, parts(*datasets))}
        counts = self._read() if caches else []
        self._caches = [_Cache(node) for node in caches.values()]
        # Undo the draws of the new iterators.
        for probe, each in zip(self.probes, counts, strict=False):
            probe.set(each.count)
        self._held: list[Element] | None = None
        self._is_symbolic = any(
            each.options().experimental_symbolic_checkpoint for each in datasets
        )

    def add_to(self, serialize: Callable[[], Any]) -> Any:
        """Returns an iterator's state, with the counts of the same moment appended, or,
        after `hold`, the frozen counts.

        A thread of tf.data may begin the next pass while the state is read. State and
        counts are then read again.

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
        """Freezes the counts: until `release`, saved states contain the present counts,
        despite later draws."""
        if self._held is None:
            self._held = self._read()

    def release(self) -> None:
        """Ends `hold`: states contain the counts at the moment of the save again."""
        self._held = None

    @property
    def resources(self) -> Sequence[Any]:
        """TensorFlow's resources of the probes, the iterators from which the numbers of
        drawn seeds are read. A tf.function serializes the probes by these resources,
        and `join` takes the serialized states."""
        return [probe.resource for probe in self.probes]

    def join(self, state: Any, probe_states: Sequence[Any]) -> Any:
        """Appends the content of the caches and the numbers of drawn seeds to an
        iterator's state.

        Returns the new state.

        Args:
            state: state of an iterator.
            probe_states: serialized states of the probes, in the order of `resources`,
                from the same moment as `state`.
        """
        return self._with_counts(state, [_find(each)[1] for each in probe_states])

    def restore(self, state: Any) -> None:
        """Fills the caches of which a saved state has the content, and sets the number
        of drawn seeds of every shuffle. A state without these numbers changes nothing.
        """
        if not self.probes:
            return
        added = len(self.probes) + len(self._caches)
        last = [Element(each) for each in tf.unstack(state[-added:])]
        # The caches first: an iterator over a cache that is not complete draws seeds.
        contents = {each.prefix: each for each in last}
        for number, cache in enumerate(self._caches):
            content = contents.get(b"%s::%d" % (_CACHE_PREFIX, number))
            if content is not None:
                cache.fill(content.held)
        found = last[-len(self.probes) :]
        if all(each.prefix.startswith(_PREFIX) for each in found):
            for probe, each in zip(self.probes, found, strict=True):
                probe.set(each.count)

    def is_filled(self, node: Any) -> bool:
        """Returns whether a dataset is a complete cache in memory behind a shuffle."""
        return any(each.node is node and each.is_complete for each in self._caches)

    def _read(self) -> list[Element]:
        return [probe.read()[1] for probe in self.probes]

    def _with_counts(self, state: Any, elements: Sequence[Element]) -> Any:
        """Returns an iterator's state with the content of the caches and the numbers of
        drawn seeds appended.

        A symbolic state (`experimental_symbolic_checkpoint`) in which TensorFlow has
        saved such numbers is returned unchanged: TensorFlow's numbers belong to the
        last element that the program has taken, whereas the numbers in `elements` also
        count the seeds of elements that were only read ahead.

        Args:
            state: the iterator's state.
            elements: for each shuffle, an element with the number of drawn seeds.
        """
        is_known = self._is_symbolic and any(Element(each).has_count for each in state)
        if is_known or not elements:
            return state
        counts = [
            each.named(b"%s::%d" % (_PREFIX, number))
            for number, each in enumerate(elements)
        ]
        contents = [
            Element(counts[0]).holding(b"%s::%d" % (_CACHE_PREFIX, number), content)
            for number, cache in enumerate(self._caches)
            if (content := cache.read()) is not None
        ]
        return _replaced(state, len(state), [*contents, *counts])


class _Probe:
    """An iterator over a single shuffle, used only to get and set the count (the number
    of drawn seeds). The program never reads from a probe. The creation of a probe
    leaves the count unchanged."""

    def __init__(self, node: Any) -> None:
        self._iterator = iter(node)
        _, before = self.read()
        self._iterator = iter(node)
        _, after = self.read()
        # Restore the count from before the two iterators. Each iterator has drawn the
        # same number of seeds, so this count is before - (after - before).
        self.set(max(0, 2 * before.count - after.count))

    @property
    def resource(self) -> Any:
        return self._iterator._iterator_resource

    def read(self) -> tuple[int, Element]:
        """Finds the element of the probe's state that contains the count. Returns the
        index of the element, and the element."""
        return _find(self._state())

    def set(self, count: int) -> None:
        """Sets the number of drawn seeds in the generator, which all iterators of the
        shuffle share."""
        state = self._state()
        index, element = _find(state)
        changed = _replaced(state, index, [element.with_count(count)])
        self._iterator._restore_from_tensors({"_STATE": changed})

    def _state(self) -> Any:
        return _serialized(self._iterator)


class _Cache:
    """Reads and fills a cache in memory, which all iterators of a dataset share.

    Attributes:
        node: the dataset of the cache.
    """

    def __init__(self, node: Any) -> None:
        self.node, self._iterator = node, iter(node)
        self._is_reader = False

    @property
    def is_complete(self) -> bool:
        """Whether the cache has all elements."""
        if self._is_reader:
            return True
        state = tf.unstack(_serialized(self._iterator))
        return any(_CACHED in Element(each).names for each in state)

    def read(self) -> Any:
        """Returns the content of the cache: the serialized elements of the state of an
        iterator, as a tensor of strings. None if the cache is not complete."""
        if not self.is_complete:
            return None
        if not self._is_reader:
            # TensorFlow cannot restore the state of an iterator that was made to fill
            # the cache. A new iterator reads from the cache, and draws no seed.
            self._iterator, self._is_reader = iter(self.node), True
        state = tf.unstack(_serialized(self._iterator))
        return tf.stack([tf.io.serialize_tensor(each) for each in state])

    def fill(self, content: Any) -> None:
        """Fills the cache.

        Args:
            content: the result of `read`.
        """
        state = [tf.io.parse_tensor(each, tf.variant) for each in tf.unstack(content)]
        iter(self.node)._restore_from_tensors({"_STATE": tf.stack(state)})


class Element:
    """One element of an iterator's state: a prefix, and some named values.

    The format is defined in tensorflow/core/data/serialization_utils.cc: a
    VariantTensorDataProto. The metadata are the prefix and the names; the tensor is a
    CompressedElement with the values.

    Args:
        variant: one scalar of an iterator's state, a tf.variant tensor.
    """

    def __init__(self, variant: Any) -> None:
        raw = tf.io.serialize_tensor(variant).numpy()
        self._outer = private_api.tensor_pb2.TensorProto.FromString(raw)
        content, start = self._outer.tensor_content, 1
        while content[start - 1] & 0x80:  # skip the length of the proto, a varint
            start += 1
        self._data = private_api.tensor_pb2.VariantTensorDataProto.FromString(
            content[start:]
        )
        self.prefix, *self.names = self._data.metadata.split(_SEPARATOR)

        counts = [i for i, name in enumerate(self.names) if name.endswith(_COUNT)]
        self._index = counts[0] if counts else -1

    def numbers(self, name: bytes, kind: bytes) -> list[int]:
        """Returns a list with the value of a name; an empty list if the element has no
        such value.

        Args:
            name: name of the value.
            kind: end of the prefix of an element that can have the value.
        """
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
        """Returns the element as a tf.variant tensor in which the number of drawn seeds
        is `count`."""
        values = list(self._values())
        values[self._index] = tf.constant(count, tf.int64)
        self._compress(values)
        return self._variant()

    def named(self, prefix: bytes) -> Any:
        """Returns the element as a tf.variant tensor in which `prefix` replaces the
        prefix given by TensorFlow."""
        self._data.metadata = _SEPARATOR.join([prefix, *self.names])
        return self._variant()

    def holding(self, prefix: bytes, value: Any) -> Any:
        """Returns an element with another prefix and a tensor as its only value, as a
        tf.variant tensor. `held` returns the value of such an element."""
        self._compress([value])
        self.names = [b"value"]
        return self.named(prefix)

    @property
    def held(self) -> Any:
        [value] = self._values()
        return value

    def _compress(self, values: Sequence[Any]) -> None:
        """Replaces the values of the element."""
        compressed = tf.raw_ops.CompressElement(components=values)
        self._data.tensors[0].ParseFromString(
            tf.io.serialize_tensor(compressed).numpy()
        )

    def _values(self) -> Sequence[Any]:
        [proto] = self._data.tensors
        metadata = proto.variant_val[0].metadata
        element = private_api.dataset_pb2.CompressedElement.FromString(metadata)
        kinds = [each.dtype for each in element.component_metadata]
        return tf.raw_ops.UncompressElement(  # type: ignore[no-any-return]
            compressed=tf.io.parse_tensor(proto.SerializeToString(), tf.variant),
            output_types=kinds,
            output_shapes=[None] * len(kinds),
        )

    def _variant(self) -> Any:
        data = self._data.SerializeToString()
        length, rest = b"", len(data)
        while rest > 0x7F:
            length += bytes([rest & 0x7F | 0x80])
            rest >>= 7
        self._outer.tensor_content = length + bytes([rest]) + data
        return tf.io.parse_tensor(self._outer.SerializeToString(), tf.variant)


def _serialized(iterator: Any) -> Any:
    return iterator._serialize_to_tensors()["_STATE"]


def _find(state: Any) -> tuple[int, Element]:
    """Finds the element of a probe's state that contains the number of drawn seeds.
    Returns the index of the element, and the element."""
    # The loop is short: the element comes before the slots of the shuffle's buffer.
    for index in range(len(state)):
        element = Element(state[index])
        if element.has_count:
            return index, element
    raise AssertionError("a shuffle's state has no count")


def _replaced(state: Any, start: int, elements: Sequence[Any]) -> Any:
    """Returns a state in which `elements` replace the elements from index `start` on.
    If `start` is the end of the state, `elements` are appended."""
    # Use dynamic_stitch: unlike other ops that join tensors, it accepts variants.
    indices = [tf.range(len(state)), tf.range(start, start + len(elements))]
    return tf.dynamic_stitch(indices, [state, tf.stack(elements)])
