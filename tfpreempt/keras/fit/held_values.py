"""Values that variables had at an earlier moment, for a save that is made later.

To hold a value costs no copy. A read returns the variable's own buffer, and TensorFlow
writes a changed value into another buffer while the first one is in use
(`PrepareToUpdateVariable`). So only variables that change take memory twice. Variables
that were updated sparsely, as embeddings are, copy at each read; `read_value_no_copy`
turns that off, as TensorFlow does in each of its own saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfpreempt.checkpoint.tensors.variables import Attached, local_parts, walk


class HeldValues:
    """The values that a fit's variables have now on this worker. Main thread.

    Args:
        checkpoint: of the fit. Its own counters of saves are left out.
        untracked: metrics and seed generators of its objects, which are included.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, untracked: Attached) -> None:
        tracked = [(path, obj) for path, obj in walk(checkpoint) if "/" in path]
        parts = {
            id(part): part
            for _, obj in [*tracked, *untracked.own]
            for part in local_parts(obj)
        }
        self._parts = list(parts.values())
        self._values = self._read()

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Gives the variables the held values inside, and takes them back after."""
        now = self._read()
        self._assign(self._values)
        try:
            yield
        finally:
            self._assign(now)

    def _read(self) -> list[tf.Tensor]:
        values = []
        for part in self._parts:
            with tf.device(part.device):
                values.append(part.read_value_no_copy())
        return values

    def _assign(self, values: list[tf.Tensor]) -> None:
        for part, value in zip(self._parts, values, strict=True):
            with tf.device(part.device):
                part.assign(value)
