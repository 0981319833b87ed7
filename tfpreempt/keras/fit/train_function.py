"""What stands in for `model.train_function`: each call is one step of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpreempt.handler.run import NEVER, Run
from tfpreempt.handler.session import Session
from tfpreempt.handler.training_end import step_failed
from tfpreempt.keras.fit_protocol import Fit

MEASURED = {0: 1, 1: 3}
"""Runs at which the session looks how long steps take, by those before."""


class TrainFunctionWrapper:
    """The steps of one fit, and how far they have come.

    While all is quiet a call compares and steps. Batches are kept as differences of the
    steps that the run has made, so that a step counts nothing.

    Args:
        fit: whose train function it is.
        session: of this process.
        run: whose steps they are.
        slow: is called in place of a step where something is out of the ordinary.

    Attributes:
        inner: Keras' own train function.
        iterator: of the newest step.
        logs: what the newest step returned.
        stop_at: the number of runs at which `slow` is called next.
        epoch: the epoch that runs.
        size: batches of a step; may change from epoch to epoch.
        before_epoch: batches that were taken from the iterator before this epoch.
    """

    def __init__(
        self, fit: Fit, session: Session, run: Run, slow: Callable[[Any], Any]
    ) -> None:
        self.inner: Callable[[Any], Any] = fit.model.train_function
        self.iterator: Any = None
        self.logs: Any = None
        self.stop_at = self.epoch = 0
        self.size = fit.steps_per_execution
        self._fit = fit
        self._session = session
        self._gate = session.gate
        self._run = run
        self._slow = slow
        self._limit: int | None = None  # batches; Keras cuts the last step short there
        self._mark = (0, 0)  # runs, batches of the epoch by then
        self.before_epoch = 0

    def __call__(self, iterator: Any) -> Any:
        if iterator is self.iterator and self._run.steps_made < self.stop_at:
            return self.run(self.inner, iterator)
        return self._slow(iterator)

    def run(self, step: Callable[[Any], Any], iterator: Any) -> Any:
        """One step; the boundary is before it."""
        gate, run = self._gate, self._run
        gate.started += 1
        if gate.flag or gate.busy or run.steps_made >= run.stop_at:
            self._session.enter(run, "a callback")
            run.stop_at = MEASURED.get(run.steps_made, NEVER)
        gate.busy = True
        try:
            self.logs = logs = step(iterator)
        except BaseException as error:
            step_failed(error, self._session)
            raise
        gate.busy = False
        run.steps_made += 1
        return logs

    # --- how far they have come ------------------------------------------------------

    @property
    def last(self) -> int:
        """The first batch of the newest step in this epoch."""
        runs, batches = self._mark
        return batches + (self._run.steps_made - runs - 1) * self.size

    @property
    def batches(self) -> int:
        """Batches of this epoch that are trained."""
        runs, batches = self._mark
        batches += (self._run.steps_made - runs) * self.size
        return batches if self._limit is None else min(batches, self._limit)

    def epoch_begins(self, epoch: int) -> None:
        """No batch of it is trained yet."""
        fit = self._fit
        self.before_epoch += self.batches
        self.epoch, self.size = epoch, fit.steps_per_execution
        self._limit = fit.steps if fit.cuts_last_step else None
        self._mark = (self._run.steps_made, 0)
        self.stop_at = 0  # the next step asks what is due

    def stands_at(self, taken: int, batches: int | None = None) -> None:
        """So many batches of the iterator are taken now.

        Args:
            taken: see above.
            batches: of the epoch that are trained; None: as many as there were.
        """
        if batches is not None:
            self._mark = (self._run.steps_made, batches)
        self.before_epoch = taken - self.batches
