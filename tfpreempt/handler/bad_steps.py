"""`BadSteps`, and the records of a run's bad steps, which fits and loops share.

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

import dataclasses
import logging
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

log = logging.getLogger(__name__)

_FIELDS = {
    **dict.fromkeys(("fit", "epoch", "batch", "batches"), "count"),
    "is_crash": "flag",
    "is_sought": "flag?",
    "replaces": "time?",
    "found_at": "time?",  # of a copy: `wall` of the original record
}
_TIMES = ("wall", "monotonic")
Position = tuple[int, int, int]  # number of the fit, epoch, first batch of the step


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


def positions(
    records: Iterable[Mapping[str, Any]], crashes: int | None
) -> list[Position]:
    """Returns the steps to leave out, in the order in which they were found.

    Args:
        records: records of the event `BadStep`, oldest first.
        crashes: value of `BadSteps.crashes`.
    """
    counts: dict[Position, float] = {}
    for each in records:
        if each.get("is_sought"):
            continue
        position = _position(each)
        counts[position] = counts.get(position, 0) + (1 if each["is_crash"] else NEVER)
    needed = NEVER if crashes is None else crashes
    return [position for position, count in counts.items() if count >= needed]


def _records(journal: Journal) -> list[Mapping[str, Any]]:
    """Returns the valid records of bad steps in a journal, oldest first.

    A record of which the journal has copies (see `BadStepRecords._read`) is returned
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


def _position(record: Mapping[str, Any]) -> Position:
    """Returns the step of a record."""
    return record["fit"], record["epoch"], record["batch"]


def name_steps(found: Iterable[Position]) -> str:
    """Returns steps as text."""
    return ", ".join(
        f"batch {batch} of epoch {epoch}{f' of fit {fit}' if fit > 1 else ''}"
        for fit, epoch, batch in found
    )


_NO_OPTIONS = BadSteps()  # in training without `on_bad_step`


