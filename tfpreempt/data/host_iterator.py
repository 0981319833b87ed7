"""A distributed iterator whose position can be saved.

TensorFlow's `DistributedIterator` reads ahead in the background, so its state is not
the position of training. `HostIterator` reads a batch only when a step needs the batch,
from an ordinary tf.data iterator on the host (the host iterator). So the state of the
host iterator is the position of training. The state includes batches that `prefetch`
in the pipeline has read ahead. If batches are copied to the devices before a step needs
them, the state travels with the batches (see `read_ahead`).

An iterator is a composite tensor (a Python object that consists of tensors). When a
program passes an iterator to a tf.function, the iterator's type spec decomposes the
iterator into tensors, and builds an equal iterator from the tensors.
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
    """A worker's source of batches, for a dataset with one element for each replica."""

    iterator: Any  # the host iterator
    draws: int  # number of elements needed for a step: one for every replica

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        return [self.iterator.get_next() for _ in range(self.draws)]

    def get_next_as_optional_list(self) -> list[Any]:
        return [self.iterator.get_next_as_optional() for _ in range(self.draws)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GlobalBatch:
    """A worker's source of batches, for a dataset of global batches.

    Every replica gets a slice of a global batch.
    """

    iterator: Any  # the host iterator, of global batches
    device: str  # device of the host
    cut: BatchSplit  # rule by which a global batch is cut
    spec: Any  # element spec of a slice

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
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
    """A replica's slice of a batch that may be absent; has the methods of Optional."""

    whole: Any
    number: int
    worker: _GlobalBatch
    element_spec: Any

    def has_value(self) -> Any:
        return self.whole.has_value()

    def get_value(self) -> Any:
        # Cut on the host, so that only the slice is copied to the replica's device.
        with tf.device(self.worker.device):
            return self.worker.cut.slice_of(self.number, self.whole.get_value())


class HostIterator(_Distributed, _Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """A `tf.distribute.DistributedIterator` that a `tf.train.Checkpoint` can save.

    Only a type spec creates such an object. A checkpoint contains the states of the
    host iterators.

    Args:
        spec: the type spec that creates the object.
        workers: for each worker, its source of batches: a `_PerReplica`, `_GlobalBatch`
            or `PrefetchedSlices`.

    Attributes:
        host_iterators: the tf.data iterators whose states are the position.
        is_shared: whether the position counts global batches. If True, the position is
            equal on every worker, and valid for any number of workers.
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
            # The name in the checkpoint contains the kind of the position, so that a
            # restore cannot mix up the kinds.
            name = f"part_{number}_for_{replicas}_replicas"
            name = "global_batches" if self.is_shared else name
            self._track_trackable(iterator, name)

    def read_locally(self) -> None:
        """Reads this worker's part of a global batch, and drops the part.

        Other workers need not read at the same time.

        Raises:
            StopIteration: the data have ended.
        """
        try:
            for worker in self._iterators:
                worker.get_next_as_list()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def check_shares(self) -> None:
        """Checks that all replicas get the same number of samples of a global batch.

        Raises:
            ConfigurationError: the numbers differ. Not raised if the batch size is
                unknown.
        """
        size = batch_size(self.host_iterators[0]._dataset)
        if size is not None:
            check_shares(size, self._strategy.num_replicas_in_sync)


class _PerReplicaSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    """The type spec of an iterator over a dataset with an element for every replica.

    The components (the tensors of the iterator) are the host iterators, one per worker.
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
    """The type spec of an iterator in which replicas get slices of a global batch.

    The process has a single worker. The components (the tensors of the iterator) are
    the host iterator and, if batches are copied to the devices before a step, an
    iterator for every device and the variable with the position.

    Attributes:
        cut: rule by which global batches are cut. TensorFlow's methods that derive a
            spec from this spec would lose the attribute, so the class overrides them.
    """

    cut: BatchSplit

    def _serialize(self) -> Any:
        return *super()._serialize(), dataclasses.astuple(self.cut)

    def is_subtype_of(self, other: Any) -> bool:
        # The base class compares the classes and the specs.
        is_subtype = super().is_subtype_of(other)
        return bool(is_subtype and self.cut.general([other.cut]) == other.cut)

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
    """Returns a HostIterator over a distributed dataset.

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
