"""States of tf.data iterators as bytes, and what is left to read of one."""

from __future__ import annotations

import io

import tensorflow as tf
from tensorflow.python.ops import gen_dataset_ops

from tfpreempt.checkpoint.encoding import read_parts, write_parts
from tfpreempt.checkpoint.iterator_state import pack, unpack

FAIL = tf.data.experimental.ExternalStatePolicy.FAIL.value


def serialize(iterator):
    """Refuses what tf.data calls external state."""
    state = gen_dataset_ops.serialize_iterator(iterator._iterator_resource, FAIL)
    file = io.BytesIO()
    write_parts(file, None, pack(state))
    return file.getvalue()


def deserialize(iterator, state):
    _, parts = read_parts(io.BytesIO(state))
    resource = iterator._iterator_resource
    gen_dataset_ops.deserialize_iterator(resource, unpack(list(parts)))


def numbers(batches):
    """The first component of each batch."""
    first = [tf.nest.flatten(batch)[0] for batch in batches]
    return [part.numpy().tolist() for part in first]
