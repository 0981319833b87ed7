"""Decides the supervisor's next action from its observations; no process, no clock.

`decide` is called again after every event and at the time named by `Wait`. A failure
outweighs a preemption, and a signal to the supervisor outweighs both: the machine is
then going away, and only the restart code makes the platform start the run again.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from typing import NewType

ReturnCode = NewType(
    "ReturnCode", int
)  # as in subprocess: an exit code, or minus the number of a signal

_HOUR = 3600.0  # seconds
_FAILURES_PER_HOUR = 20
_HUNG = 128 + signal.SIGKILL  # exit code of a killed process in a shell


def describe_end(returncode: ReturnCode) -> str:
    """Returns the exit code, or the name of the terminating signal, as text."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Cause(enum.Enum):
    """Reason why a run of the workers ended."""

    FINISHED = "finished"
    PREEMPTION = "preemption"
    FAILURE = "failure"
    HANG = "hang"  # a kind of failure: no step boundary within the limit
    NO_PROGRESS = "no_progress"  # preempted repeatedly without a newer commit
    FAILURE_RATE = "failure_rate"  # too many failures within an hour
    MOVED = "moved"  # the checkpoint directory was moved or replaced
    STOPPED = "stopped"  # the supervisor received a signal to stop


OUTCOMES = {
    Cause.FINISHED: "training is complete",
    Cause.PREEMPTION: "limit of preemptions reached",
    Cause.FAILURE: "limit of failures reached",
    Cause.HANG: "limit of failures reached by hangs",
    Cause.NO_PROGRESS: "limit of preemptions without progress reached",
    Cause.FAILURE_RATE: "too many failures within an hour",
    Cause.MOVED: "checkpoint directory moved or replaced",
    Cause.STOPPED: "stopped by a signal, to be restarted by the platform",
}
"""Outcome of a supervisor as text, by the cause of its exit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits set by the user; times in seconds, None is without limit."""

    max_preemptions: int | None = None
    max_preemptions_without_progress: int | None = None  # in a row, without progress
    max_failures: int | None = 3  # in a row, without progress
    restart_codes: tuple[int, ...] = (143, 42)
    grace: float | None = None  # for committing and exiting after a signal to stop
    kill_after: float = 15.0  # for exiting after another worker failed, or a hang
    stacks_grace: float = 1.0  # for hung workers to write their stacks
    unkillable: float = 10.0  # for a process to end after SIGKILL
    backoff: float = 1.0
    backoff_max: float = 60.0
    backoff_reset: float = 600.0  # a longer run counts as progress and resets the delay

    @property
    def leave_grace(self) -> float:
        """Seconds for exiting after the commit, or after the end of the supervisor.

        No step is waited for then, so there is a limit even if `grace` is None.
        """
        return 35.0 if self.grace is None else self.grace

    @property
    def max_failures_per_hour(self) -> int | None:
        """Largest number of failures within an hour, with or without progress.

        A program that commits and then fails at once, every time, makes progress but is
        still faulty. The number is never smaller than the allowed number of failures in
        a row.
        """
        if self.max_failures is None:
            return None
        return max(_FAILURES_PER_HOUR, self.max_failures)

    def is_preempted(self, exit: WorkerExit) -> bool:
        """Returns whether a worker exited to be restarted.

        SIGTERM itself ends a worker only while no handler is installed: before the
        first handler, and after the last.
        """
        return exit.code in self.restart_codes or exit.returncode == -signal.SIGTERM

    def restart_code(self, exit: WorkerExit | None) -> int:
        """Returns the exit code that makes the platform restart the run.

        Args:
            exit: exit of a preempted worker, or None; the first restart code replaces
                an exit code that is not a restart code.
        """
        codes = self.restart_codes
        return exit.code if exit is not None and exit.code in codes else codes[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUsed:
    """Used parts of the budgets.

    Attributes:
        preemptions: total number of preemptions.
        failures: total number of failures.
        in_a_row: failures since the last progress.
        idle_in_a_row: preemptions since the last progress.
        failed_at: monotonic seconds of the failures of the last hour.
    """

    preemptions: int = 0
    failures: int = 0
    in_a_row: int = 0
    idle_in_a_row: int = 0
    failed_at: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of a worker.

    Attributes:
        worker: index of the worker.
        returncode: exit code as in subprocess, negative for a signal.
        at: monotonic seconds.
        was_asked: whether the supervisor had sent SIGTERM before.
    """

    worker: int
    returncode: ReturnCode
    at: float
    was_asked: bool = False

    @property
    def code(self) -> int:
        """Exit code as in a shell: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def describe(self) -> str:
        """Returns the exit code, or the name of the signal, as text."""
        return describe_end(self.returncode)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorState:
    """The observations for a decision; times are monotonic seconds.

    Attributes:
        now: present time.
        workers: number of workers that were started.
        started_at: time of the start.
        exits: ends of workers in the order of observation.
        stop_at: time of the signal to stop; None without a signal.
        asked_at: time at which the running workers were sent SIGTERM.
        killed_at: time at which the running workers were sent SIGKILL.
        hang_due: time at which the workers count as hung without another boundary; None
            without such a time.
        hung_at: time at which a hang was detected, and stacks were requested.
        urges: number of Ctrl-C after the signal to stop.
        has_progressed: whether the run has committed another step since its start; None
            if commits cannot be seen.
        spent: budgets used by earlier runs.
    """

    now: float
    workers: int
    started_at: float = 0.0
    exits: tuple[WorkerExit, ...] = ()
    stop_at: float | None = None
    asked_at: float | None = None
    killed_at: float | None = None
    hang_due: float | None = None
    hung_at: float | None = None
    urges: int = 0
    has_progressed: bool | None = False
    spent: BudgetUsed = BudgetUsed()

    @property
    def is_urged(self) -> bool:
        """Whether to stop waiting; the first urge only shows the awaited workers."""
        return self.urges > 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Do nothing before the next event, or before `until`."""

    until: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Report that the running workers hang, and request their stacks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendSigterm:
    """Send SIGTERM to the running workers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendSigkill:
    """Send SIGKILL to the running workers and to their children."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Restart all workers after `delay` seconds."""

    cause: Cause
    delay: float
    spent: BudgetUsed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExitSupervisor:
    """Exit the supervisor with the given code."""

    cause: Cause
    code: int
    spent: BudgetUsed
    is_over_budget: bool = False


Action = Wait | DumpStacks | SendSigterm | SendSigkill | Restart | ExitSupervisor


def decide(limits: RestartLimits, seen: SupervisorState) -> Action:
    """Returns the next action."""
    if len(seen.exits) < seen.workers:
        return _while_some_run(limits, seen)
    return _after_all(limits, seen)


def first_failure(limits: RestartLimits, seen: SupervisorState) -> WorkerExit | None:
    """Returns the first failure of a worker that was not asked to exit, or None.

    The ends of the other workers follow from this failure.
    """
    own = (e for e in seen.exits if not e.was_asked)
    return next((e for e in own if e.code and not limits.is_preempted(e)), None)


def leave_between_runs(limits: RestartLimits, spent: BudgetUsed) -> ExitSupervisor:
    """Returns the action after a signal to stop in the back-off, without workers."""
    return ExitSupervisor(
        cause=Cause.STOPPED, code=limits.restart_codes[0], spent=spent
    )


def _while_some_run(limits: RestartLimits, seen: SupervisorState) -> Action:
    if seen.killed_at is not None:
        return _after_kill(limits, seen, seen.killed_at)
    if seen.is_urged:
        return SendSigkill()
    if seen.asked_at is not None:
        # Workers asked to stop make a commit. After a failure or a preemption a commit
        # of all workers is impossible, so the running workers get a short time. Hung
        # workers get the same time, in which a merely slow worker can commit.
        is_whole = seen.hung_at is None and not _ended_by_signal(limits, seen)
        can_commit = seen.stop_at is not None and is_whole
        limit = limits.grace if can_commit else limits.kill_after
        if limit is None:  # a step may take any time: the platform kills
            return Wait(until=None)
        return _wait_or(SendSigkill(), seen.now, seen.asked_at + limit)
    is_failed = first_failure(limits, seen) is not None
    if seen.stop_at is not None or is_failed or _ended_by_signal(limits, seen):
        return SendSigterm()
    if seen.hung_at is not None:
        return _wait_or(SendSigterm(), seen.now, seen.hung_at + limits.stacks_grace)
    preempted = _first_preempted(limits, seen)
    if preempted is not None:
        return _wait_or(SendSigterm(), seen.now, preempted.at + limits.leave_grace)
    if seen.hang_due is not None:
        return _wait_or(DumpStacks(), seen.now, seen.hang_due)
    return Wait(until=None)  # workers may finish at different times


def _after_kill(
    limits: RestartLimits, seen: SupervisorState, killed_at: float
) -> Action:
    """Waits for killed processes; exits instead of restarting if a process survives.

    A process that survives SIGKILL hangs in the kernel; a restart beside it is unsafe.
    """
    if seen.now < killed_at + limits.unkillable:
        return Wait(until=killed_at + limits.unkillable)
    ended = _after_all(limits, seen)
    if isinstance(ended, ExitSupervisor):
        return ended
    failure = _failure(limits, seen)
    code = failure.code if failure else limits.restart_codes[0]
    return ExitSupervisor(cause=ended.cause, code=code, spent=ended.spent)


def _after_all(
    limits: RestartLimits, seen: SupervisorState
) -> Restart | ExitSupervisor:
    verdict = _after_own_end(limits, seen)
    if seen.stop_at is None:
        return verdict
    if all(e.code == 0 for e in seen.exits) and len(seen.exits) == seen.workers:
        return ExitSupervisor(cause=Cause.FINISHED, code=0, spent=seen.spent)
    preempted = _first_preempted(limits, seen)
    own = preempted if preempted and not preempted.was_asked else None
    first = _failure(limits, seen) or own
    came_first = first is not None and first.at < seen.stop_at
    # The run ended by a failure before the signal, which used up the budget.
    if (
        came_first
        and isinstance(first, _Failure)
        and isinstance(verdict, ExitSupervisor)
    ):
        return verdict
    return ExitSupervisor(
        cause=Cause.STOPPED,
        code=limits.restart_code(preempted),
        spent=verdict.spent if came_first else seen.spent,
    )


def _after_own_end(
    limits: RestartLimits, seen: SupervisorState
) -> Restart | ExitSupervisor:
    """Returns the action without a signal to stop."""
    failure = _failure(limits, seen)
    if failure is not None:
        return _after_failure(limits, seen, failure)
    preempted = _first_preempted(limits, seen)
    if preempted is not None:
        return _after_preemption(limits, seen, preempted)
    return ExitSupervisor(cause=Cause.FINISHED, code=0, spent=seen.spent)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A failure of the run: the end of a worker, or a hang."""

    cause: Cause
    code: int
    at: float


def _failure(limits: RestartLimits, seen: SupervisorState) -> _Failure | None:
    is_finished = len(seen.exits) == seen.workers and not any(
        each.code for each in seen.exits
    )
    if seen.hung_at is not None and not is_finished:  # else the workers were only slow
        return _Failure(cause=Cause.HANG, code=_HUNG, at=seen.hung_at)
    if (own := first_failure(limits, seen)) is not None:
        return _Failure(cause=Cause.FAILURE, code=own.code, at=own.at)
    return None


def _after_failure(
    limits: RestartLimits, seen: SupervisorState, failure: _Failure
) -> Restart | ExitSupervisor:
    is_long = failure.at - seen.started_at >= limits.backoff_reset
    # A hang may itself take as long as a long run.
    is_gain = is_long and failure.cause is not Cause.HANG
    has_gained = is_gain if seen.has_progressed is None else seen.has_progressed
    spent = dataclasses.replace(
        seen.spent,
        failures=seen.spent.failures + 1,
        in_a_row=1 if has_gained else seen.spent.in_a_row + 1,
        failed_at=(
            *(each for each in seen.spent.failed_at if each > failure.at - _HOUR),
            failure.at,
        ),
    )
    for cause, count, allowed in (
        (failure.cause, spent.in_a_row, limits.max_failures),
        (Cause.FAILURE_RATE, len(spent.failed_at), limits.max_failures_per_hour),
    ):
        if allowed is not None and count > allowed:
            return ExitSupervisor(
                cause=cause, code=failure.code, spent=spent, is_over_budget=True
            )
    row = 1 if is_long else spent.in_a_row
    return Restart(cause=failure.cause, delay=_backoff(limits, row), spent=spent)


def _after_preemption(
    limits: RestartLimits, seen: SupervisorState, preempted: WorkerExit
) -> Restart | ExitSupervisor:
    lasted = preempted.at - seen.started_at
    is_long = lasted >= limits.backoff_reset
    has_gained = is_long if seen.has_progressed is None else seen.has_progressed
    spent = dataclasses.replace(
        seen.spent,
        preemptions=seen.spent.preemptions + 1,
        in_a_row=0 if has_gained else seen.spent.in_a_row,
        idle_in_a_row=0 if has_gained or is_long else seen.spent.idle_in_a_row + 1,
    )
    for cause, count, allowed in (
        (Cause.PREEMPTION, spent.preemptions, limits.max_preemptions),
        (
            Cause.NO_PROGRESS,
            spent.idle_in_a_row,
            limits.max_preemptions_without_progress,
        ),
    ):
        if allowed is not None and count > allowed:
            return ExitSupervisor(
                cause=cause,
                code=limits.restart_code(preempted),
                spent=spent,
                is_over_budget=True,
            )
    # The duration of the run is subtracted: a run that trained for a while restarts at
    # once. A run that exits at once, every time, must not spin, even with commits.
    delay = max(0.0, _backoff(limits, max(1, spent.idle_in_a_row)) - lasted)
    return Restart(cause=Cause.PREEMPTION, delay=delay, spent=spent)


def _backoff(limits: RestartLimits, row: int) -> float:
    """Returns the delay after the last of `row` ends in a row."""
    # The exponent is capped because a float overflows.
    return min(limits.backoff_max, limits.backoff * 2.0 ** min(row - 1, 60))


def _first_preempted(limits: RestartLimits, seen: SupervisorState) -> WorkerExit | None:
    """Returns the first preempted worker, preferably without a supervisor's SIGTERM."""
    left = [e for e in seen.exits if limits.is_preempted(e)]
    return next((e for e in left if not e.was_asked), left[0] if left else None)


def _ended_by_signal(limits: RestartLimits, seen: SupervisorState) -> bool:
    """Returns whether SIGTERM ended a worker before its handler was installed.

    The other workers cannot commit without the ended worker, and may wait for minutes
    in the start.
    """
    return any(e.returncode < 0 and limits.is_preempted(e) for e in seen.exits)


def _wait_or(
    action: DumpStacks | SendSigterm | SendSigkill, now: float, at: float
) -> Action:
    return action if now >= at else Wait(until=at)
