"""Copies global batches to the replicas' devices before a step needs them.

A thread of tf.data reads a global batch from the host iterator, and serializes the
state that the iterator has after the read. The thread cuts the batch into slices, and
copies every slice to a device, together with the state. The step that takes the slices
writes the state to a variable. So the variable always has the position of training,
however many batches are read ahead.

TensorFlow's MultiDeviceIterator makes the copies, because it raises an error of the
pipeline in the step that needs the batch, and knows which data types a device supports.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.tensors.iterator_state import add_seeds
from tfpreempt.checkpoint.tensors.shuffle_seeds import SEEDS, seeds_of
from tfpreempt.core import private_api
from tfpreempt.data.slices import BatchSplit

_ops: Any = private_api.gen_dataset_ops
_iterators: Any = private_api.iterator_ops
_Owned: Any = _iterators.OwnedIterator


class AheadIterator(_Owned):  # type: ignore[misc]  # TensorFlow is untyped
    """An iterator of global batches whose state is the position of training.

    Create the object under `tf.device` of the host.

    Args:
        dataset: dataset of global batches.
        cut: rule by which the global batches are cut.
        devices: devices of this process's replicas.

    Attributes:
        slices: for each device, an iterator of pairs (slice, position of training after
            the batch of the slice).
        position: variable to which a step writes the position.
    """

    def __init__(self, dataset: Any, cut: BatchSplit, devices: Sequence[str]) -> None:
        super().__init__(dataset)
        self._seeds = seeds_of(dataset)
        setattr(self, SEEDS, self._seeds)
        self._resources = [self._iterator_resource, *self._seeds.resources]
        # Do not use tf.Variable: in the scope of a strategy it would make a variable
        # for every replica.
        self.position = private_api.resource_variable_ops.ResourceVariable(
            _serialized(self._resources), trainable=False
        )
        self._marked = _marked_slices(self._resources, dataset.element_spec, cut)
        self._devices = tuple(devices)
        self._copier = self._new_copier()
        self.slices: list[Any] = self._copier._device_iterators

    def _new_copier(self) -> Any:
        """Returns a MultiDeviceIterator, which starts to read in the first step."""
        host = self._iterator_resource.device
        with tf.device(host):
            return private_api.multi_device_iterator_ops.OwnedMultiDeviceIterator(
                self._marked, self._devices, source_device=host
            )

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {"_STATE": self.state()}

    def state(self) -> Any:
        """Returns the position of training, including the seeds used for shuffles."""
        state, *probes = tf.unstack(tf.io.parse_tensor(self.position, tf.string))
        return self._seeds.join(
            tf.io.parse_tensor(state, tf.variant),
            [tf.io.parse_tensor(each, tf.variant) for each in probes],
        )

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> list[Any]:
        # Give the copier a dataset that is never read: so TensorFlow stops the thread
        # that reads the old dataset.
        resource = self._copier._multi_device_iterator_resource
        with tf.device(resource.device):
            _ops.multi_device_iterator_init(
                self._marked._variant_tensor, resource, max_buffer_size=1
            )
        done: list[Any] = super()._restore_from_tensors(restored_tensors)
        self._seeds.restore(restored_tensors["_STATE"])
        self.position.assign(_serialized(self._resources))
        self._copier = self._new_copier()
        # Traced functions refer to the old iterators of the devices, so make the old
        # iterators read the new data.
        for old, new in zip(self.slices, self._copier._device_iterators, strict=True):
            with tf.device(old._iterator_resource.device):
                _ops.make_iterator(new._dataset._variant_tensor, old._iterator_resource)
        return done


def state_of(iterator: Any) -> Any:
    """Returns the state of a tf.data iterator, as `serialize_iterator` returns it.

    For an `AheadIterator` the state is the position of training. The state does not
    include hidden state of the pipeline's ops, such as a counter of random numbers.

    Args:
        iterator: the iterator.

    Raises:
        tf.errors.OpError: the state of the iterator cannot be read.
    """
    if isinstance(iterator, AheadIterator):
        return iterator.state()
    return add_seeds(iterator, lambda: _state_of(iterator._iterator_resource))


def _state_of(resource: Any) -> Any:
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE.value
    return _ops.serialize_iterator(resource, policy)


def _serialized(resources: Sequence[Any]) -> tf.Tensor:
    """Returns the states of several iterators as one string tensor in host memory."""
    states = [tf.io.serialize_tensor(_state_of(each)) for each in resources]
    return tf.io.serialize_tensor(tf.stack(states))


def _marked_slices(
    resources: Sequence[Any], spec: Any, cut: BatchSplit
) -> tf.data.Dataset:
    """Returns a dataset of pairs (slice, position of training).

    For every global batch, the dataset has the slice of the first replica, then that of
    the second replica, and so on. The position is the position after the global batch.

    Args:
        resources: resource of the host iterator, which only this dataset reads; then
            the resources of iterators whose states show the seeds of shuffles.
        spec: element spec of a global batch.
        cut: rule by which a global batch is cut.
    """

    def read(*resources: tf.Tensor) -> tuple[Any, tf.Tensor]:
        iterator = tf.data.IteratorSpec(spec)._from_components([resources[0]])
        return iterator.get_next_as_optional(), _serialized(resources)

    def slices(batch: Any, position: tf.Tensor) -> tf.data.Dataset:
        whole = batch.get_value()
        each = [
            tf.data.Dataset.from_tensors((cut.slice_of(number, whole), position))
            for number in range(len(cut.local))
        ]
        return functools.reduce(tf.data.Dataset.concatenate, each)

    # Pass the resources as a dataset. Captured resources would be kept alive with their
    # threads, because functions are part of reference cycles.
    batches = tf.data.Dataset.from_tensors(tuple(resources)).repeat().map(read)
    batches = batches.take_while(lambda batch, _: batch.has_value())
    return batches.flat_map(slices)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchedSlices:
    """A worker's source of batches, if slices are copied before a step needs them."""

    iterator: Any  # the host iterator, of global batches
    slices: Sequence[Any]  # for every device, an iterator of (slice, position)
    position: Any  # handle of the variable with the position of training
    devices: Sequence[str]
    spec: Any  # element spec of a slice

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        found = []
        for device, each in zip(self.devices, self.slices, strict=True):
            with tf.device(device):
                found.append(each.get_next())
        parts, positions = zip(*found, strict=True)
        tf.raw_ops.AssignVariableOp(resource=self.position, value=positions[0])
        return [*parts]

    def get_next_as_optional_list(self) -> list[Any]:
        found = []
        for device, each in zip(self.devices, self.slices, strict=True):
            with tf.device(device):
                found.append(each.get_next_as_optional())
        before = tf.raw_ops.ReadVariableOp(resource=self.position, dtype=tf.string)
        first = found[0]
        with tf.device(self.devices[0]):
            position = tf.cond(
                first.has_value(), lambda: first.get_value()[1], lambda: before
            )
        tf.raw_ops.AssignVariableOp(resource=self.position, value=position)
        return [_WithoutPosition(each, self.spec) for each in found]


@dataclasses.dataclass(frozen=True, slots=True)
class _WithoutPosition:
    """Wraps an Optional of (slice, position); its value is the slice only."""

    marked: Any
    element_spec: Any

    def has_value(self) -> Any:
        return self.marked.has_value()

    def get_value(self) -> Any:
        part, _ = self.marked.get_value()
        return part
