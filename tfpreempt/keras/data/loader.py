"""Saves the position in a third-party data loader, such as Grain's.

The loader must be able to return its position. tf.data reads the loader in a thread,
ahead of training, so the loader's current position is not the position of training.
Therefore `LoaderTracker` records the loader's position after every batch, and saves the
position after the last trained batch. A restart sets a new loader to the saved
position, and reads the following batches.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.position import AGAIN, Position, ReplayTracker
from tfpreempt.keras.fit_protocol import Fit, Loader
from tfpreempt.keras.fit_record import EncodedValue
from tfpreempt.states.loaders import LoaderState, accessor_of

log = logging.getLogger(__name__)

_AHEAD = 2
"""Number of batches that tf.data reads ahead; most loaders read ahead as well."""
_KEPT = 64
"""Number of recorded positions that are kept, in addition to the batches of two steps;
far more batches than tf.data reads ahead."""


_END = object()


class LoaderTracker(ReplayTracker):
    """Saves the state of a loader. If the loader cannot return its state, a restart
    reads the trained batches again."""

    kind = "loader"
    other_kinds = ("replay",)

    def __init__(self, fit: Fit, data: CountedDataset) -> None:
        super().__init__(fit, data)
        assert fit.loader is not None
        self._loader: Loader = fit.loader
        # The batches of the iterator used for training; None before its first use.
        self._handed: _DeliveredBatches | None = None
        data.dataset = fit.distribute(self._batches, _AHEAD)

    def _batches(self) -> Iterator[Any]:
        """Yields the batches of the loader; runs on a thread of tf.data.

        tf.data starts the thread at the first step, after a call of `begins` or
        `restore`.
        """
        assert self._handed is not None
        yield from self._handed.batches()

    def begins(self, iterator: Any) -> None:
        self._handed = _DeliveredBatches(
            self.fit, self._loader, taken=self._loader.taken()
        )
        if (problem := self._handed.problem) is not None:
            log.warning("%s (%s).", AGAIN, problem)
            warn_of_states()

    def save(self, iterator: Any, position: Position) -> Position:
        # No state is needed: the next iterator starts from the beginning.
        if not position.batches:
            return position
        assert self._handed is not None
        state = self._handed.state_after(position.batches)
        if state is None:
            problem = self._handed.problem or "too many batches were read since"
            log.warning(_UNKNOWN, position.batches, problem)
            return dataclasses.replace(position, kind="replay")
        return dataclasses.replace(position, more=[state.header, [*state.arrays]])

    def prepare(self, position: Position) -> Sequence[str]:
        """Opens a loader at the saved position; also for a complete fit, because the
        next fit continues with the loader."""
        if position.kind != "replay" and position.batches:
            header, arrays = position.more
            state = EncodedValue(header=header, arrays=tuple(arrays))
            self._handed = _DeliveredBatches(
                self.fit, self._loader, batches=position.batches, state=state
            )
        return ()

    def restore(self, position: Position, iterator: Any) -> None:
        if self._handed is None:  # `prepare` has not opened the loader at a position
            if position.batches:
                warn_of_states()
            self.begins(iterator)
            super().restore(position, iterator)

    def extend(self, position: Position, iterator: Any) -> None:
        self.begins(iterator)


def warn_of_states() -> None:
    """Logs a warning if the program has a LoaderState, because the State sets the
    position of a loader, and this fit also reads the trained batches again."""
    for state in REGISTRY.in_order():
        if isinstance(state, LoaderState):
            log.warning(_BOTH, state)


class _DeliveredBatches:
    """Reads a loader's batches, and records the loader's position after every batch.

    Args:
        fit: the fit; the number of positions kept depends on its `steps_per_execution`.
        loader: the loader; opened here.
        batches: number of batches delivered before the restart.
        state: state of the loader after those batches; None for a fresh loader.
        taken: batches that Keras took from the loader; delivered first.

    Attributes:
        problem: reason why positions are unknown, as text for a message; None if known.

    Raises:
        CheckpointMismatchError: the loader does not accept the state.
    """

    def __init__(
        self,
        fit: Fit,
        loader: Loader,
        *,
        batches: int = 0,
        state: EncodedValue | None = None,
        taken: Sequence[Any] = (),
    ) -> None:
        self._fit = fit
        self.problem: str | None = None
        self._iterator = loader.open()
        self._standardize = loader.standardize
        self._taken = taken
        self._count = batches
        self._is_over = False
        accessor = accessor_of(self._iterator)
        assert accessor is not None
        self._get = accessor.get
        if state is not None:
            accessor.restore(state.value(), "The loader of the training data")
        self._states = {batches + len(taken): self._state()}

    def batches(self) -> Iterator[Any]:
        """Yields the remaining batches; runs on a thread of tf.data."""
        for batch in self._taken:
            self._count += 1
            yield batch
        while (batch := next(self._iterator, _END)) is not _END:
            standardized = self._standardize(batch)
            # Record the position before the batch is delivered: afterwards training may
            # finish the batch, and a save may need the position, at any time.
            number, kept = self._count + 1, _KEPT + 2 * self._fit.steps_per_execution
            self._states[number] = self._state()
            self._states.pop(number - kept, None)
            self._count = number
            yield standardized
        self._is_over = True

    def state_after(self, batches: int) -> EncodedValue | None:
        """Returns the position after a number of batches; None if unknown.

        Args:
            batches: number of trained batches. The last step of an epoch counts as a
                full step, even if it trained on fewer batches.
        """
        if self._is_over:
            batches = min(batches, self._count)
        return self._states.get(batches)

    def _state(self) -> EncodedValue | None:
        try:
            return EncodedValue.of(self._get(), "the state of the loader")
        except Exception as error:  # noqa: BLE001 - loaders raise errors of any class
            self.problem = f"{type(error).__name__}: {error}"
            return None


_UNKNOWN = (
    "the position of the loader of the training data after %d batches is unknown "
    "(%s). A restart from this checkpoint reads these batches again, which is exact "
    "only if the loader returns the batches in the same order."
)
_BOTH = (
    "a restart loads %r, and this fit also reads its batches again. If the fit reads "
    "from that loader, remove the State: the loader would resume at a wrong "
    "position, because a fit reads batches ahead of training. Keras 3 accepts "
    "loaders of Grain, and tf_keras any iterator with such methods; these loaders "
    "resume at their position without a State."
)
