"""Leaves steps with a bad loss, or with repeated crashes, out of a fit.

handler/bad_steps.py describes the search for bad steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.core.events import name_steps
from tfpreempt.handler.bad_steps import BadStepFinder, BadSteps, Position
from tfpreempt.handler.run import NEVER, Run
from tfpreempt.handler.session import Session
from tfpreempt.handler.training_end import is_end_of_data
from tfpreempt.keras.finite_variables import find_not_finite
from tfpreempt.keras.fit_protocol import Fit, FitVariables

log = logging.getLogger(__name__)


def problem(
    before: float | None, trained: int, mean: float, size: int, factor: float | None
) -> str:
    """Returns the reason why a step is bad; "" for a good step.

    Args:
        before: mean loss of the epoch before the step; None if unknown.
        trained: number of batches of that mean.
        mean: mean loss of the epoch after the step.
        size: number of batches of the step.
        factor: value of `BadSteps.spike_factor`.
    """
    if not math.isfinite(mean):
        return f"the loss is {mean}"
    if factor is None or before is None or not trained or before <= 0:
        return ""
    loss = mean + (mean - before) * trained / size
    if loss <= factor * before:
        return ""
    return (
        f"the loss {loss:.6g} is more than {factor:g} times the mean {before:.6g} of "
        "the epoch's earlier steps"
    )


_warned = set[str]()  # directories of which `BadStepGuard.warn_of_loss` has warned


class BadStepGuard(BadStepFinder):
    """Finds the bad steps of a fit, and knows the steps to leave out. Use on the main
    thread only.

    Args:
        options: the argument `on_bad_step`; None: no step is bad.
        fit: the fit.
        variables: the variables of the fit, as a checkpoint.
        session: the session of this process.
        run: the run of the fit.

    Attributes:
        is_left_out: whether the newest step was left out.
        unreadable: number of the epoch's newest batch that was left out and could not
            be read; None without such a batch.
    """

    def __init__(
        self,
        options: BadSteps | None,
        fit: Fit,
        variables: FitVariables,
        session: Session,
        run: Run,
    ) -> None:
        super().__init__(options, session, run)
        self._fit = fit
        self._variables = variables
        self.is_left_out = False
        self.unreadable: int | None = None
        self._fit_number = self._epoch = 0
        self._mean: float | None = None  # mean loss before the first unread loss
        if options is None:
            return
        root = type(fit.model).train_step.__module__.partition(".")[0]
        if options.spike_factor is not None and root not in ("keras", "tf_keras"):
            raise errors.ConfigurationError(
                f"spike_factor is {options.spike_factor!r} for a model with its own "
                "train_step, whose logs may have another loss than the mean of the "
                "epoch. Use the train_step of Keras, or leave spike_factor out"
            )

    def begin(
        self, number: int, epoch: int, logs: Mapping[str, Any], size: int
    ) -> None:
        """Reads the bad steps of earlier starts, before training.

        Args:
            number: number of the fit among the fits with the directory.
            epoch: number of the first epoch.
            logs: logs of the restored commit; empty if training starts from scratch.
            size: number of batches of a step.

        Raises:
            BadStepsError: the loss of the commit is NaN or infinite, or more steps are
                left out than the limit.
            ConfigurationError: a step to leave out has another number of batches.
        """
        if not self.is_active:
            return
        self._fit_number, self._epoch = number, epoch
        mean = logs.get(self.options.loss)
        self._mean = None if mean is None else float(mean)
        if self._mean is not None and not math.isfinite(self._mean):
            raise self.commit_is_bad(f"the loss is {self._mean}")
        for each in self.read():
            is_ahead = (each["fit"], each["epoch"]) >= (number, epoch)
            if is_ahead and each["batches"] != size:
                raise errors.ConfigurationError(
                    f"steps_per_execution is {size}, but a bad step was recorded with "
                    f"{each['batches']} batches a step; expected the same number, "
                    "because a step is left out as a whole. Use "
                    f"steps_per_execution={each['batches']} until epoch "
                    f"{each['epoch']} has ended"
                )
        self.warn_of_left_out(
            "these batches are left out of training",
            self.positions,
            is_resumed=bool(logs),
        )

    # --- the steps to leave out ------------------------------------------------------

    def epoch_begins(self, epoch: int, size: int) -> None:
        """Begins an epoch.

        Args:
            epoch: number of the epoch, from 0.
            size: number of batches of a step.
        """
        if self.is_shared:
            self._run.before_save = self._check_before_save
        if epoch != self._epoch:
            self._mean = None
        self._epoch, self.size = epoch, size
        self._unread.clear()
        self.unreadable = None

    def _of_epoch(self) -> list[int]:
        here = self._fit_number, self._epoch
        return [batch for *position, batch in self.positions if tuple(position) == here]

    def leaves_out(self, batch: int) -> bool:
        """Returns whether the step with this first batch is left out."""
        return batch in self._of_epoch()

    def steps_until(self, batch: int) -> int:
        """Returns the number of steps from a batch to the next step to leave out."""
        later = [(each - batch) // self.size for each in self._of_epoch()]
        return min((each for each in later if each >= 0), default=NEVER)

    def data_ended(self, batch: int) -> None:
        """Checks that the epoch has a step, at the end of the epoch's data.

        Args:
            batch: number of batches in the epoch.

        Raises:
            BadStepsError: each step of the epoch was left out.
        """
        left_out = [each for each in self._of_epoch() if each < batch]
        if left_out and len(left_out) * self.size >= batch:
            found = [(self._fit_number, self._epoch, each) for each in left_out]
            raise errors.BadStepsError(
                f"Each step of epoch {self._epoch} is left out ({name_steps(found)}), "
                "but Keras needs a step in each epoch. Correct the data of these "
                "batches, and start again with another checkpoint directory"
            )

    # --- the losses ------------------------------------------------------------------

    def add(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Handles the end of a step; reads the losses in every `check_every`-th call.

        Args:
            batch: number of the step's first batch in the epoch.
            logs: result of the step.

        Raises:
            ConfigurationError: the logs have no loss.
        """
        if self.options.loss not in logs:
            raise errors.ConfigurationError(
                f"the logs of the train step have no {self.options.loss!r}, only "
                f"{', '.join(map(repr, logs)) or 'no values'}. Pass "
                "BadSteps(loss=...) with the name of the loss"
            )
        self._last = self._position(batch)
        self._unread.append((self._last, logs[self.options.loss]))
        if self._last <= self.search_end:
            self.check()
        elif len(self._unread) >= self.options.check_every:
            self.check_losses()

    def why_bad(self, position: Position, loss: Any) -> str:
        mean, batch = float(loss), position[2]
        left_out = sum(each < batch for each in self._of_epoch())
        trained, factor = batch - left_out * self.size, self.options.spike_factor
        why = problem(self._mean, trained, mean, self.size, factor)
        if not why:
            self._mean = mean
        return why

    def find_bad_variable(self) -> str:
        self._fit.sync()
        return find_not_finite(self._fit, self._variables)

    def check_before_save(self) -> None:
        """Raises SaveError if a step was bad, for a save without a call of `check`.

        With several workers, only `Run.capture` raises the error: in the save itself,
        so that every worker reaches the save.
        """
        if self.is_shared:
            self.check()
            return
        found = self.find()
        why = "" if found is None else f"{found[1]} at {name_steps([found[0]])}"
        if not why and self.is_active and not self.are_finite:
            why = self.find_bad_variable()
        if why:
            raise errors.SaveError(
                f"{why}, so the state is not saved; the older commits are unchanged"
            )

    def warn_of_loss(self, logs: Mapping[str, Any]) -> None:
        """Without `on_bad_step`, logs a warning, once, if a state with a bad loss is
        saved.

        Args:
            logs: logs of the epoch, as numbers.
        """
        loss, directory = logs.get(self.options.loss), self._run.directory.path
        is_bad = isinstance(loss, float) and not math.isfinite(loss)
        if not is_bad or self.is_active or directory in _warned:
            return
        _warned.add(directory)
        log.warning(
            "the loss is %s at step %d: from now on the commits in %s probably contain "
            "NaN weights, and they replace the older commits. Stop the run, and resume "
            "from an older commit (`tfpreempt inspect` lists the commits). "
            "on_bad_step=tfpreempt.keras.BadSteps() leaves such a step out",
            loss,
            self._run.step,
            directory,
        )

    def failed(self, error: BaseException, batch: int) -> None:
        """Records a crash of a step; the caller raises the error.

        If an earlier step was bad, records the earlier step instead, because its state
        may be the cause of the crash.

        Args:
            error: error raised by the step.
            batch: number of the step's first batch in the epoch.

        Raises:
            BadStepsError: the limit was reached, or the data have ended and the epoch
                is incomplete because of a step that was left out.
        """
        if is_end_of_data(error):
            self.data_ended(batch)
            if self.unreadable is not None and self.unreadable >= batch - 1:
                raise errors.BadStepsError(
                    f"The data cannot be read past batch {self.unreadable} of epoch "
                    f"{self._epoch}: reading the batch raised an error, and then the "
                    "data ended, as a Python generator ends after an error. Catch the "
                    "error in the generator, and continue with the next batch"
                ) from error
            return
        if not self.followed_bad_step(error):
            self.crashed(self._position(batch), error)

    def _position(self, batch: int) -> Position:
        return self._fit_number, self._epoch, batch
