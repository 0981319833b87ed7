"""A distributed iterator whose position can be saved.

TensorFlow's own `DistributedIterator` reads ahead in the background and copies to the
devices, and nobody can ask it how far training has come. This one draws each batch from
an ordinary host iterator when a step asks for it, one element for each local replica in
the same order, so that the host iterator's state is the position of training. What is
given up is the copy to the devices ahead of the step; reading and preprocessing ahead
(`prefetch`) go on as before, and `model.fit` on one device never had more.

The classes are those of `input_lib` but for that: an iterator is a composite tensor,
taken apart and put together by its type spec when a tf.function receives it. Imported
only where a dataset is distributed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfpreempt import seams
from tfpreempt.keras.data.replica_slices import replica_slices

_OPTIONS = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)
"""With these, TensorFlow's classes make plain iterators, not prefetching ones."""

_PARTS = operator.attrgetter(
    *("_worker", "_devices", "_element_spec", "_options", "_canonicalize_devices")
)
"""What a type spec of one worker's iterator is made of, of that or of another."""

seams.require("distributed_fit")
_lib: Any = seams.input_lib
_OwnedIterator: Any = _lib._SingleWorkerOwnedDatasetIterator
_OwnedIteratorSpec: Any = _lib._SingleWorkerDatasetIteratorSpec
_Distributed: Any = _lib.DistributedIterator
_DistributedSpec: Any = _lib.DistributedIteratorSpec


class _WorkerIterator(_OwnedIterator):  # type: ignore[misc]  # TensorFlow is untyped
    """One worker's host iterator; gives one element for each of its devices."""

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        with tf.device(self._worker):
            return [self._iterator.get_next() for _ in self._devices]

    def get_next_as_optional_list(self) -> list[Any]:
        with tf.device(self._worker):
            return [self._iterator.get_next_as_optional() for _ in self._devices]

    @property
    def _type_spec(self) -> Any:
        return _WorkerIteratorSpec.from_value(self)


class _WorkerIteratorSpec(_OwnedIteratorSpec):  # type: ignore[misc]  # TensorFlow is untyped
    @property
    def value_type(self) -> type:
        return _WorkerIterator

    def _from_components(self, components: Any) -> Any:
        return _WorkerIterator(
            worker=self._worker,
            devices=self._devices,
            components=components,
            element_spec=self._element_spec,
            options=self._options,
            canonicalize_devices=self._canonicalize_devices,
        )

    @staticmethod
    def from_value(value: Any) -> Any:
        return _WorkerIteratorSpec(*_PARTS(value))


class HostIterator(_Distributed):  # type: ignore[misc]  # TensorFlow is untyped
    """A `tf.distribute.DistributedIterator` over host iterators."""

    def host_iterators(self) -> Iterator[tuple[Any, int]]:
        """Each with the number of elements that it gives to one step."""
        for worker in self._iterators:
            yield worker._iterator, len(worker._devices)

    @property
    def _type_spec(self) -> Any:
        return _HostIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
            self._replica_order,
        )


class _HostIteratorSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    @property
    def value_type(self) -> type:
        return HostIterator

    @property
    def _component_specs(self) -> list[Any]:
        return [
            _WorkerIteratorSpec.from_value(each) for each in super()._component_specs
        ]

    def _from_components(self, components: Any) -> Any:
        return HostIterator(
            input_workers=self._input_workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
            replica_order=self._replica_order,
        )


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
    for index, worker in enumerate(workers.worker_devices):
        with tf.device(worker):
            iterators.append(
                _WorkerIterator(
                    dataset=parts[index],
                    worker=worker,
                    devices=workers.compute_devices_for_worker(index),
                    options=_OPTIONS,
                    canonicalize_devices=getattr(
                        dataset._strategy, "_canonicalize_devices", True
                    ),
                )
            )
    iterator = HostIterator(
        workers,
        iterators,
        dataset._strategy,
        cardinality=dataset._cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        options=_OPTIONS,
        replica_order=dataset._replica_order,
    )
    iterator._element_spec = dataset._element_spec
    return iterator
