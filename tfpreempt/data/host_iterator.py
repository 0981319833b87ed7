"""A distributed iterator whose place can be saved.

TensorFlow's own `DistributedIterator` reads ahead in the background, and nobody can ask
it how far training has come. This one draws each batch from an ordinary host iterator
when a step asks for it, in the same order, so that the host iterator's state is the
place of training; what that reads ahead itself (`prefetch`) is accounted for in its
state by tf.data. Where slices of global batches are copied to the devices ahead, the
state comes with the slices (`read_ahead`).

An iterator is a composite tensor, taken apart and put together by its type spec when a
tf.function receives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import seams
from tfpreempt.data.read_ahead import Ahead, AheadIterator
from tfpreempt.data.slices import Cut, batch_size, check_shares, global_batches

seams.require("distributed_data")
_lib: Any = seams.input_lib
_Distributed: Any = _lib.DistributedIterator
_DistributedSpec: Any = _lib.DistributedIteratorSpec
_base: Any = seams.trackable_base
_Trackable: Any = _base.Trackable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OneByOne:
    """One worker's host iterator; an element of it is for one replica."""

    iterator: Any
    draws: int  # for one step: the replicas

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        return [self.iterator.get_next() for _ in range(self.draws)]

    def get_next_as_optional_list(self) -> list[Any]:
        return [self.iterator.get_next_as_optional() for _ in range(self.draws)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """One worker's host iterator of global batches; each replica gets a slice."""

    iterator: Any
    device: str  # of the host
    cut: Cut
    spec: Any  # of a slice

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        whole = self.iterator.get_next()
        return [self.cut.slice_of(number, whole) for number in self._numbers]

    def get_next_as_optional_list(self) -> list[Any]:
        whole = self.iterator.get_next_as_optional()
        return [_Slice(whole, number, self, self.spec) for number in self._numbers]

    @property
    def _numbers(self) -> range:
        return range(len(self.cut.local))


@dataclasses.dataclass(frozen=True, slots=True)
class _Slice:
    """One replica's part of an Optional batch, as `tf.experimental.Optional` has it."""

    whole: Any
    number: int
    worker: _Together
    element_spec: Any

    def has_value(self) -> Any:
        return self.whole.has_value()

    def get_value(self) -> Any:
        # Whoever asks is on the replica's device, where only the slice is to go.
        with tf.device(self.worker.device):
            return self.worker.cut.slice_of(self.number, self.whole.get_value())


class HostIterator(_Distributed, _Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """A `tf.distribute.DistributedIterator` that a `tf.train.Checkpoint` can hold.

    Its spec makes it. What is saved of it are the host iterators below.
    """

    _type_spec: Any = None

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        for number, iterator in enumerate(self.host_iterators()):
            self._track_trackable(iterator, self._name_of_place(number))

    def _name_of_place(self, number: int) -> str:
        """Another one for each kind of place, so that none is taken for another."""
        if self.is_shared:
            return "global_batches"
        return f"part_{number}_for_{self._strategy.num_replicas_in_sync}_replicas"

    def host_iterators(self) -> Iterator[Any]:
        """Those whose states are its place."""
        return (worker.iterator for worker in self._iterators)

    def read_locally(self) -> None:
        """Reads the local part of one global batch and drops it; needs no other worker.

        Raises:
            StopIteration: there is none.
        """
        try:
            for worker in self._iterators:
                worker.get_next_as_list()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    @property
    def is_shared(self) -> bool:
        """Whether its place is that in the global batches: the same on all workers,
        however many there are."""
        return all(isinstance(worker, _Together | Ahead) for worker in self._iterators)

    def check_shares(self) -> None:
        """Sees whether the replicas have equal shares of a global batch.

        Raises:
            ConfigurationError: they have not, as far as that can be seen.
        """
        size = batch_size(self._iterators[0].iterator._dataset)
        if size is not None:
            check_shares(size, self._strategy.num_replicas_in_sync)


class _HostIteratorSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    """Its components are the ordinary tf.data iterators, one for each worker.

    Attributes:
        cut: how global batches are cut; None where a replica draws its own batch.
    """

    cut: Cut | None = None

    def _serialize(self) -> Any:
        cut = () if self.cut is None else dataclasses.astuple(self.cut)
        return *super()._serialize(), cut

    # TensorFlow makes these anew, without what it does not know.

    def is_subtype_of(self, other: Any) -> bool:
        is_one = super().is_subtype_of(other)
        return bool(is_one and self._general([other]) == other.cut)

    def most_specific_common_supertype(self, others: Any) -> Any:
        found = super().most_specific_common_supertype(others)
        if found is None or all(each.cut is None for each in (self, *others)):
            return found
        found.cut = self._general(others)
        return None if found.cut is None else found

    def _general(self, others: Sequence[_HostIteratorSpec]) -> Cut | None:
        """The cut for the batches of all; None if they are cut in different ways, or
        not at all."""
        cuts = [each.cut for each in others if each.cut is not None]
        if self.cut is None or len(cuts) < len(others):
            return None
        return self.cut.general(cuts)

    def _with_tensor_ranks_only(self) -> Any:
        return self._handed_to(
            super()._with_tensor_ranks_only(),
            lambda spec: spec._with_tensor_ranks_only(),
        )

    def _without_tensor_names(self) -> Any:
        return self._handed_to(
            super()._without_tensor_names(), lambda spec: spec._without_tensor_names()
        )

    def _handed_to(self, other: Any, less: Callable[[Any], Any]) -> Any:
        if self.cut is not None:
            spec = tf.nest.map_structure(less, self.cut.spec)
            other.cut = dataclasses.replace(self.cut, spec=spec)
        return other

    @property
    def _component_specs(self) -> list[Any]:
        each = [spec._element_spec for spec in super()._component_specs]
        if self.cut is None:
            return [*map(tf.data.IteratorSpec, each)]
        whole = tf.data.IteratorSpec(self.cut.spec)
        if not self.cut.is_ahead:
            return [whole]
        marked = tf.data.IteratorSpec((*each, tf.TensorSpec([], tf.string)))
        slices = [marked] * len(self.cut.local)
        return [whole, *slices, tf.TensorSpec([], tf.resource)]

    def _to_components(self, value: Any) -> list[Any]:
        if self.cut is None or not self.cut.is_ahead:
            return [*value.host_iterators()]
        [worker] = value._iterators
        return [worker.iterator, *worker.slices, worker.place]

    def _from_components(self, components: Any) -> HostIterator:
        iterator = HostIterator(
            input_workers=self._input_workers,
            components=self._workers(components),
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
            replica_order=self._replica_order,
        )
        iterator._type_spec = self
        return iterator

    def _workers(self, components: Sequence[Any]) -> list[Any]:
        workers = self._input_workers
        if self.cut is None:
            return [
                _OneByOne(
                    iterator=iterator,
                    draws=len(workers.compute_devices_for_worker(number)),
                )
                for number, iterator in enumerate(components)
            ]
        [one] = super()._component_specs
        spec = one._element_spec
        if not self.cut.is_ahead:
            [iterator], [host] = components, workers.worker_devices
            return [_Together(iterator=iterator, device=host, cut=self.cut, spec=spec)]
        iterator, *slices, place = components
        devices = workers.compute_devices_for_worker(0)
        return [
            Ahead(
                iterator=iterator,
                slices=slices,
                place=place,
                devices=devices,
                spec=spec,
            )
        ]


def host_iterator(dataset: Any) -> HostIterator:
    """An iterator over a distributed dataset.

    Args:
        dataset: what `strategy.experimental_distribute_dataset` or
            `distribute_datasets_from_function` returned.
    """
    shared = global_batches(dataset)
    if shared is not None:
        whole, cut = shared
        parts = [whole]
    else:
        cut = None
        parts = getattr(dataset, "_cloned_datasets", None) or dataset._datasets
    workers = dataset._input_workers
    components: list[Any] = []
    for device, part in zip(workers.worker_devices, parts, strict=True):
        with tf.device(device):
            if cut is not None and cut.is_ahead:
                ahead = AheadIterator(part, cut, workers.compute_devices_for_worker(0))
                components += ahead, *ahead.slices, ahead.place.handle
            else:
                components.append(iter(part))
    spec = _HostIteratorSpec(
        workers,
        dataset._element_spec,
        dataset._strategy,
        options=None,
        cardinality=dataset._cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        replica_order=dataset._replica_order,
    )
    spec.cut = cut
    return spec._from_components(components)
