"""Positions in tf.data pipelines: states of dataset iterators as bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops as _iterator_ops

from tfpreempt.checkpoint.encoding import read_parts, write_parts
from tfpreempt.checkpoint.state import State
from tfpreempt.checkpoint.tf_state import walk


def pack(state: Any) -> list[bytes]:
    """The bytes of an iterator's serialized state.

    Args:
        state: a variant tensor of shape (elements,), as `serialize_iterator` gives it.

    Returns:
        One part per element, as tf.data itself does it: a proto ends at 2 GB.
    """
    return [bytes(tf.io.serialize_tensor(e).numpy()) for e in tf.unstack(state)]


def unpack(parts: Sequence[bytes]) -> Any:
    """What `pack` was given."""
    return tf.stack([tf.io.parse_tensor(part, tf.variant) for part in parts])


class IteratorState(State):
    """The positions of a non-chief worker's dataset iterators.

    The chief's are in TensorFlow's own files; without this the other workers would go
    on from the chief's position in their own data.
    """

    _is_reserved = True

    def __init__(
        self, checkpoint: tf.train.Checkpoint, name: str = "tfpreempt.iterators"
    ) -> None:
        super().__init__(name, per_worker=True, registry=None)
        self._checkpoint = checkpoint

    def iterators(self) -> Iterator[tuple[str, Any]]:
        """Path and iterator, in a fixed order."""
        for path, obj in walk(self._checkpoint):
            if isinstance(obj, _iterator_ops.OwnedIterator):
                yield path, obj

    def is_wanted(self) -> bool:
        return any(True for _ in self.iterators())

    def save(self, fileobj: IO[bytes]) -> None:
        header, parts = [], []
        for path, iterator in self.iterators():
            elements = pack(iterator._serialize_to_tensors()["_STATE"])
            parts += elements
            header.append({"path": path, "elements": len(elements)})
        write_parts(fileobj, header, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        left = iter(parts)
        saved = {
            entry["path"]: [next(left) for _ in range(entry["elements"])]
            for entry in header
        }
        for path, iterator in self.iterators():
            if path in saved:
                iterator._restore_from_tensors({"_STATE": unpack(saved[path])})


@contextlib.contextmanager
def positions_kept(checkpoint: tf.train.Checkpoint) -> Iterator[None]:
    """Leaves dataset iterators where they are while a checkpoint is restored."""
    iterators = [it for _, it in IteratorState(checkpoint).iterators()]
    for iterator in iterators:
        iterator._restore_from_tensors = lambda restored: []
    try:
        yield
    finally:
        for iterator in iterators:
            del iterator._restore_from_tensors  # uncovers the class's own
