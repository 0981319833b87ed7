"""A distributed iterator whose position can be saved.

TensorFlow's own `DistributedIterator` reads ahead in the background and copies to the
devices, and nobody can ask it how far training has come. This one draws each batch from
an ordinary host iterator when a step asks for it, one element for each local replica in
the same order, so that the host iterator's state is the position of training. What is
given up is the copy to the devices ahead of the step; reading and preprocessing ahead
(`prefetch`) go on as before, and `model.fit` on one device never had more.

An iterator is a composite tensor, taken apart and put together by its type spec when a
tf.function receives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfpreempt.core import seams
from tfpreempt.keras.data.replica_slices import replica_slices

seams.require("distributed_fit")
_lib: Any = seams.input_lib
_Distributed: Any = _lib.DistributedIterator
_DistributedSpec: Any = _lib.DistributedIteratorSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """One worker's host iterator; gives one element for each of its replicas."""

    iterator: Any
    replicas: int

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        return [self.iterator.get_next() for _ in range(self.replicas)]

    def get_next_as_optional_list(self) -> list[Any]:
        return [self.iterator.get_next_as_optional() for _ in range(self.replicas)]


class HostIterator(_Distributed):  # type: ignore[misc]  # TensorFlow is untyped
    """A `tf.distribute.DistributedIterator` over host iterators; its spec makes it."""

    _type_spec: Any = None

    def host_iterators(self) -> Iterator[tuple[Any, int]]:
        """Each with the number of elements that it gives to one step."""
        for worker in self._iterators:
            yield worker.iterator, worker.replicas


class _HostIteratorSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    """Its components are the ordinary tf.data iterators, one for each worker."""

    @property
    def _component_specs(self) -> list[Any]:
        each_worker = super()._component_specs
        return [tf.data.IteratorSpec(worker._element_spec) for worker in each_worker]

    def _to_components(self, value: Any) -> list[Any]:
        return [worker.iterator for worker in value._iterators]

    def _from_components(self, components: Any) -> HostIterator:
        workers = self._input_workers
        feeds = map(workers.compute_devices_for_worker, range(workers.num_workers))
        components = [
            _Worker(iterator=one, replicas=len(devices))
            for one, devices in zip(components, feeds, strict=True)
        ]
        iterator = HostIterator(
            input_workers=workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
            replica_order=self._replica_order,
        )
        iterator._type_spec = self
        return iterator


def distribute(dataset: Any) -> HostIterator:
    """An iterator over a distributed dataset.

    Args:
        dataset: what `strategy.experimental_distribute_dataset` or
            `distribute_datasets_from_function` returned.
    """
    workers = dataset._input_workers
    parts = getattr(dataset, "_cloned_datasets", None) or dataset._datasets
    if (slices := replica_slices(dataset)) is not None:
        parts = [slices]
    iterators = []
    for device, part in zip(workers.worker_devices, parts, strict=True):
        with tf.device(device):
            iterators.append(iter(part))
    spec = _HostIteratorSpec(
        workers,
        dataset._element_spec,
        dataset._strategy,
        options=None,
        cardinality=dataset._cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        replica_order=dataset._replica_order,
    )
    return spec._from_components(iterators)
