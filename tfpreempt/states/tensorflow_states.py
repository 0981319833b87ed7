"""Ready-made States for TensorFlow's random generators and dataset iterators."""

from __future__ import annotations

import json
from typing import IO

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state import data_order
from tfpreempt.checkpoint.state.encoding import read_parts, readable, write_parts
from tfpreempt.checkpoint.state.random_state import GeneratorState
from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry
from tfpreempt.checkpoint.tensors import program_values
from tfpreempt.checkpoint.tensors.data_order import of_iterator
from tfpreempt.checkpoint.tensors.iterator_state import (
    check_position,
    keep_seeds,
    pack,
    unpack,
)
from tfpreempt.checkpoint.tensors.program_values import (
    generator_record,
    load_generator_record,
)
from tfpreempt.core import private_api


class TensorFlowRandomState(GeneratorState):
    """Saves a `tf.random.Generator`, or the random state of eager ops.

    The state of random ops with an op-level seed, and of random ops inside a
    tf.function, is not saved, because TensorFlow does not show this state. Use a
    `tf.random.Generator` for such ops.

    Args:
        name: name of the State, unique among the existing States.
        generator: a `tf.random.Generator`. None: the state of eager ops after
            `tf.random.set_seed`, and TensorFlow's global generator, if the program has
            created this generator.
        per_worker: whether each worker saves its own state; False: the chief's state is
            restored on every worker.
        registry: registry of States; None does not register the State.
    """

    def __init__(
        self,
        name: str = "tensorflow_random",
        generator: tf.random.Generator | None = None,
        *,
        per_worker: bool = True,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        super().__init__(name, per_worker, registry=registry)
        self._generator = generator

    def save(self, fileobj: IO[bytes]) -> None:
        own = self._generator
        record = program_values.record() if own is None else generator_record(own)
        fileobj.write(json.dumps(record).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        own = self._generator
        with readable(self):
            record = json.loads(fileobj.read())
            if own is None:
                program_values.load(record)
                return
            saved, here = int(record["algorithm"]), int(own.algorithm)
            if saved == here:
                load_generator_record(own, record)
        if saved != here:
            raise errors.CheckpointMismatchError(
                f"{self!r} was saved with the algorithm {saved}, and the generator of "
                f"this program has {here}. Create the generator with the saved "
                "algorithm."
            )

    def _reseed(self, seed: int) -> None:
        if self._generator is None:
            program_values.reseed(seed)
        else:
            self._generator.reset_from_seed(seed % 2**63)


class DatasetIteratorState(State):
    """Saves the position of a `tf.data` iterator, with its shuffle buffers.

    The State can be loaded before or after the first element is read. Build the dataset
    with the same data and operations as before the restart. Later iterators of the
    dataset, such as the iterators of the next epochs, have the same order as without
    the restart.

    Args:
        name: name of the State, unique among the existing States.
        iterator: the iterator, `iter(dataset)`.
        per_worker: whether each worker saves its own position; False: the chief's
            position is restored on every worker.
        registry: registry of States; None does not register the State.

    Attributes:
        iterator: the iterator; assign the new iterator after each `iter(dataset)`.

    Raises:
        ConfigurationError: the object is not an iterator of tf.data, or TensorFlow
            cannot save its position.
    """

    def __init__(
        self,
        name: str,
        iterator: tf.data.Iterator,
        *,
        per_worker: bool = True,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        if not isinstance(iterator, private_api.iterator_ops.OwnedIterator):
            raise errors.ConfigurationError(
                f"DatasetIteratorState got {iterator!r}; expected `iter(dataset)` of a "
                "tf.data.Dataset. (A NumPy iterator has no position that can be saved. "
                "Put an iterator of tfpreempt.data.distribute() into the "
                "tf.train.Checkpoint.)"
            )
        check_position(iterator, f"The iterator of DatasetIteratorState {name!r}")
        super().__init__(name, per_worker, registry=registry)
        self.iterator = iterator

    def save(self, fileobj: IO[bytes]) -> None:
        keep_seeds(self.iterator)
        try:
            parts = pack(self.iterator._serialize_to_tensors()["_STATE"])
        except tf.errors.OpError as error:
            raise errors.SaveError(
                f"The position of {self!r} cannot be saved: {error.message} A dataset "
                "with from_generator, py_function or unseeded random operations has no "
                "position that can be saved; use tfpreempt.data."
            ) from error
        order = of_iterator(self.iterator)
        write_parts(fileobj, {"kind": "tf.data", "order": order}, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        try:
            if header.get("kind") != "tf.data" or not parts:
                raise ValueError(f"the header is {str(header)[:80]!r}")
            order = data_order.parse(header.get("order", {}))
            state = unpack(parts)
        except (AttributeError, ValueError, tf.errors.OpError) as error:
            raise errors.CheckpointCorruptedError(
                f"The saved state of {self!r} cannot be read: {error}"
            ) from error
        here = of_iterator(self.iterator)
        data_order.check(order, here, f"The data of {self!r}")
        keep_seeds(self.iterator)
        try:
            self.iterator._restore_from_tensors({"_STATE": state})
        except (ValueError, tf.errors.OpError) as error:
            raise errors.CheckpointMismatchError(
                f"{self!r} was saved from another pipeline: {error}. Build the dataset "
                "as the interrupted run did, or use another checkpoint directory"
            ) from error