class BadStepRecords:
    """Records the bad steps of a run, and ends the process after a bad step. Use on the
    main thread only.

    Args:
        options: the argument `on_bad_step`; None: no step is bad.
        session: the session of this process.
        run: the run of the fit or handler.

    Attributes:
        options: the options; default options without `on_bad_step`.
        positions: the steps to leave out, in the order in which they were found.
        size: number of batches of a step.
    """

    def __init__(self, options: BadSteps | None, session: Session, run: Run) -> None:
        self.options = options or _NO_OPTIONS
        self.positions: list[Position] = []
        self.size = 1
        self._session = session
        self._run = run
        self._records: list[Mapping[str, Any]] = []
        # Number of the run's steps at the newest check that found finite variables.
        self._finite_at = -1

    @property
    def is_active(self) -> bool:
        """Whether `on_bad_step` was given."""
        return self.options is not _NO_OPTIONS

    @property
    def search_end(self) -> Position:
        """The step until which the variables are checked after each step."""
        bad = [_position(each) for each in self._records if not each["is_crash"]]
        return max(bad, default=(0, 0, 0))

    def read(self) -> list[Mapping[str, Any]]:
        """Reads and returns the records of the steps to leave out, before training.

        Raises:
            BadStepsError: more steps are left out than the limit.
        """
        self._records = self._read()
        self.positions = positions(self._records, self.options.crashes)
        if len(self.positions) > self.options.limit:
            raise errors.BadStepsError(
                f"{len(self.positions)} steps are left out already; expected at most "
                f"limit={self.options.limit}. The bad steps, counted from 0: "
                f"{name_steps(self.positions)}. Raise limit= of BadSteps"
            )
        return [each for each in self._records if _position(each) in self.positions]

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

    # --- a bad step ------------------------------------------------------------------

    def check_variables(self, why: str, last: Position) -> None:
        """Ends the process if a step has made a variable NaN or infinite.

        Args:
            why: text that names the variable; "" if all variables are finite.
            last: the newest trained step.

        Raises:
            SystemExit: a step was bad; the next start leaves the step out, or finds
                the step.
            BadStepsError: the limit was reached, the journal cannot be written, or no
                step has caused this.
        """
        steps = self._run.steps_made
        if not why:
            self._finite_at = steps
            return
        if steps in (0, self._finite_at):
            raise errors.BadStepsError(
                f"{why}, and no step has caused this: the variable was finite after "
                f"the newest step ({name_steps([last])}). Correct the callback, or "
                "the other code between the steps, that assigns the variable"
                if steps
                else f"{why} before the first step of this start; expected a model "
                "whose weights are finite. Correct the initial weights"
            )
        if self._finite_at == steps - 1:
            self.end_because_of(last, why)
        self._record(last, why, is_sought=True)
        self._end(last, why, is_sought=True)

    def check_restored(self, why: str) -> None:
        """Handles the check of the variables of the restored commit.

        Args:
            why: text that names a variable with NaN; "" if all variables are finite.

        Raises:
            BadStepsError: a variable is NaN or infinite.
        """
        if why:
            raise errors.BadStepsError(
                f"In the newest commit of {self._run.directory.path!r} {why}, so the "
                "commit contains a bad step, and on_bad_step cannot return to an "
                "earlier step. Move the newest commits to another directory "
                "(`tfpreempt inspect` lists the commits), and start again"
            )
        self._finite_at = self._run.steps_made

    @property
    def are_finite(self) -> bool:
        """Whether the variables were checked after the newest step, and were finite."""
        return self._finite_at == self._run.steps_made

    def end_because_of(self, position: Position, why: str) -> NoReturn:
        """Records a bad step, and ends the process.

        Args:
            position: the bad step.
            why: the reason.

        Raises:
            SystemExit: the next start leaves the step out.
            BadStepsError: the limit was reached, or the journal cannot be written.
        """
        self.add(position, why)
        self._end(position, why)

    def _end(
        self, position: Position, why: str, *, is_sought: bool = False
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
                f"{why} at {name_steps([position])}, and the step could not be "
                f"recorded in the journal {str(self._run.journal.path)!r}; expected a "
                "file that this user owns, and that no other user can write. Correct "
                "the owner, the permissions or the space on the disk, and start again"
            )
        where = f"{why} {'after' if is_sought else 'at'} {name_steps([position])}"
        what = (
            "finds the step that caused this" if is_sought else "leaves this step out"
        )
        self._session.exit.leave(Outcome.LOST, f"{where}; the next start {what}")
        raise errors.UsageError(
            "the exit_fn returned after a bad step; expected that exit_fn ends the "
            "process, because the state in memory contains the bad step"
        )

    def crashed(self, position: Position, error: BaseException) -> None:
        """Records a crash of a step; the caller raises the error.

        A crash in the first step of a run is recorded only if the step has crashed
        before: the cause may be an error of the program.

        Args:
            position: the step.
            error: error raised by the step.

        Raises:
            BadStepsError: the limit was reached.
        """
        crashes = self.options.crashes
        if not isinstance(error, Exception) or crashes is None:
            return
        count = 1 + sum(_position(each) == position for each in self._records)
        if count >= crashes:
            self.add(position, describe(error), is_crash=True, cause=error)
            add_note(
                error,
                f"the next start leaves out {name_steps([position])}: crash {count}",
            )
        elif count > 1 or self._run.step:
            self._record(position, describe(error), is_crash=True)

    def add(
        self,
        position: Position,
        why: str,
        *,
        is_crash: bool = False,
        cause: BaseException | None = None,
    ) -> None:
        """Records a step that the next start leaves out.

        Args:
            position: the step.
            why: the reason.
            is_crash: whether the step has raised an error.
            cause: the error that ends the process; None without an error.

        Raises:
            BadStepsError: the limit was reached.
        """
        replaced = self.search_end if self._replaced(position) else None
        others = [each for each in self.positions if each != replaced]
        if len(others) >= self.options.limit:
            raise errors.BadStepsError(
                f"{why}, and limit={self.options.limit} steps are left out already. "
                "The bad steps, counted from 0: "
                f"{name_steps([*others, position])}. Check the data of these "
                "batches, and the learning rate; or raise limit= of BadSteps"
            ) from cause
        self._record(position, why, is_crash=is_crash)

    def _record(
        self,
        position: Position,
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
                batches=self.size,
                reason=why,
                is_crash=is_crash,
                is_sought=is_sought,
                replaces=None if is_crash or is_sought else self._replaced(position),
            )
        )

    def _replaced(self, position: Position) -> float | None:
        """Returns the time of the record that the record of a bad step replaces, or
        None: the end of the search, if only its loss was bad."""
        if position >= self.search_end:
            return None
        ends = [each for each in self._records if _position(each) == self.search_end]
        bad = [each for each in ends if not (each["is_crash"] or each.get("is_sought"))]
        return _identity(bad[0])[0] if bad else None
