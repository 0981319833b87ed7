"""Earlier values of variables, held for a later save.

Holding a value costs no copy. A read returns the variable's own buffer, and TensorFlow
writes a changed value into another buffer while the first buffer is in use
(`PrepareToUpdateVariable`). So only changed variables take memory twice.

After a sparse update, such as of an embedding, TensorFlow writes into the buffer even
if in use, and a read copies the variable. For large variables (`is_large`),
`DisableCopyOnRead` turns this mode off, as in each of TensorFlow's own saves. For other
variables the copy takes less time.
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
    """The current values of a fit's variables on this worker. Main thread.

    Args:
        checkpoint: Checkpoint of the fit. The Checkpoint's own save counters are not
            held.
        untracked: result of `attach`, called just before. The metrics and seed
            generators in the result are held too.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, untracked: Attached) -> None:
        found, edges = reached(checkpoint, untracked)
        # The children of the Checkpoint include its save counters.
        children = {0, *(number for _, number in edges[0])}
        objects = [obj for n, obj in enumerate(found) if n not in children]
        objects += [variable for _, variable in untracked.own]
        parts = {id(part): part for obj in objects for part in local_parts(obj)}
        self._parts = list(parts.values())
        self._values = self._read()

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Assigns the held values inside the block, and the previous values after."""
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
