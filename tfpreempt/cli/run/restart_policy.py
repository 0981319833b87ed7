"""Decides the supervisor's next action from its observations.

The module starts no process, and reads no clock. The supervisor calls `decide` after
every event, and at the time that the last `Wait` contains. If a failure and a
preemption occur together, the run counts as failed. If the supervisor has received a
signal to stop, the signal decides: the machine will be taken away, and only an exit
with the restart code makes the platform start the run again.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from typing import NewType

ReturnCode = NewType(
    "ReturnCode", int
)  # as in subprocess: an exit code, or the negative number of a signal

_HOUR = 3600.0  # seconds
_FAILURES_PER_HOUR = 20
_HANG_CODE = 128 + signal.SIGKILL  # exit code of a killed process in a shell


def describe_end(returncode: ReturnCode) -> str:
    """Returns the exit code, or the name of the signal that ended the process."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Cause(enum.Enum):
    """Reason why the workers have ended."""

    FINISHED = "finished"
    PREEMPTION = "preemption"
    FAILURE = "failure"
    HANG = "hang"  # a kind of failure: no step boundary within the timeout
    NO_PROGRESS = "no_progress"  # preempted repeatedly without a newer commit
    FAILURE_RATE = "failure_rate"  # too many failures within an hour
    MOVED = "moved"  # the checkpoint directory was moved or replaced
    PERMANENT = "permanent"  # an error that each restart would raise again
    STOPPED = "stopped"  # the supervisor received a signal to stop


