"""The position in arrays whose order Keras draws from NumPy's generator.

Keras draws this order on JAX. On TensorFlow an op draws the order, and the position is
the state of an iterator (`tensorflow_data.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpreempt.keras.data.position import IndexTracker, Position
from tfpreempt.keras.data.sequence import generators, set_generators


class ArrayTracker(IndexTracker):
    """Saves the number of trained batches in arrays, and the states of the random
    generators from which Keras draws the order of the epoch."""

    def begins(self, iterator: Any) -> None:
        self._generators = generators()

    def save(self, iterator: Any, position: Position) -> Position:
        return dataclasses.replace(position, more=self._generators)

    def restore(self, position: Position, iterator: Any) -> None:
        # If a batch was trained, the order of the epoch was drawn before the commit:
        # draw the order again from the saved states of the generators. The generators
        # get the states of the commit later, before the next step. If no batch was
        # trained, Keras draws the order in the next step.
        is_drawn = position.batches or position.more is None
        self._generators = position.more or generators()
        if is_drawn and self.fit.arguments["shuffle"] != "batch":
            set_generators(self._generators)
            iterator.begin()

    def extend(self, position: Position, iterator: Any) -> None:
        self.begins(iterator)


class DrawnTracker(ArrayTracker):
    """Restores, on TensorFlow, the position in arrays in an epoch whose order was drawn
    on JAX: Keras draws the order again from the saved generator of NumPy."""

    def prepare(self, position: Position) -> Sequence[str]:
        now = generators()
        set_generators(position.more)
        try:
            return super().prepare(position)
        finally:
            set_generators(now)

    def restore(self, position: Position, iterator: Any) -> None:
        self._generators = position.more
