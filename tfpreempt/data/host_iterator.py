"""A distributed iterator whose place can be saved.

TensorFlow's own `DistributedIterator` reads ahead in the background, and nobody can ask
it how far training has come. This one draws each batch from an ordinary host iterator
when a step asks for it, in the same order, so that the host iterator's state is the
place of training; what that reads ahead itself (`prefetch`) is accounted for in its
state by tf.data.

An iterator is a composite tensor, taken apart and put together by its type spec when a
tf.function receives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfpreempt.core import seams
from tfpreempt.data.slices import sliced

seams.require("distributed_data")
_lib: Any = seams.input_lib
_Distributed: Any = _lib.DistributedIterator
_DistributedSpec: Any = _lib.DistributedIteratorSpec
_Trackable: Any = seams.trackable_base.Trackable


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
    """One worker's host iterator; an element of it has a slice for each replica."""

    iterator: Any
    draws: int = 1

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        del name
        return list(self.iterator.get_next())

    def get_next_as_optional_list(self) -> list[Any]:
        found = self.iterator.get_next_as_optional()
        return [_Slice(found, i) for i in range(len(found.element_spec))]


@dataclasses.dataclass(frozen=True, slots=True)
class _Slice:
    """The part of an Optional that is for one replica, as `tf.experimental.Optional`
    has it."""

    whole: Any
    number: int

    @property
    def element_spec(self) -> Any:
        return self.whole.element_spec[self.number]

    def has_value(self) -> Any:
        return self.whole.has_value()

    def get_value(self) -> Any:
        return self.whole.get_value()[self.number]


class HostIterator(_Distributed, _Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """A `tf.distribute.DistributedIterator` that a `tf.train.Checkpoint` can hold.

    Its spec makes it. What is saved of it are the host iterators below.
    """

    _type_spec: Any = None

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        for number, (iterator, _) in enumerate(self.host_iterators()):
            self._track_trackable(iterator, f"host_{number}")

    def host_iterators(self) -> Iterator[tuple[Any, int]]:
        """Each with the number of elements that one step draws from it."""
        for worker in self._iterators:
            yield worker.iterator, worker.draws


class _HostIteratorSpec(_DistributedSpec):  # type: ignore[misc]  # TensorFlow is untyped
    """Its components are the ordinary tf.data iterators, one for each worker."""

    def _host_specs(self) -> Iterator[tuple[Any, int]]:
        """For each worker the spec of one replica's element, and its replicas."""
        workers = self._input_workers
        for number, spec in enumerate(super()._component_specs):
            devices = workers.compute_devices_for_worker(number)
            yield spec._element_spec, len(devices)

    def _to_components(self, value: Any) -> list[Any]:
        return [iterator for iterator, _ in value.host_iterators()]

    def _made_of(self, components: list[Any]) -> HostIterator:
        iterator = HostIterator(
            input_workers=self._input_workers,
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


class _OneByOneSpec(_HostIteratorSpec):
    @property
    def _component_specs(self) -> list[Any]:
        return [tf.data.IteratorSpec(spec) for spec, _ in self._host_specs()]

    def _from_components(self, components: Any) -> HostIterator:
        each = zip(components, self._host_specs(), strict=True)
        return self._made_of(
            [_OneByOne(iterator=one, draws=replicas) for one, (_, replicas) in each]
        )


class _TogetherSpec(_HostIteratorSpec):
    @property
    def _component_specs(self) -> list[Any]:
        return [
            tf.data.IteratorSpec((spec,) * replicas)
            for spec, replicas in self._host_specs()
        ]

    def _from_components(self, components: Any) -> HostIterator:
        return self._made_of([_Together(iterator=one) for one in components])


def host_iterator(dataset: Any) -> HostIterator:
    """An iterator over a distributed dataset.

    Args:
        dataset: what `strategy.experimental_distribute_dataset` or
            `distribute_datasets_from_function` returned.
    """
    workers = dataset._input_workers
    whole = sliced(dataset)
    kind = _OneByOneSpec if whole is None else _TogetherSpec
    if whole is not None:
        parts = [whole]
    else:
        parts = getattr(dataset, "_cloned_datasets", None) or dataset._datasets
    iterators = []
    for device, part in zip(workers.worker_devices, parts, strict=True):
        with tf.device(device):
            iterators.append(iter(part))
    spec = kind(
        workers,
        dataset._element_spec,
        dataset._strategy,
        options=None,
        cardinality=dataset._cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        replica_order=dataset._replica_order,
    )
    return spec._from_components(iterators)
