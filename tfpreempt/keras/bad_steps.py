"""Leaves steps with a bad loss, or with repeated crashes, out of a fit.

The state in memory cannot be taken back to an earlier step. So a bad step is recorded
in the journal, and the process exits to be restarted: the next start resumes from the
last commit, reads the batches of the recorded steps, and does not train on them. No
commit contains a bad step, because the losses and the variables are checked before each
save.

A step may make variables NaN although its loss is finite; only a later step has a bad
loss, or none. If a check before a save finds such variables, the bad step is one of the
steps since the check before, and the journal records the newest of these steps. Until
the newest recorded step, the next start checks the variables after each step. The steps
are repeated exactly, so the check finds the first step that makes a variable NaN. If
only the loss of a later step was recorded, the record of the first step replaces the
record of the later step, which may be good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tfpreempt import errors
from tfpreempt.checkpoint.mirror.journal_mirror import fetch
from tfpreempt.core.compat import add_note
from tfpreempt.core.events import BadStep, Outcome
from tfpreempt.core.journal import Journal
from tfpreempt.core.record_validation import validate_types
from tfpreempt.handler.exit import describe
from tfpreempt.handler.run import NEVER, Run
from tfpreempt.handler.session import Session
from tfpreempt.handler.training_end import is_end_of_data
from tfpreempt.keras.finite_variables import find_not_finite
from tfpreempt.keras.fit_protocol import Fit, FitVariables

log = logging.getLogger(__name__)

_FIELDS = {
    **dict.fromkeys(("fit", "epoch", "batch", "batches"), "count"),
    "is_crash": "flag",
    "is_sought": "flag?",
    "replaces": "time?",
    "found_at": "time?",  # of a copy: `wall` of the original record
}
_TIMES = ("wall", "monotonic")
_Position = tuple[int, int, int]  # number of the fit, epoch, first batch of the step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadSteps:
    """The steps that a `PreemptionCallback` leaves out of training.

    A step is bad if its loss is NaN or infinite, or if the step makes a variable NaN or
    infinite. After a bad step the process exits with the restart code; the next start
    resumes from the last commit, and leaves the batches of the step out.
    docs/fit/bad-steps.md describes the details.

    Args:
        spike_factor: a step is also bad if its loss is more than this number times the
            mean loss of the epoch's earlier steps. None: no such check. Only for models
            with the `train_step` of Keras.
        crashes: number of starts in which a step has raised an error, after which the
            step is left out. None: errors are never a reason. An error of the program
            or of the storage counts too, so a good step may be left out.
        limit: maximum number of steps that are left out of a run. One more bad step
            raises BadStepsError.
        check_every: number of steps after which the losses are read. Reading a loss
            waits for the device. Before each save the losses are read too, and the
            variables are checked.
        loss: name of the loss in the logs of the train step.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    spike_factor: float | None = None
    crashes: int | None = None
    limit: int = 10
    check_every: int = 16
    loss: str = "loss"

    def __post_init__(self) -> None:
        factor = self.spike_factor
        is_number = isinstance(factor, int | float) and factor > 1
        if not (factor is None or is_number):
            raise errors.ConfigurationError(
                f"spike_factor is {factor!r}; expected a number above 1, or None"
            )
        for name, least in (("crashes", 2), ("limit", 1), ("check_every", 1)):
            value = getattr(self, name)
            is_count = type(value) is int and value >= least
            if not (is_count or (name == "crashes" and value is None)):
                raise errors.ConfigurationError(
                    f"{name} is {value!r}; expected an int of {least} or more"
                    f"{', or None' if name == 'crashes' else ''}"
                )


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


def positions(
    records: Iterable[Mapping[str, Any]], crashes: int | None
) -> list[_Position]:
    """Returns the steps to leave out, in the order in which they were found.

    Args:
        records: records of the event `BadStep`, oldest first.
        crashes: value of `BadSteps.crashes`.
    """
    counts: dict[_Position, float] = {}
    for each in records:
        if each.get("is_sought"):
            continue
        position = _position(each)
        counts[position] = counts.get(position, 0) + (1 if each["is_crash"] else NEVER)
    needed = NEVER if crashes is None else crashes
    return [position for position, count in counts.items() if count >= needed]


