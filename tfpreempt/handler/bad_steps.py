"""`BadSteps`, and the search for the bad steps of a run, which fits and loops share.

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

Several workers stop together: a worker that finds a bad step opens a round, as a notice
does. All workers train up to the agreed step, so that no worker waits in a collective
operation for a worker that has exited. The parts of the save at this step fail on each
worker that has found the step, and no worker commits without the parts of all workers.
The chief records the step in its journal before any worker exits. At the next start,
the chief sends its records to all workers, which leave the same steps out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.mirror.journal_mirror import fetch
from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.coordination import rendezvous
from tfpreempt.core import frameworks
from tfpreempt.core.compat import add_note
from tfpreempt.core.events import BAD_STEP, BadStep, Notice, Outcome, name_steps
from tfpreempt.core.journal import Journal
from tfpreempt.core.record_validation import validate_types
from tfpreempt.handler.collective_save import Veto, VetoError, first_of
from tfpreempt.handler.exit import describe
from tfpreempt.handler.registration import START_TIMEOUT
from tfpreempt.handler.run import NEVER, Run, next_stop, record_bad_step
from tfpreempt.handler.session import OPENS_WITHIN, Session
from tfpreempt.handler.training_end import is_end_of_data

log = logging.getLogger(__name__)

_FIELDS = {
    **dict.fromkeys(("fit", "epoch", "batch", "batches"), "count"),
    "is_crash": "flag",
    "is_sought": "flag?",
    "replaces": "time?",
    "found_at": "time?",  # of a copy: `wall` of the original record
}
_TIMES = ("wall", "monotonic")
Position = tuple[int, int, int]
"""A step: number of the fit, epoch, first batch of the step. In a custom loop, the fit
and the epoch are 0, and the last number is the number of `run()` calls before the
step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadSteps:
    """The steps that `on_bad_step` of a callback or handler leaves out of training.

    A step is bad if its loss is NaN or infinite, or if the step makes a variable NaN;
    in a fit, also if the step makes a weight infinite. After a bad step the process
    exits with the restart code; the next start resumes from the last commit, and leaves
    the batches of the step out.
    docs/fit/bad-steps.md describes the details.

    Args:
        spike_factor: a step is also bad if its loss is more than this number times the
            mean loss of the epoch's earlier steps. None: no such check. Only in
            `model.fit`, for models with the `train_step` of Keras.
        crashes: number of starts in which a step has raised an error, after which the
            step is left out. None: errors are never a reason. An error of the program
            or of the storage counts too, so a good step may be left out. Only in one
            process.
        limit: maximum number of steps that are left out of a run. One more bad step
            raises BadStepsError.
        check_every: number of steps after which the losses are read. Reading a loss
            waits for the device. Before each save the losses are read too, and the
            variables are checked.
        loss: name of the loss in the logs of the train step; in a custom loop, key of
            the loss if the step function returns a dict.

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

    A record of which the journal has copies (see `BadStepFinder._read`) is returned
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


_NO_OPTIONS = BadSteps()  # in training without `on_bad_step`


class BadStepFinder:
    """Finds the bad steps of a run by their losses and by the variables, records the
    steps, and ends the process. Use on the main thread only.

    A subclass for fits and a subclass for loops define `why_bad` and
    `find_bad_variable`.

    Args:
        options: the argument `on_bad_step`; None: no step is bad.
        session: the session of this process.
        run: the run of the fit or handler.

    Raises:
        ConfigurationError: an option is not supported with several workers.

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
        self._unread: list[tuple[Position, Any]] = []  # steps with their losses
        self._last: Position = (0, 0, 0)  # the newest trained step
        # Number of the run's steps at the newest check that found finite variables.
        self._finite_at = -1
        self._veto: Veto | None = None  # of several workers, after a bad step
        self._left_at: int | None = None  # value of `Run.left_at` before the stop
        if not self.is_shared:
            return
        if self.options.crashes is not None:
            raise errors.ConfigurationError(
                f"crashes is {self.options.crashes!r} in a run of "
                f"{session.cluster.num_workers} workers; expected None, because an "
                "error of a step on one worker ends the step of every worker. Leave "
                "crashes out, or train in one process"
            )
        # The part of a worker confirms that the worker has found no bad step.
        run.directory.contents.needs_every_worker = True

    @property
    def is_active(self) -> bool:
        """Whether `on_bad_step` was given."""
        return self.options is not _NO_OPTIONS

    @property
    def is_shared(self) -> bool:
        """Whether several workers must agree on each bad step."""
        return self.is_active and self._session.cluster.num_workers > 1

    @property
    def search_end(self) -> Position:
        """The step until which the variables are checked after each step."""
        bad = [_position(each) for each in self._records if not each["is_crash"]]
        return max(bad, default=(0, 0, 0))

    def read(self) -> list[Mapping[str, Any]]:
        """Reads and returns the records of the steps to leave out, before training.

        Every worker of a run calls the method, and gets the records of the chief.

        Raises:
            BadStepsError: more steps are left out than the limit.
            WorkerMismatchError: a worker has other options.
            PeerTimeoutError: a worker is missing, or has no options.
        """
        self._records = self._agree() if self.is_shared else self._read()
        self.positions = positions(self._records, self.options.crashes)
        if len(self.positions) > self.options.limit:
            raise errors.BadStepsError(
                f"{len(self.positions)} steps are left out already; expected at most "
                f"limit={self.options.limit}. The bad steps, counted from 0: "
                f"{name_steps(self.positions)}. Raise limit= of BadSteps"
            )
        return [each for each in self._records if _position(each) in self.positions]

    def _agree(self) -> list[Mapping[str, Any]]:
        """Returns the chief's records of earlier starts, on every worker."""
        session, mine = self._session, repr(self.options)
        try:
            plan, _, problems = rendezvous.agree(
                session.executor.store,
                f"tfpreempt/{session.incarnation}/start/{session.start_count}/bad-steps",
                session.cluster,
                lambda: ({"options": mine, "records": self._read()}, None),
                lambda plan: (None if plan["options"] == mine else mine, None),
                START_TIMEOUT,
            )
        except errors.PeerTimeoutError as error:
            add_note(error, "on_bad_step must be given on every worker, or on none")
            raise
        if problems:
            given = "; ".join(f"worker {i}: {each}" for i, each in problems.items())
            raise errors.WorkerMismatchError(
                f"on_bad_step differs between the workers (worker 0: {plan['options']};"
                f" {given}); expected the same value on every worker"
            )
        found: list[Mapping[str, Any]] = plan["records"]
        return found

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

    def warn_of_left_out(
        self, what: str, found: Sequence[Position], *, is_resumed: bool
    ) -> None:
        """Logs the steps to leave out, on the chief.

        Args:
            what: beginning of the sentence.
            found: the steps.
            is_resumed: whether training resumes from a commit.
        """
        if found and self.can_record:
            # From scratch, the order of the data depends on the program's seed.
            seed = ". The numbers are valid if each start has the same seed"
            log.warning(
                "%s, because earlier starts have found bad steps (counted from 0; see "
                "%s): %s%s",
                what,
                self._run.journal.path,
                name_steps(found),
                "" if is_resumed else seed,
            )

    # --- the losses and the variables ------------------------------------------------

    def why_bad(self, position: Position, loss: Any) -> str:
        """Returns the reason why a step is bad; "" for a good step. Called once for
        each good step.

        Args:
            position: the step.
            loss: the loss of the step, which may still be computed by the device.
        """
        raise NotImplementedError

    def find_bad_variable(self) -> str:
        """Returns a text that names a variable with NaN or infinity; "" if there is
        none."""
        raise NotImplementedError

    def find(self) -> tuple[Position, str] | None:
        """Reads the losses; returns the first bad step, with the reason, or None.

        The loss of a bad step stays unread: the state in memory must never be saved.
        """
        while self._unread:
            position, loss = self._unread[0]
            if why := self.why_bad(position, loss):
                return position, why
            self._unread.pop(0)
        return None

    def check_losses(self) -> None:
        """Ends the process if the loss of a step was bad; see `check`."""
        if not self.is_stopping() and (found := self.find()) is not None:
            self.end_because_of(*found)

    def check(self) -> None:
        """Ends the process if a step was bad, by its loss or by a variable. Call before
        a save.

        With several workers, the method returns, and all workers end together at the
        next boundary on which they agree.

        Raises:
            SystemExit: a step was bad; the next start leaves the step out, or finds
                the step.
            BadStepsError: the limit was reached, the journal cannot be written, or a
                variable is not finite for another reason than a step.
        """
        self.check_losses()
        if self.is_active and not self.is_stopping():
            self.check_variables()

    def check_variables(self) -> None:
        """Ends the process, as `check` does, if a variable is NaN or infinite."""
        why, steps, last = self.find_bad_variable(), self._run.steps_made, self._last
        if not why:
            self._finite_at = steps
            return
        if not steps and self._run.candidate is not None:
            raise self.commit_is_bad(why)
        if steps in (0, self._finite_at):
            raise errors.BadStepsError(
                f"{why}, and no step has caused this: the variable was finite after "
                f"the newest step ({name_steps([last])}). Correct the callback, or "
                "the other code between the steps, that assigns the variable"
                if steps
                else f"{why} before the first step of this start; expected a model "
                "whose weights are finite. Correct the initial weights"
            )
        self.end_because_of(last, why, is_sought=self._finite_at != steps - 1)

    def commit_is_bad(self, why: str) -> errors.BadStepsError:
        """Returns the error for a restored commit that contains a bad step.

        Args:
            why: text that names a variable or a loss that is not finite.
        """
        return errors.BadStepsError(
            f"In the newest commit of {self._run.directory.path!r} {why}, so the "
            "commit contains a bad step, and on_bad_step cannot return to an "
            "earlier step. Move the newest commits to another directory "
            "(`tfpreempt inspect` lists the commits), and start again"
        )

    @property
    def are_finite(self) -> bool:
        """Whether the variables were checked after the newest step, and were finite."""
        return self._finite_at == self._run.steps_made

    # --- a bad step ------------------------------------------------------------------

    def end_because_of(
        self, position: Position, why: str, *, is_sought: bool = False
    ) -> None:
        """Records a bad step, and ends the process.

        With several workers, the method returns: all workers stop at the next boundary
        on which they agree, and no worker commits until then.

        Args:
            position: the bad step.
            why: the reason.
            is_sought: whether `position` is only the newest trained step, so that the
                next start must find the bad step.

        Raises:
            SystemExit: the next start leaves the step out, or finds the step.
            BadStepsError: the limit was reached, or the journal cannot be written.
        """
        found = self._event(position, why, is_sought=is_sought)
        # With several workers, the next start checks the limit, on every worker: an
        # error on this worker alone would be a failed step on the other workers.
        if self.is_shared:
            self._stop_all(found)
            return
        if not is_sought:
            self._check_limit(position, why)
        record_bad_step(self._run, found, _described(found))
        self._session.exit.leave(Outcome.LOST, _described(found))
        raise _exit_fn_returned()

    # --- several workers -------------------------------------------------------------

    @property
    def can_record(self) -> bool:
        """Whether the journal of this worker has the records: only the chief's has."""
        return self._session.cluster.is_chief

    def _stop_all(self, found: BadStep) -> None:
        """Makes all workers stop at a common step, and this worker veto all commits.

        Args:
            found: the event to record, see `end_because_of`.
        """
        coordinator, worker = self._session.coordinator, self._session.cluster.worker
        self._veto = Veto(
            reason=f"worker {worker}: {_described(found)}",
            run=self._run.start.token,
            bad_step=found,
        )
        self._left_at = self._run.left_at
        coordinator.notice(
            Notice(
                source=BAD_STEP,
                worker=worker,
                grace_seconds=None,
                received_at=coordinator.clock.monotonic(),
            ),
            veto=dataclasses.asdict(self._veto),
        )
        # Usually the next boundary is the agreed boundary then. If a periodic save is
        # open, the round opens only after the save, for which this worker is needed.
        coordinator.wait_until_open(OPENS_WITHIN)
        if self.can_record:
            # Another worker may have found an earlier step, which caused this one.
            vetoes = [self._veto, *map(Veto.parse, coordinator.notes.vetoes)]
            self._veto = first_of(vetoes)
            record_bad_step(self._run, self._veto.bad_step, self._veto.reason)

    def is_stopping(self) -> bool:
        """Returns whether this worker has found a bad step, and waits for the stop of
        all workers; False in a single process.

        Raises:
            UsageError: the workers have stopped, and the exit function has returned.
        """
        if self._veto is not None and self._run.left_at != self._left_at:
            raise _exit_fn_returned()
        return self._veto is not None

    @property
    def refusal(self) -> VetoError | None:
        """The error to raise in a save, if this worker has found a bad step."""
        return None if self._veto is None else VetoError(self._veto)

    def _check_before_save(self) -> Exception | None:
        """Calls `check` before a save, unless just called for the same state. Some
        saves follow no call of the program, such as the save at the end of a program
        that does not call `close`.

        Returns:
            With several workers, the error that this worker must raise in the save,
            because this worker has found a bad step.
        """
        try:
            if self._unread or not self.are_finite:
                self.check()
        except errors.BadStepsError as error:
            if self.is_shared:
                return error
            raise
        return self.refusal

    # --- the records -----------------------------------------------------------------

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
            self.record(position, describe(error), is_crash=True, cause=error)
            add_note(
                error,
                f"the next start leaves out {name_steps([position])}: crash {count}",
            )
        elif count > 1 or self._run.step:
            self._run.record(self._event(position, describe(error), is_crash=True))

    def record(
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
        self._check_limit(position, why, cause)
        self._run.record(self._event(position, why, is_crash=is_crash))

    def _check_limit(
        self, position: Position, why: str, cause: BaseException | None = None
    ) -> None:
        """Raises BadStepsError if no more steps may be left out; see `record`."""
        replaced = self.search_end if self._replaced(position) else None
        others = [each for each in self.positions if each != replaced]
        if len(others) >= self.options.limit:
            raise errors.BadStepsError(
                f"{why}, and limit={self.options.limit} steps are left out already. "
                "The bad steps, counted from 0: "
                f"{name_steps([*others, position])}. Check the data of these "
                "batches, and the learning rate; or raise limit= of BadSteps"
            ) from cause

    def followed_bad_step(self, error: BaseException) -> bool:
        """Records the bad step before an error of the program, which the caller raises.

        Args:
            error: the error, which ends the process before a call of `check`.

        Returns:
            Whether a step was bad.

        Raises:
            BadStepsError: the limit was reached.
        """
        found = None
        # Ignore errors: JAX may raise the error of a step when the loss is read.
        with contextlib.suppress(Exception):
            found = self.find() if isinstance(error, Exception) else None
        if found is None:
            return False
        # Recorded before; or the chief or the next start finds the step.
        if not self.is_stopping() and self.can_record:
            position, why = found
            self.record(position, why, cause=error)
            where = f"{why} at {name_steps([position])}"
            add_note(error, f"{where}; the next start leaves this step out")
        return True

    def _event(
        self,
        position: Position,
        why: str,
        *,
        is_crash: bool = False,
        is_sought: bool = False,
    ) -> BadStep:
        fit, epoch, batch = position
        return BadStep(
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

    def _replaced(self, position: Position) -> float | None:
        """Returns the time of the record that the record of a bad step replaces, or
        None: the end of the search, if only its loss was bad."""
        if position >= self.search_end:
            return None
        ends = [each for each in self._records if _position(each) == self.search_end]
        bad = [each for each in ends if not (each["is_crash"] or each.get("is_sought"))]
        return _identity(bad[0])[0] if bad else None


def _described(found: BadStep) -> str:
    """Returns the reason of an exit because of a bad step."""
    step = name_steps([(found.fit, found.epoch, found.batch)])
    if found.is_sought:
        return (
            f"{found.reason} after {step}; the next start finds the step that caused "
            "this"
        )
    return f"{found.reason} at {step}; the next start leaves this step out"


def _exit_fn_returned() -> errors.UsageError:
    return errors.UsageError(
        "the exit_fn returned after a bad step; expected that exit_fn ends the "
        "process, because the state in memory contains the bad step"
    )


class LoopBadSteps(BadStepFinder):
    """Finds the bad steps of a custom loop, and knows the steps to leave out. Use on
    the main thread only.

    A step is identified by the number of `run()` calls before the step, over all
    restarts. A step that is left out counts as a call. So the numbers of later steps do
    not change, and a commit shows whether the step was before or after the commit.

    Args:
        options: the argument `on_bad_step`.
        session: the session of this process.
        run: the run of the handler; its commit is already restored.
        checkpoint: checkpoint object of the program; None for named States alone.

    Raises:
        ConfigurationError: an option is not supported in loops, or with several
            workers.
        BadStepsError: more steps are left out than the limit.
        WorkerMismatchError: a worker has other options.
    """

    def __init__(
        self, options: BadSteps, session: Session, run: Run, checkpoint: Any
    ) -> None:
        if options.spike_factor is not None:
            raise errors.ConfigurationError(
                f"spike_factor is {options.spike_factor!r} for a custom loop; expected "
                "None, because the losses of the steps before a restart are not known. "
                "Leave spike_factor out"
            )
        super().__init__(options, session, run)
        self._checkpoint = checkpoint
        self._unreadable = -1  # newest step that was left out and could not be read
        self._handled: BaseException | None = None  # newest error of a step
        self._failed_at = -1  # newest step that has raised an error
        self._has_warned = False
        self.read()
        found = [each for each in self.positions if _step(run.step) <= each < (1, 0, 0)]
        self._left_out = {number for _, _, number in found}
        self.warn_of_left_out(
            "run() will return None without training at these calls",
            found,
            is_resumed=run.candidate is not None,
        )

    # --- the steps to leave out ------------------------------------------------------

    def leaves_out(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether the next step is left out.

        Args:
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.

        Raises:
            ConfigurationError: the step has no arguments.
        """
        if not (args or kwargs):
            raise errors.ConfigurationError(
                "run() was called with a step function without arguments; with "
                "on_bad_step, expected the batch, the number of the batch or the "
                "iterator as an argument, because otherwise the batch of a bad step "
                "cannot be left out. Write run(step, iterator), with next(iterator) "
                "inside the step"
            )
        run = self._run
        # At the end of a replay, the call saves the state and exits instead.
        return run.step in self._left_out and run.steps_made < next_stop(run, NEVER)

    def skip(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reads the batch of a step that is left out: one element of each iterator
        among the arguments of the step.

        Raises:
            Exception: an iterator has ended.
        """
        for each in (*args, *kwargs.values()):
            if isinstance(each, Iterator):
                try:
                    next(each)
                except Exception as error:
                    if is_end_of_data(error):
                        raise
                    # Perhaps the reason why the step is left out.
                    log.warning(
                        "the batch of a step that is left out cannot be read: %s", error
                    )
                    self._unreadable = self._run.step

    # --- the losses and the variables ------------------------------------------------

    def add(self, result: Any) -> None:
        """Handles the end of a step.

        Args:
            result: return value of the step function.
        """
        self._last = _step(self._run.step - 1)
        loss = find_loss(result, self.options.loss)
        if loss is not None:
            self._unread.append((self._last, loss))
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "the step function has returned %s; with on_bad_step, expected the "
                "loss: a number, a tuple whose first item is a number, or a dict with "
                "the number %r. Without the loss, bad steps are found only by NaN in "
                "the variables",
                type(result).__name__,
                self.options.loss,
            )
        if self._is_searching or len(self._unread) >= self.options.check_every:
            self._run.stop_at = min(self._run.stop_at, self._run.steps_made)

    @property
    def _is_searching(self) -> bool:
        return self._last <= self.search_end

    def check(self, *, will_save: bool = True) -> None:
        """Ends the process if a step was bad; see `BadStepFinder.check`. Call between
        two steps.

        Args:
            will_save: whether a save may follow. If False, the variables are checked
                only before the first step, and in the search for a bad step.
        """
        if not (will_save or self._run.steps_made == 0 or self._is_searching):
            self.check_losses()
            return
        # Not before: the run of a handler that is dropped before training must not be
        # kept alive by a cycle.
        self._run.before_save = self._check_before_save
        super().check()

    def why_bad(self, position: Position, loss: Any) -> str:
        # The program may have donated the loss to a computation of JAX.
        value = 0.0 if getattr(loss, "is_deleted", bool)() else float(loss)
        return "" if math.isfinite(value) else f"the loss is {value}"

    def find_bad_variable(self) -> str:
        """Returns a text that names a variable with NaN; "" if there is none. Infinity
        is often the initial value of a mask or of the smallest loss."""
        for adapter in frameworks.adapters("values"):
            for what in adapter.with_nan(self._checkpoint, REGISTRY.in_order()):
                return f"{what} contains NaN"
        return ""

    # --- errors ----------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Records a crash of a step; the caller raises the error.

        If an earlier step was bad, records the earlier step instead, because its state
        may be the cause of the crash.

        Args:
            error: error raised by the step.

        Raises:
            BadStepsError: the limit was reached, or the data have ended after a step
                that was left out and could not be read.
        """
        number = self._run.step
        if is_end_of_data(error):
            if self._unreadable == number - 1:
                raise errors.BadStepsError(
                    f"The data cannot be read past step {number - 1}: reading the "
                    "batch raised an error, and then the data ended, as a Python "
                    "generator ends after an error. Catch the error in the generator, "
                    "and continue with the next batch"
                ) from error
            return
        self._handled = error
        is_retry = number == self._failed_at  # only starts count
        self._failed_at = number
        if not (self.followed_bad_step(error) or is_retry):
            self.crashed(_step(number), error)

    def loop_failed(self, error: BaseException) -> None:
        """Records the bad step before an error of the loop; the caller raises the
        error.

        Args:
            error: the error, which ends the process before a call of `check`.

        Raises:
            BadStepsError: the limit was reached.
        """
        if error is not self._handled and not isinstance(error, errors.BadStepsError):
            self.followed_bad_step(error)


def _step(number: int) -> Position:
    """Returns a step of a custom loop as a position."""
    return 0, 0, number


def find_loss(result: Any, name: str) -> Any:
    """Returns the loss that a step function has returned: a number, the first item of a
    tuple or list, or an item of a dict. None if this is not a real number.

    Args:
        result: return value of the step function.
        name: key of the loss in a dict.
    """
    if isinstance(result, Mapping):
        result = result.get(name)
    elif isinstance(result, tuple | list) and result:
        result = result[0]
    if isinstance(result, int | float):
        return result
    kind = getattr(result, "dtype", None)
    is_real = str(getattr(kind, "name", kind)).startswith(("float", "bfloat", "int"))
    if not is_real or getattr(result, "shape", None) != ():
        return None
    # A variable may have another value when the loss is read.
    return result.read_value() if hasattr(result, "read_value") else result
