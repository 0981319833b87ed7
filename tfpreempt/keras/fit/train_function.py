"""Replaces `model.train_function`, to count the steps of a fit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from tfpreempt.handler.run import NEVER, Run, next_stop
from tfpreempt.handler.session import Session
from tfpreempt.handler.training_end import is_end_of_data, step_failed
from tfpreempt.keras.bad_steps import BadStepGuard
from tfpreempt.keras.fit_protocol import Fit

log = logging.getLogger(__name__)

MEASURED = {0: 1, 1: 3}
"""Key: number of steps so far. Value: number of steps after which the wrapper calls the
session next, to measure the time of a step."""


class TrainFunctionWrapper:
    """Runs a step at every call, and computes the number of trained batches.

    Usually a call only compares numbers and runs the step. The number of batches is
    computed from the run's number of steps, so that no counter is updated in a step.

    Args:
        fit: the fit with the train function.
        session: the session of this process.
        run: the run that counts the steps.
        prepare: function called after the first step, to compute values of the first
            save in advance.
        slow: function that Keras' call is passed to, instead of the method `run`, if a
            step needs more than a call of the train function (a new iterator, a
            restore, a due save).
        guard: finds bad steps, and knows the steps to leave out.

    Attributes:
        inner: Keras' own train function.
        iterator: iterator of the newest step.
        logs: result of the newest step.
        stop_at: from this number of steps of the run on, every call goes to `slow`.
        epoch: number of the current epoch.
        size: number of batches of a step; may change between epochs.
        before_epoch: number of batches that earlier epochs have taken from the current
            iterator.
    """

    def __init__(
        self,
        fit: Fit,
        session: Session,
        run: Run,
        slow: Callable[[Any], Any],
        *,
        prepare: Callable[[], None],
        guard: BadStepGuard,
    ) -> None:
        self.inner: Callable[[Any], Any] = fit.as_step(
            "train", fit.model.train_function
        )
        self.iterator: Any = None
        self.logs: Any = None
        self.stop_at = self.epoch = 0
        self.size = fit.steps_per_execution
        self._fit = fit
        self._session = session
        self._step_flag = session.step_flag
        self._run = run
        self._slow, self._prepare = slow, prepare
        self.guard = guard
        # Number of batches in an epoch, if the last step may be shorter; else None.
        self._limit: int | None = None
        # From these two numbers of the same moment, the current number of batches is
        # computed: steps of the run, and trained batches of the epoch.
        self._mark = (0, 0)
        self.before_epoch = 0

    def __call__(self, iterator: Any) -> Any:
        if iterator is self.iterator and self._run.steps_made < self.stop_at:
            return self.run(self.inner, iterator)
        self._fit.sync()
        return self._slow(iterator)

    def run(self, step: Callable[[Any], Any], iterator: Any) -> Any:
        """Handles a pending notice at the boundary before the step, and runs the step.

        Args:
            step: function that trains, called with the iterator.
            iterator: iterator over the training data.

        Returns:
            The logs returned by the function.
        """
        step_flag, run = self._step_flag, self._run
        step_flag.started += 1
        if step_flag.flag or step_flag.busy or run.steps_made >= run.stop_at:
            self._fit.sync()
            self.guard.check()
            self._session.enter(run, "a callback")
            if run.steps_made == 1:
                self._prepare()
            run.stop_at = next_stop(run, MEASURED.get(run.steps_made, NEVER))
        step_flag.busy = True
        try:
            self.logs = logs = step(iterator)
        except BaseException as error:
            step_failed(error, self._session)
            self.guard.failed(error, self.batches)
            raise
        step_flag.busy = False
        step_flag.ends.append(monotonic())
        run.steps_made += 1
        return logs

    def leave_out(self, iterator: Any) -> Any:
        """Handles the boundary before a step, and reads the batches of the step without
        training. The batches count as trained, but not as a step of the run.

        Args:
            iterator: iterator over the training data.

        Returns:
            The logs of the step before; empty in the first step of an epoch.

        Raises:
            BadStepsError: the epoch has no other step, or its data end too early.
        """
        run, batches = self._run, self.batches + self.size
        logs = (self.logs if self.batches else None) or {}
        self.run(functools.partial(self._drop, logs), iterator)
        run.steps_made -= 1
        self._mark = (run.steps_made, batches)
        self.stop_at = 0  # the next step is not left out, and may be the first to trace
        if not run.steps_made:
            run.stop_at = 0
        self.guard.is_left_out = True
        if self._fit.steps is not None and batches >= self._fit.steps:
            self.guard.data_ended(batches)
        return logs

    def _drop(self, logs: Mapping[str, Any], iterator: Any) -> Any:
        guard, first = self.guard, self.batches
        for batch in range(first, first + self.size):
            try:
                self._fit.pipelines.read(iterator)
            except Exception as error:
                if not is_end_of_data(error):  # perhaps the reason to leave it out
                    log.warning("a batch that is left out cannot be read: %s", error)
                    guard.unreadable = batch
                elif batch > first and guard.unreadable != batch - 1:
                    break  # the last step of an epoch may have fewer batches
                else:
                    raise
        return logs

    # --- how far they have come ------------------------------------------------------

    @property
    def last(self) -> int:
        """Number of batches of this epoch that were trained before the newest step;
        equal to the index, from 0, of the first batch of the step."""
        runs, batches = self._mark
        return batches + (self._run.steps_made - runs - 1) * self.size

    @property
    def batches(self) -> int:
        """Returns the number of trained batches of this epoch."""
        runs, batches = self._mark
        batches += (self._run.steps_made - runs) * self.size
        return batches if self._limit is None else min(batches, self._limit)

    def epoch_begins(self, epoch: int) -> None:
        """Sets the counters at the beginning of an epoch."""
        fit = self._fit
        self.before_epoch += self.batches
        self.epoch, self.size = epoch, fit.steps_per_execution
        self._limit = fit.steps if fit.cuts_last_step else None
        self._mark = (self._run.steps_made, 0)
        self.guard.epoch_begins(epoch, self.size)
        self.stop_at = 0  # the next step calls `slow`, which checks for due saves

    def stands_at(self, taken: int, batches: int | None = None) -> None:
        """Sets the counters after a restart, or for a new iterator.

        Args:
            taken: number of batches taken from the iterator.
            batches: number of trained batches of the epoch; None: unchanged.
        """
        if batches is not None:
            self._mark = (self._run.steps_made, batches)
        self.before_epoch = taken - self.batches