def _records(journal: Journal) -> list[Mapping[str, Any]]:
    """Returns the valid records of bad steps in a journal, oldest first.

    A record of which the journal has copies (see `BadStepGuard._read`) is returned
    once: otherwise one crash would count as several crashes. A record that another
    record replaces is not returned.
    """
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for each in journal.read_earlier(BadStep):
        if validate_types(each, _FIELDS):
            found.setdefault(_identity(each), each)
    replaced = {each.get("replaces") for each in found.values()}
    return [each for (at, *_), each in found.items() if at not in replaced]


def _identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns values that a record and its copies have in common, and no other record:
    the time at which the step was found, and the step."""
    at = record.get("found_at")
    return (record["wall"] if at is None else at, *_position(record))


def _position(record: Mapping[str, Any]) -> _Position:
    """Returns the step of a record."""
    return record["fit"], record["epoch"], record["batch"]


def _named(found: Iterable[_Position]) -> str:
    """Returns steps as text."""
    return ", ".join(
        f"batch {batch} of epoch {epoch}{f' of fit {fit}' if fit > 1 else ''}"
        for fit, epoch, batch in found
    )


_warned = set[str]()  # directories of which `_warn_of_loss` has warned


def _warn_of_loss(directory: str, loss: str, step: int) -> None:
    if directory in _warned:
        return
    _warned.add(directory)
    log.warning(
        "the loss is %s at step %d: from now on the commits in %s probably contain NaN "
        "weights, and they replace the older commits. Stop the run, and resume from an "
        "older commit (`tfpreempt inspect` lists the commits). "
        "on_bad_step=tfpreempt.keras.BadSteps() leaves such a step out",
        loss,
        step,
        directory,
    )


_NO_OPTIONS = BadSteps()  # in a fit without `on_bad_step`


class BadStepGuard:
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
        self._options = options or _NO_OPTIONS
        self._fit = fit
        self._variables = variables
        self._session = session
        self._run = run
        self.is_left_out = False
        self.unreadable: int | None = None
        self._fit_number = self._epoch = 0
        self._size = 1
        self._records: list[Mapping[str, Any]] = []
        self._positions: list[_Position] = []
        self._mean: float | None = None  # mean loss before the first unread loss
        self._unread: list[tuple[int, Any]] = []  # first batch of a step, mean loss
        self._last: _Position = (0, 0, 0)  # the newest trained step
        # Number of the run's steps at the newest check that found finite variables.
        self._finite_at = -1
        if options is None:
            return
        if session.cluster.num_workers > 1:
            raise errors.ConfigurationError(
                f"on_bad_step was given in a run of {session.cluster.num_workers} "
                "workers; expected one process, because the workers do not agree on "
                "bad steps yet. Leave on_bad_step out, or train in one process"
            )
        root = type(fit.model).train_step.__module__.partition(".")[0]
        if options.spike_factor is not None and root not in ("keras", "tf_keras"):
            raise errors.ConfigurationError(
                f"spike_factor is {options.spike_factor!r} for a model with its own "
                "train_step, whose logs may have another loss than the mean of the "
                "epoch. Use the train_step of Keras, or leave spike_factor out"
            )

    @property
    def is_active(self) -> bool:
        """Whether `on_bad_step` was given."""
        return self._options is not _NO_OPTIONS

    @property
    def _search_end(self) -> _Position:
        """The step until which the variables are checked after each step."""
        bad = [_position(each) for each in self._records if not each["is_crash"]]
        return max(bad, default=(0, 0, 0))

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
        mean = logs.get(self._options.loss)
        self._mean = None if mean is None else float(mean)
        if self._mean is not None and not math.isfinite(self._mean):
            raise errors.BadStepsError(self._bad_commit(f"the loss is {self._mean}"))
        self._records = self._read()
        self._positions = positions(self._records, self._options.crashes)
        if len(self._positions) > self._options.limit:
            raise errors.BadStepsError(
                f"{len(self._positions)} steps are left out already; expected at most "
                f"limit={self._options.limit}. The bad steps, counted from 0: "
                f"{_named(self._positions)}. Raise limit= of BadSteps"
            )
        for each in self._records:
            position = _position(each)
            is_ahead = position in self._positions and position >= (number, epoch)
            if is_ahead and each["batches"] != size:
                raise errors.ConfigurationError(
                    f"steps_per_execution is {size}, but a bad step was recorded with "
                    f"{each['batches']} batches a step; expected the same number, "
                    "because a step is left out as a whole. Use "
                    f"steps_per_execution={each['batches']} until epoch "
                    f"{each['epoch']} has ended"
                )
        if self._positions:
            log.warning(
                "these batches are left out of training, because earlier starts have "
                "found bad steps (counted from 0; see %s): %s%s",
                self._run.journal.path,
                _named(self._positions),
                # From scratch, the order of the data depends on the program's seed.
                ""
                if logs
                else ". The numbers are valid if each start has the same seed",
            )

    def _read(self) -> list[Mapping[str, Any]]:
        """Returns the records of earlier starts; with a mirror, also the records of
        other machines, because the disk of this machine may be new.

        The journal of this machine gets the records of other machines: a replay, and a
        start that cannot read the mirror, read only the journal of this machine.
        """
        journal, mirror = self._run.journal, self._run.directory.mirror
        own = _records(journal)
        if mirror is None:
            return own
        try:
            with tempfile.TemporaryDirectory(prefix="tfpreempt-journal-") as copy:
                fetch(mirror.store, Path(copy), journal.path.parent)
                for path in Path(copy).iterdir():
                    path.chmod(0o600)  # `read_earlier` ignores files of other users
                found = _records(Journal(copy, 0))
        except (errors.TfpreemptError, OSError) as error:
            log.warning(
                "the bad steps of earlier starts cannot be read from the mirror %s "
                "(%s): this start finds bad steps of other machines again",
                mirror.store.uri,
                error,
            )
            return own
        known = {_identity(each) for each in own}
        for each in found:
            identity = _identity(each)
            if identity not in known:
                # With the times of this machine. The copy may be the first line of the
                # journal, and the mirror recognizes a journal by its first line.
                copied = {k: v for k, v in each.items() if k not in _TIMES}
                journal.append({**copied, "found_at": identity[0]}, durable=True)
        return found

    # --- the steps to leave out ------------------------------------------------------

    @property
    def has_positions(self) -> bool:
        """Whether a step is to be left out."""
        return bool(self._positions)

    def epoch_begins(self, epoch: int, size: int) -> None:
        """Begins an epoch.

        Args:
            epoch: number of the epoch, from 0.
            size: number of batches of a step.
        """
        if epoch != self._epoch:
            self._mean = None
        self._epoch, self._size = epoch, size
        self._unread.clear()
        self.unreadable = None

    def _of_epoch(self) -> list[int]:
        here = self._fit_number, self._epoch
        return [
            batch for *position, batch in self._positions if tuple(position) == here
        ]

    def leaves_out(self, batch: int) -> bool:
        """Returns whether the step with this first batch is left out."""
        return batch in self._of_epoch()

    def steps_until(self, batch: int) -> int:
        """Returns the number of steps from a batch to the next step to leave out."""
        later = [(each - batch) // self._size for each in self._of_epoch()]
        return min((each for each in later if each >= 0), default=NEVER)

    def data_ended(self, batch: int) -> None:
        """Checks that the epoch has a step, at the end of the epoch's data.

        Args:
            batch: number of batches in the epoch.

        Raises:
            BadStepsError: each step of the epoch was left out.
        """
        left_out = [each for each in self._of_epoch() if each < batch]
        if left_out and len(left_out) * self._size >= batch:
            found = [(self._fit_number, self._epoch, each) for each in left_out]
            raise errors.BadStepsError(
                f"Each step of epoch {self._epoch} is left out ({_named(found)}), but "
                "Keras needs a step in each epoch. Correct the data of these batches, "
                "and start again with another checkpoint directory"
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
        if self._options.loss not in logs:
            raise errors.ConfigurationError(
                f"the logs of the train step have no {self._options.loss!r}, only "
                f"{', '.join(map(repr, logs)) or 'no values'}. Pass "
                "BadSteps(loss=...) with the name of the loss"
            )
        self._unread.append((batch, logs[self._options.loss]))
        self._last = (self._fit_number, self._epoch, batch)
        if self._last <= self._search_end:
            self.check()
        elif len(self._unread) >= self._options.check_every:
            self._check_losses()

    def find(self) -> tuple[int, str] | None:
        """Reads the losses; returns the first bad step, with the reason, or None.

        The loss of a bad step stays unread: the state in memory must never be saved.
        """
        while self._unread:
            batch, value = self._unread[0]
            mean = float(value)
            left_out = sum(each < batch for each in self._of_epoch())
            trained = batch - left_out * self._size
            factor = self._options.spike_factor
            if why := problem(self._mean, trained, mean, self._size, factor):
                return batch, why
            self._mean = mean
            self._unread.pop(0)
        return None

    def check(self) -> None:
        """Ends the process if a step was bad, by its loss or by a variable. Call before
        a save.

        Raises:
            SystemExit: a step was bad; the next start leaves the step out.
            BadStepsError: the limit was reached, the journal cannot be written, or a
                variable is NaN or infinite for another reason than a step.
        """
        self._check_losses()
        if not self.is_active:
            return
        steps = self._run.steps_made
        self._fit.sync()
        if not (why := find_not_finite(self._fit, self._variables)):
            self._finite_at = steps
            return
        if steps in (0, self._finite_at):
            raise errors.BadStepsError(
                f"{why}, and no step has caused this: the variable was finite after "
                f"the newest step ({_named([self._last])}). Correct the callback, or "
                "the other code between the steps, that assigns the variable"
                if steps
                else f"{why} before the first step of this start; expected a model "
                "whose weights are finite. Correct the initial weights"
            )
        if self._finite_at == steps - 1:
            self._end_because_of(self._add(self._last[2], why), why)
        self._record(self._last, why, is_sought=True)
        self._end_because_of(self._last, why, is_sought=True)

    def check_restored(self) -> None:
        """Checks the variables of the restored commit.

        Raises:
            BadStepsError: a variable is NaN or infinite.
        """
        if self.is_active and (why := find_not_finite(self._fit, self._variables)):
            raise errors.BadStepsError(self._bad_commit(why))
        self._finite_at = self._run.steps_made

    def check_before_save(self) -> None:
        """Raises SaveError if a step was bad, for a save without a call of `check`."""
        found, where = self.find(), f"of epoch {self._epoch}"
        why = "" if found is None else f"{found[1]} at batch {found[0]} {where}"
        if not why and self.is_active and self._finite_at != self._run.steps_made:
            self._fit.sync()
            why = find_not_finite(self._fit, self._variables)
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
        loss = logs.get(self._options.loss)
        is_bad = isinstance(loss, float) and not math.isfinite(loss)
        if is_bad and not self.is_active:
            _warn_of_loss(self._run.directory.path, f"{loss}", self._run.step)

    def _check_losses(self) -> None:
        if (found := self.find()) is not None:
            batch, why = found
            self._end_because_of(self._add(batch, why), why)

    def _end_because_of(
        self, position: _Position, why: str, *, is_sought: bool = False
    ) -> NoReturn:
        """Ends the process, after the record of a bad step.

        Args:
            position: the recorded step.
            why: the reason.
            is_sought: whether the next start must find the step.
        """
        # Otherwise each start would find the step again, without end.
        if not any(
            _position(each) == position and bool(each.get("is_sought")) == is_sought
            for each in _records(self._run.journal)
        ):
            raise errors.BadStepsError(
                f"{why} at {_named([position])}, and the step could not be recorded in "
                f"the journal {str(self._run.journal.path)!r}; expected a file that "
                "this user owns, and that no other user can write. Correct the owner, "
                "the permissions or the space on the disk, and start again"
            )
        where = f"{why} {'after' if is_sought else 'at'} {_named([position])}"
        what = (
            "finds the step that caused this" if is_sought else "leaves this step out"
        )
        self._session.exit.leave(Outcome.LOST, f"{where}; the next start {what}")
        raise errors.UsageError(
            "the exit_fn returned after a bad step; expected that exit_fn ends the "
            "process, because the state in memory contains the bad step"
        )

    def _bad_commit(self, why: str) -> str:
        return (
            f"In the newest commit of {self._run.directory.path!r} {why}, so the "
            "commit contains a bad step, and on_bad_step cannot return to an earlier "
            "step. "
            "Move the newest commits to another directory (`tfpreempt inspect` lists "
            "the commits), and start again"
        )

    def failed(self, error: BaseException, batch: int) -> None:
        """Records a crash of a step; the caller raises the error.

        If an earlier step was bad, records the earlier step instead, because its state
        may be the cause of the crash. A crash in the first step of a run is recorded
        only if the step has crashed before: the cause may be an error of the program.

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
        if self.followed_bad_step(error):
            return
        crashes = self._options.crashes
        if not isinstance(error, Exception) or crashes is None:
            return
        position = (self._fit_number, self._epoch, batch)
        count = 1 + sum(_position(each) == position for each in self._records)
        if count >= crashes:
            self._add(batch, describe(error), is_crash=True, cause=error)
            add_note(
                error, f"the next start leaves out {_named([position])}: crash {count}"
            )
        elif count > 1 or self._run.step:
            self._record(position, describe(error), is_crash=True)

    def followed_bad_step(self, error: BaseException) -> bool:
        """Records the bad step before an error of a callback or of a later step; the
        caller raises the error.

        Args:
            error: the error, which ends the process before a call of `check`.

        Returns:
            Whether there was a bad step.

        Raises:
            BadStepsError: the limit was reached.
        """
        found = None
        # Ignore errors: JAX may raise the error of a step when the loss is read.
        with contextlib.suppress(Exception):
            found = self.find() if isinstance(error, Exception) else None
        if found is None:
            return False
        position = self._add(*found, cause=error)
        text = (
            f"{found[1]} at {_named([position])}; the next start leaves this step out"
        )
        add_note(error, text)
        return True

    def _add(
        self,
        batch: int,
        why: str,
        *,
        is_crash: bool = False,
        cause: BaseException | None = None,
    ) -> _Position:
        """Records a step that the next start leaves out; returns the step.

        Args:
            batch: number of the step's first batch.
            why: the reason.
            is_crash: whether the step has raised an error.
            cause: the error that ends the process; None without an error.

        Raises:
            BadStepsError: the limit was reached.
        """
        position = (self._fit_number, self._epoch, batch)
        replaced = self._search_end if self._replaced(position) else None
        others = [each for each in self._positions if each != replaced]
        if len(others) >= self._options.limit:
            raise errors.BadStepsError(
                f"{why}, and limit={self._options.limit} steps are left out already. "
                "The bad steps, counted from 0: "
                f"{_named([*others, position])}. Check the data of these "
                "batches, and the learning rate; or raise limit= of BadSteps"
            ) from cause
        self._record(position, why, is_crash=is_crash)
        return position

    def _record(
        self,
        position: _Position,
        why: str,
        *,
        is_crash: bool = False,
        is_sought: bool = False,
    ) -> None:
        fit, epoch, batch = position
        self._run.record(
            BadStep(
                step=self._run.step,
                fit=fit,
                epoch=epoch,
                batch=batch,
                batches=self._size,
                reason=why,
                is_crash=is_crash,
                is_sought=is_sought,
                replaces=None if is_crash or is_sought else self._replaced(position),
            )
        )

    def _replaced(self, position: _Position) -> float | None:
        """Returns the time of the record that the record of a bad step replaces, or
        None: the end of the search, if only its loss was bad."""
        if position >= self._search_end:
            return None
        ends = [each for each in self._records if _position(each) == self._search_end]
        bad = [each for each in ends if not (each["is_crash"] or each.get("is_sought"))]
        return _identity(bad[0])[0] if bad else None