OUTCOMES = {
    Cause.FINISHED: "training is complete",
    Cause.PREEMPTION: "limit of preemptions reached",
    Cause.FAILURE: "limit of failures reached",
    Cause.HANG: "limit of failures reached by hangs",
    Cause.NO_PROGRESS: "limit of preemptions without progress reached",
    Cause.FAILURE_RATE: "too many failures within an hour",
    Cause.MOVED: "checkpoint directory moved or replaced",
    Cause.PERMANENT: "an error that a restart cannot correct",
    Cause.STOPPED: "stopped by a signal, to be restarted by the platform",
}
"""For every cause of a supervisor's exit: the outcome of the run, as text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits set by the user. Times are in seconds; None means no limit."""

    max_preemptions: int | None = None
    max_preemptions_without_progress: int | None = None  # in succession
    max_failures: int | None = 3  # in succession, without progress
    restart_codes: tuple[int, ...] = (143, 42)
    # Time for the workers to commit and to exit after a signal to stop.
    grace: float | None = None
    kill_after: float = 15.0  # time for workers to exit after a failure or a hang
    stacks_grace: float = 1.0  # time for hung workers to write their stacks
    unkillable: float = 10.0  # time for a process to end after SIGKILL
    backoff: float = 1.0  # delay of the first restart after a failure
    backoff_max: float = 60.0  # longest delay of a restart
    # If workers have run for longer, this counts as progress, and resets the delay.
    backoff_reset: float = 600.0

    @property
    def leave_grace(self) -> float:
        """Seconds that the remaining workers have for their exit.

        This limit applies after the first worker has committed and exited, and after
        the end of the supervisor. It exists even if `grace` is None: these workers need
        not finish a step, so they do not need an unknown time.
        """
        return 35.0 if self.grace is None else self.grace

    @property
    def max_failures_per_hour(self) -> int | None:
        """Largest number of failures within an hour, with or without progress.

        Without this limit, a program that makes a commit and fails after every start
        would be restarted forever. The limit is at least `max_failures`.
        """
        if self.max_failures is None:
            return None
        return max(_FAILURES_PER_HOUR, self.max_failures)

    def is_preempted(self, exit: WorkerExit) -> bool:
        """Returns whether a worker has exited because of a preemption.

        True if the exit code is a restart code, or if SIGTERM has killed the worker.
        (SIGTERM kills a worker that has not created its handler yet.)
        """
        return exit.code in self.restart_codes or exit.returncode == -signal.SIGTERM

    def restart_code(self, exit: WorkerExit | None) -> int:
        """Returns the exit code that makes the platform restart the run.

        Args:
            exit: exit of a preempted worker, or None. If the exit code of the worker is
                no restart code, the first restart code is returned.
        """
        codes = self.restart_codes
        return exit.code if exit is not None and exit.code in codes else codes[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUsed:
    """Numbers of preemptions and failures so far, which are compared with the limits.

    Attributes:
        preemptions: total number of preemptions.
        failures: total number of failures.
        in_a_row: failures since the last progress.
        idle_in_a_row: preemptions since the last progress.
        failed_at: times of the failures in the last hour, on the monotonic clock.
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
        at: time of the end, on the monotonic clock.
        was_asked: whether the supervisor had sent SIGTERM to the worker before.
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
    """The observations on which a decision depends. Times are on the monotonic clock.

    Attributes:
        now: current time.
        workers: number of workers started.
        started_at: time when the workers were started.
        exits: the workers that have ended, in order.
        stop_at: time of the signal to stop; None without a signal.
        asked_at: time when the supervisor sent SIGTERM to the running workers.
        killed_at: time when the supervisor sent SIGKILL to the running workers.
        hang_due: time at which the workers count as hung, if they do not reach a step
            boundary before; None without a hang timeout.
        hung_at: time when a hang was detected and stacks were requested; None without a
            hang.
        urges: number of times that Ctrl-C was pressed after the signal to stop.
        has_progressed: whether the workers have committed a step since their start;
            None if the supervisor cannot see commits.
        spent: preemptions and failures before this start of the workers.
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
        """Whether Ctrl-C was pressed two more times after the signal to stop.

        If so, the supervisor kills the workers.
        """
        return self.urges > 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Do nothing until the next event, or until the time `until` if not None."""

    until: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Report a hang of the running workers, and request the stacks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendSigterm:
    """Send SIGTERM to the running workers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendSigkill:
    """Send SIGKILL to the running workers and to their children.

    Attributes:
        why: the reason, as the end of a sentence.
    """

    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Restart all workers after `delay` seconds."""

    cause: Cause
    delay: float
    spent: BudgetUsed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExitSupervisor:
    """Exit the supervisor with `code`."""

    cause: Cause
    code: int
    spent: BudgetUsed
    is_over_budget: bool = False


Action = Wait | DumpStacks | SendSigterm | SendSigkill | Restart | ExitSupervisor


def decide(limits: RestartLimits, seen: SupervisorState) -> Action:
    """Returns the supervisor's next action.

    Args:
        limits: limits set by the user.
        seen: observations since the start of the workers.
    """
    if len(seen.exits) < seen.workers:
        return _while_some_run(limits, seen)
    return _after_all(limits, seen)


def first_failure(limits: RestartLimits, seen: SupervisorState) -> WorkerExit | None:
    """Returns the first worker that failed by itself; None if there is none.

    A worker that fails after the supervisor has sent SIGTERM does not count: it may
    have failed because of the SIGTERM.
    """
    own = (e for e in seen.exits if not e.was_asked)
    return next((e for e in own if e.code and not limits.is_preempted(e)), None)


def leave_between_runs(limits: RestartLimits, spent: BudgetUsed) -> ExitSupervisor:
    """Returns the action if a signal to stop arrives during the delay of a restart."""
    return ExitSupervisor(
        cause=Cause.STOPPED, code=limits.restart_codes[0], spent=spent
    )


def _while_some_run(limits: RestartLimits, seen: SupervisorState) -> Action:
    if seen.killed_at is not None:
        return _after_kill(limits, seen, seen.killed_at)
    if seen.is_urged:
        return SendSigkill(why="because Ctrl-C was pressed again")
    if seen.asked_at is not None:
        # After a signal to stop, the workers commit, and have the grace period. If a
        # worker has ended, or if the workers are hung, a common commit is impossible,
        # so the workers have only a short time. (Workers that are slow, but not hung,
        # may commit in this time.)
        are_running = seen.hung_at is None and not _ended_by_signal(limits, seen)
        can_commit = seen.stop_at is not None and are_running
        option = "--grace" if can_commit else "--kill-after"
        limit = limits.grace if can_commit else limits.kill_after
        # Without a limit, wait: a step may take long, and the platform will kill the
        # processes.
        if limit is None:
            return Wait(until=None)
        why = f"not ended {limit:g} s after SIGTERM ({option})"
        return _wait_or(SendSigkill(why=why), seen.now, seen.asked_at + limit)
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
    # No deadline: for example, workers may finish at different times.
    return Wait(until=None)


def _after_kill(
    limits: RestartLimits, seen: SupervisorState, killed_at: float
) -> Action:
    """Waits until killed processes have ended; if one survives, exits the supervisor.

    A process that survives SIGKILL hangs in the kernel. It may still write files, so
    restarted workers would not be alone in the checkpoint directory.
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
    # A failure before the signal has exceeded a limit, so the signal changes nothing.
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
    """Returns the action after all workers have ended. Ignores a signal to stop."""
    failure = _failure(limits, seen)
    if failure is not None:
        return _after_failure(limits, seen, failure)
    preempted = _first_preempted(limits, seen)
    if preempted is not None:
        return _after_preemption(limits, seen, preempted)
    return ExitSupervisor(cause=Cause.FINISHED, code=0, spent=seen.spent)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A failure of a worker, or a hang."""

    cause: Cause
    code: int
    at: float


def _failure(limits: RestartLimits, seen: SupervisorState) -> _Failure | None:
    is_finished = len(seen.exits) == seen.workers and not any(
        each.code for each in seen.exits
    )
    # If all workers have finished after a hang was detected, they were only slow.
    if seen.hung_at is not None and not is_finished:
        return _Failure(cause=Cause.HANG, code=_HANG_CODE, at=seen.hung_at)
    if (own := first_failure(limits, seen)) is not None:
        return _Failure(cause=Cause.FAILURE, code=own.code, at=own.at)
    return None


def _after_failure(
    limits: RestartLimits, seen: SupervisorState, failure: _Failure
) -> Restart | ExitSupervisor:
    is_long = failure.at - seen.started_at >= limits.backoff_reset
    # After a hang a long duration is no progress: the workers may have hung for long.
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
    row = 1 if is_long else spent.in_a_row
    return _within_limits(
        Restart(cause=failure.cause, delay=_backoff(limits, row), spent=spent),
        failure.code,
        (failure.cause, spent.in_a_row, limits.max_failures),
        (Cause.FAILURE_RATE, len(spent.failed_at), limits.max_failures_per_hour),
    )


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
    # Measure the delay from start to start, so workers that have trained for a while
    # are restarted at once. A program that exits immediately after every start is not
    # restarted in a fast loop, even if the program commits.
    delay = max(0.0, _backoff(limits, max(1, spent.idle_in_a_row)) - lasted)
    idle_limit = limits.max_preemptions_without_progress
    return _within_limits(
        Restart(cause=Cause.PREEMPTION, delay=delay, spent=spent),
        limits.restart_code(preempted),
        (Cause.PREEMPTION, spent.preemptions, limits.max_preemptions),
        (Cause.NO_PROGRESS, spent.idle_in_a_row, idle_limit),
    )


def _within_limits(
    restart: Restart, code: int, *checks: tuple[Cause, int, int | None]
) -> Restart | ExitSupervisor:
    """Returns the restart, or the exit of the supervisor if a limit is exceeded.

    Args:
        restart: the restart.
        code: exit code of the supervisor.
        *checks: for each limit the cause of the exit, the number so far, and the
            largest number; None: no limit.
    """
    for cause, count, allowed in checks:
        if allowed is not None and count > allowed:
            return ExitSupervisor(
                cause=cause, code=code, spent=restart.spent, is_over_budget=True
            )
    return restart


def _backoff(limits: RestartLimits, row: int) -> float:
    """Returns the delay of a restart in seconds.

    Args:
        limits: limits set by the user.
        row: number of successive failures or preemptions.
    """
    # Limit the exponent, because a float would overflow.
    return min(limits.backoff_max, limits.backoff * 2.0 ** min(row - 1, 60))


def _first_preempted(limits: RestartLimits, seen: SupervisorState) -> WorkerExit | None:
    """Returns the first preempted worker; None if no worker was preempted.

    A worker to which the supervisor had sent SIGTERM is returned only if every
    preempted worker had got this SIGTERM.
    """
    left = [e for e in seen.exits if limits.is_preempted(e)]
    return next((e for e in left if not e.was_asked), left[0] if left else None)


def _ended_by_signal(limits: RestartLimits, seen: SupervisorState) -> bool:
    """Returns whether SIGTERM has killed a worker.

    SIGTERM kills a worker that has not created its handler yet. The other workers then
    cannot commit, and might wait minutes for the killed worker.
    """
    return any(e.returncode < 0 and limits.is_preempted(e) for e in seen.exits)


def _wait_or(
    action: DumpStacks | SendSigterm | SendSigkill, now: float, at: float
) -> Action:
    return action if now >= at else Wait(until=at)
