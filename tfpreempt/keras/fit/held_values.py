"""Values that variables had at an earlier moment, for a save that is made later.

To hold a value costs no copy. A read returns the variable's own buffer, and TensorFlow
writes a changed value into another buffer while the first one is in use
(`PrepareToUpdateVariable`). So only variables that change take memory twice. After a
sparse update, such as that of an embedding, TensorFlow writes into the buffer although
it is in use; `DisableCopyOnRead` turns that off, as in each of TensorFlow's own saves.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.tensors.gather import is_large, read_variables
from tfpreempt.checkpoint.tensors.variables import Attached, local_parts, reached


class HeldValues:
    """The values that a fit's variables have now on this worker. Main thread.

    Args:
        checkpoint: of the fit. Its own counters of saves are not held.
        untracked: result of `attach`, just called. Its metrics and seed generators are
            held too.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, untracked: Attached) -> None:
        found, edges = reached(checkpoint, untracked)
        children = {0, *(number for _, number in edges[0])}  # with the counters
        objects = [obj for n, obj in enumerate(found) if n not in children]
        objects += [variable for _, variable in untracked.own]
        parts = {id(part): part for obj in objects for part in local_parts(obj)}
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
        kinds: dict[Any, list[int]] = collections.defaultdict(list)
        for number, part in enumerate(self._parts):
            kinds[part.device, part.dtype].append(number)
            if is_large(part):
                tf.raw_ops.DisableCopyOnRead(resource=part.handle)
        values: dict[int, tf.Tensor] = {}
        for (device, dtype), numbers in kinds.items():
            handles = [self._parts[number].handle for number in numbers]
            read = read_variables(device, dtype, handles)
            values |= zip(numbers, read, strict=True)
        return [values[number] for number in range(len(self._parts))]

    def _assign(self, values: list[tf.Tensor]) -> None:
        for part, value in zip(self._parts, values, strict=True):
            with tf.device(part.device):
                part.assign(value)
