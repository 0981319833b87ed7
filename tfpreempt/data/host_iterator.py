"""A distributed iterator whose position can be saved.

TensorFlow's own `DistributedIterator` reads ahead in the background, and has no method
that returns the position of training. The iterator here reads each batch from an
ordinary host iterator when a step needs the batch, in the same order. So the host
iterator's state is the position of training; tf.data accounts for the host iterator's
own read-ahead (`prefetch`) in that state. For slices of global batches that are copied
to the devices ahead, the state comes with the slices (`read_ahead`).

An iterator is a composite tensor: its type spec takes the iterator apart and puts the
parts together again when a tf.function receives the iterator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import private_api
from tfpreempt.data.read_ahead import AheadIterator, PrefetchedSlices
from tfpreempt.data.slices import BatchSplit, batch_size, check_shares, global_batches

private_api.check_available("distributed_data")
_lib: Any = private_api.input_lib
_Distributed: Any = _lib.DistributedIterator
_DistributedSpec: Any = _lib.DistributedIteratorSpec
_base: Any = private_api.trackable_base
_Trackable: Any = _base.Trackable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PerReplica:
    """A worker's host iterator, with one element per replica."""

    iterator: Any
    draws: int  # number of elements for a step: the number of replicas

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        return [self.iterator.get_next() for _ in range(self.draws)]

    def get_next_as_optional_list(self) -> list[Any]:
        return [self.iterator.get_next_as_optional() for _ in range(self.draws)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GlobalBatch:
    """A worker's host iterator of global batches; each replica gets a slice."""

    iterator: Any
    device: str  # device of the host
    cut: BatchSplit
    spec: Any  # spec of a slice

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        whole = self.iterator.get_next()
        return [self.cut.slice_of(number, whole) for number in self._numbers]

    def get_next_as_optional_list(self) -> list[Any]:
        whole = self.iterator.get_next_as_optional()
        return [_OptionalSlice(whole, n, self, self.spec) for n in self._numbers]

    @property
    def _numbers(self) -> range:
        return range(len(self.cut.local))


@dataclasses.dataclass(frozen=True, slots=True)
class _OptionalSlice:
    """A replica's part of an Optional batch, with the interface of Optional."""

    whole: Any
    number: int
    worker: _GlobalBatch
    element_spec: Any

    def has_value(self) -> Any:
        return self.whole.has_value()

    def get_value(self) -> Any:
        # The caller is on the replica's device, which gets the slice only.
        with tf.device(self.worker.device):
            return self.worker.cut.slice_of(self.number, self.whole.get_value())


class HostIterator(_Distributed, _Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """A `tf.distribute.DistributedIterator` that a `tf.train.Checkpoint` can save.

    The type spec makes the iterator. A checkpoint contains the host iterators.

    Args:
        spec: the type spec.
        workers: the sources of the replicas' batches, in the order of the workers.

    Attributes:
        host_iterators: the ordinary iterators whose states are the position.
        is_shared: whether the position counts global batches: then the position is
            equal on every worker, for any number of workers.
    """

    _type_spec: Any = None

    def __init__(self, spec: Any, workers: Sequence[Any]) -> None:
        super().__init__(
            input_workers=spec._input_workers,
            components=workers,
            element_spec=spec._element_spec,
            strategy=spec._strategy,
            cardinality=spec._cardinality,
            enable_get_next_as_optional=spec._enable_get_next_as_optional,
            options=spec._options,
            replica_order=spec._replica_order,
        )
        self._type_spec = spec
        self.host_iterators = [worker.iterator for worker in workers]
        self.is_shared = isinstance(spec, _GlobalBatchSpec)
        replicas = self._strategy.num_replicas_in_sync
        for number, iterator in enumerate(self.host_iterators):
            # The name contains the kind of the position, so a position of another kind
            # is never restored.
            name = f"part_{number}_for_{replicas}_replicas"
            name = "global_batches" if self.is_shared else name
            self._track_trackable(iterator, name)

    def read_locally(self) -> None:
        """Reads the local part of a global batch and drops it; needs no other worker.

        Raises:
            StopIteration: the data have ended.
        """
        try:
            for worker in self._iterators:
                worker.get_next_as_list()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def check_shares(self) -> None:
        """Checks that the replicas have equal shares of a global batch.

        Raises:
            ConfigurationError: the shares differ, as far as the batch size is known.
        """
        size = batch_size(self.host_iterators[0]._dataset)
        if size is not None:
            check_shares(size, self._strategy.num_replicas_in_sync)


class _PerReplicaSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    """The type spec for replicas that draw their own batches.

    The components are the ordinary tf.data iterators, one for each worker.
    """

    @property
    def _component_specs(self) -> list[Any]:
        specs = super()._component_specs
        return [tf.data.IteratorSpec(spec._element_spec) for spec in specs]

    def _to_components(self, value: Any) -> list[Any]:
        return [*value.host_iterators]

    def _from_components(self, components: Any) -> HostIterator:
        workers = self._input_workers
        return HostIterator(
            self,
            [
                _PerReplica(
                    iterator=iterator,
                    draws=len(workers.compute_devices_for_worker(number)),
                )
                for number, iterator in enumerate(components)
            ],
        )


class _GlobalBatchSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    """The type spec for replicas that get slices of a global batch.

    The components belong to this process, which is a single worker.

    Attributes:
        cut: how global batches are cut. TensorFlow derives specs without this
            attribute.
    """

    cut: BatchSplit

    def _serialize(self) -> Any:
        return *super()._serialize(), dataclasses.astuple(self.cut)

    def is_subtype_of(self, other: Any) -> bool:
        is_one = super().is_subtype_of(other)  # also compares the classes
        return bool(is_one and self.cut.general([other.cut]) == other.cut)

    def most_specific_common_supertype(self, others: Any) -> Any:
        found = super().most_specific_common_supertype(others)
        if found is None:
            return None
        found.cut = self.cut.general([each.cut for each in others])
        return None if found.cut is None else found

    def _with_tensor_ranks_only(self) -> Any:
        derived = super()._with_tensor_ranks_only()
        return self._with_cut(derived, lambda spec: spec._with_tensor_ranks_only())

    def _without_tensor_names(self) -> Any:
        derived = super()._without_tensor_names()
        return self._with_cut(derived, lambda spec: spec._without_tensor_names())

    def _with_cut(self, derived: Any, less: Callable[[Any], Any]) -> Any:
        spec = tf.nest.map_structure(less, self.cut.spec)
        derived.cut = dataclasses.replace(self.cut, spec=spec)
        return derived

    @property
    def _component_specs(self) -> list[Any]:
        whole = tf.data.IteratorSpec(self.cut.spec)
        if not self.cut.is_ahead:
            return [whole]
        [one] = super()._component_specs
        marked = tf.data.IteratorSpec((one._element_spec, tf.TensorSpec([], tf.string)))
        slices = [marked] * len(self.cut.local)
        return [whole, *slices, tf.TensorSpec([], tf.resource)]

    def _to_components(self, value: Any) -> list[Any]:
        [worker] = value._iterators
        if not self.cut.is_ahead:
            return [worker.iterator]
        return [worker.iterator, *worker.slices, worker.position]

    def _from_components(self, components: Any) -> HostIterator:
        [one] = super()._component_specs
        spec, workers = one._element_spec, self._input_workers
        worker: Any
        if not self.cut.is_ahead:
            [iterator], [host] = components, workers.worker_devices
            worker = _GlobalBatch(
                iterator=iterator, device=host, cut=self.cut, spec=spec
            )
        else:
            iterator, *slices, position = components
            worker = PrefetchedSlices(
                iterator=iterator,
                slices=slices,
                position=position,
                devices=workers.compute_devices_for_worker(0),
                spec=spec,
            )
        return HostIterator(self, [worker])


def host_iterator(dataset: Any) -> HostIterator:
    """Returns an iterator over a distributed dataset.

    Args:
        dataset: result of `strategy.experimental_distribute_dataset` or
            `distribute_datasets_from_function`.
    """
    shared, workers = global_batches(dataset), dataset._input_workers
    spec: Any = (_PerReplicaSpec if shared is None else _GlobalBatchSpec)(
        workers,
        dataset._element_spec,
        dataset._strategy,
        options=None,
        cardinality=dataset._cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        replica_order=dataset._replica_order,
    )
    if shared is not None:
        whole, spec.cut = shared
        parts = [whole]
    else:
        parts = getattr(dataset, "_cloned_datasets", None) or dataset._datasets
    components: list[Any] = []
    for device, part in zip(workers.worker_devices, parts, strict=True):
        with tf.device(device):
            if shared is not None and spec.cut.is_ahead:
                devices = workers.compute_devices_for_worker(0)
                ahead = AheadIterator(part, spec.cut, devices)
                components += ahead, *ahead.slices, ahead.position.handle
            else:
                components.append(iter(part))
    made: HostIterator = spec._from_components(components)
    return made
