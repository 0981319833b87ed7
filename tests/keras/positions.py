"""States of tf.data iterators as bytes, and the remaining elements of an iterator."""

from __future__ import annotations

import io

import tensorflow as tf

from tfpreempt.checkpoint.state.encoding import read_parts, write_parts
from tfpreempt.checkpoint.tensors.iterator_state import pack, unpack


def serialize(iterator):
    """Returns the state as bytes; refuses a state that tf.data calls external."""
    file = io.BytesIO()
    write_parts(file, None, pack(iterator._serialize_to_tensors()["_STATE"]))
    return file.getvalue()


def deserialize(iterator, state):
    _, parts = read_parts(io.BytesIO(state))
    iterator._restore_from_tensors({"_STATE": unpack(list(parts))})


def numbers(batches):
    """The first component of each batch."""
    first = [tf.nest.flatten(batch)[0] for batch in batches]
    return [part.numpy().tolist() for part in first]
