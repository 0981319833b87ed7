"""Keeps earlier values of variables for a later save.

Keeping a value copies nothing: a read returns the variable's own buffer. If the
variable changes while the buffer is in use, TensorFlow writes the new value into a new
buffer (`PrepareToUpdateVariable`). So only changed variables need memory twice.

Variables with sparse updates, such as embeddings, are an exception: TensorFlow changes
their buffer in place, so a read must copy it (copy-on-read mode). `DisableCopyOnRead`
turns this mode off, as TensorFlow's own saves do. It is called for large variables only
(`is_large`), because for small variables a copy takes less time than the call.
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
    """The values of a fit's variables on this worker, at the time of construction.

    Use on the main thread only.

    Args:
        checkpoint: the tf.train.Checkpoint of the fit; its own save counter is not
            kept.
        untracked: result of `attach(checkpoint)`, called just before. The metrics and
            seed generators in this result are kept, too.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, untracked: Attached) -> None:
        found, edges = reached(checkpoint, untracked)
        # Exclude the save counter of the tf.train.Checkpoint: a child of the Checkpoint
        # itself.
        children = {0, *(number for _, number in edges[0])}
        objects = [obj for n, obj in enumerate(found) if n not in children]
        objects += [variable for _, variable in untracked.own]
        parts = {id(part): part for obj in objects for part in local_parts(obj)}
        self._parts = list(parts.values())
        self._values = self._read()

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Context manager: gives the variables the kept values, until the body ends.

        Afterwards the variables have their previous values again.
        """
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
