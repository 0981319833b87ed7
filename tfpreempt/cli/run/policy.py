"""What a supervisor does next, decided from what it has seen; no process, no clock.

`decide` is asked again after everything that happens and at the time that `Wait` names.
A failure outweighs a preemption, the supervisor's own stop outweighs both: the machine
is going away then, and only the restart code makes the platform start the run again.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from typing import NewType

ReturnCode = NewType(
    "ReturnCode", int
)  # of subprocess: an exit code, or minus a signal

_HOUR = 3600.0  # seconds
_FAILURES_PER_HOUR = 20
_HUNG = 128 + signal.SIGKILL  # as a shell gives the code of a worker that was killed


def describe_end(returncode: ReturnCode) -> str:
    """A process's end for people: the exit code, or the name of the signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Cause(enum.Enum):
    """Why a run of the workers ended."""

    FINISHED = "finished"
    PREEMPTION = "preemption"
    FAILURE = "failure"
    HANG = "hang"  # a failure too: no boundary came in time
    NO_PROGRESS = "no_progress"  # preempted again and again, with nothing gained
    FAILURE_RATE = "failure_rate"  # too many failures within an hour
    MOVED = "moved"  # the checkpoint directory is another one than at the start
    STOPPED = "stopped"  # the supervisor itself was told to leave


OUTCOMES = {
    Cause.FINISHED: "training is finished",
    Cause.PREEMPTION: "the preemption budget is used up",
    Cause.FAILURE: "the failure budget is used up",
    Cause.HANG: "the failure budget is used up by hangs",
    Cause.NO_PROGRESS: "preempted again and again without progress",
    Cause.FAILURE_RATE: "too many failures within an hour",
    Cause.MOVED: "the checkpoint directory is not the one of the start",
    Cause.STOPPED: "told to stop, and to be started again by the platform",
}
"""How a supervisor ended, by the cause with which it left."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allows; times in seconds, None is without limit."""

    max_preemptions: int | None = None
    max_idle_preemptions: int | None = None  # in a row, without progress
    max_failures: int | None = 3  # in a row, without progress
    restart_codes: tuple[int, ...] = (143, 42)
    grace: float | None = None  # to commit and leave, once told to stop
    failure_grace: float = 15.0  # to leave, once another worker has failed, or all hang
    stacks_grace: float = 1.0  # to write their stacks, where they hang
    unkillable: float = 10.0  # how long a process may outlive SIGKILL
    backoff: float = 1.0
    backoff_max: float = 60.0
    backoff_reset: float = 600.0  # a run this long is progress, and ends the back-off

    @property
    def leave_grace(self) -> float:
        """To leave once the commit is made, or the supervisor is gone.

        No step is waited for then, so there is a limit where `grace` is None too.
        """
        return 35.0 if self.grace is None else self.grace

    @property
    def max_failures_per_hour(self) -> int | None:
        """Failures within an hour, with or without progress between them.

        A program that commits and fails at once, each time, makes progress; it is a
        fault all the same. Never less than the failures that the user allows in a row.
        """
        if self.max_failures is None:
            return None
        return max(_FAILURES_PER_HOUR, self.max_failures)

    def is_preempted(self, exit: WorkerExit) -> bool:
        """Whether it left to be started again.

        SIGTERM itself ends a worker only where nothing listens to it: before its
        first handler, and after the last.
        """
        return exit.code in self.restart_codes or exit.returncode == -signal.SIGTERM

    def restart_code(self, exit: WorkerExit | None) -> int:
        """What tells the platform to start the run again, as this worker's end does."""
        codes = self.restart_codes
        return exit.code if exit is not None and exit.code in codes else codes[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was spent so far.

    Attributes:
        preemptions: in all.
        failures: in all.
        in_a_row: failures without progress between.
        idle_in_a_row: preemptions without progress between.
        failed_at: monotonic seconds of the failures of the last hour.
    """

    preemptions: int = 0
    failures: int = 0
    in_a_row: int = 0
    idle_in_a_row: int = 0
    failed_at: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """A worker's end.

    Attributes:
        worker: its index.
        returncode: as subprocess gives it, negative for a signal.
        at: monotonic seconds.
        was_asked: the supervisor had told it to leave before it ended.
    """

    worker: int
    returncode: ReturnCode
    at: float
    was_asked: bool = False

    @property
    def code(self) -> int:
        """The exit code as a shell gives it: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def describe(self) -> str:
        """For people: the exit code, or the name of the signal."""
        return describe_end(self.returncode)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a decision depends on; times are monotonic seconds.

    Attributes:
        workers: how many were started.
        started_at: when.
        exits: in the order in which they were seen.
        stop_at: when the supervisor was told to leave.
        asked_at: when those still running were sent SIGTERM.
        killed_at: when they were sent SIGKILL.
        hang_due: when the workers hang, if no boundary comes before; None where that
            is open.
        hung_at: when they were found to, and asked for their stacks.
        urges: each Ctrl-C that came after the signal to leave.
        has_progressed: the run has committed another step than it began with; None if
            commits cannot be seen.
        spent: what earlier runs have spent.
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
    spent: Spent = Spent()

    @property
    def is_urged(self) -> bool:
        """Whether to wait no longer: the first urge only asks what is waited for."""
        return self.urges > 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do before the next event, or before `until`."""

    until: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskForStacks:
    """Tell that the workers that still run hang, and have them write where."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Send SIGTERM to the workers that still run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Send SIGKILL to the workers that still run, and to their children."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start all workers again after `delay` seconds."""

    cause: Cause
    delay: float
    spent: Spent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End the supervisor with this exit code."""

    cause: Cause
    code: int
    spent: Spent
    is_over_budget: bool = False


Action = Wait | AskForStacks | Ask | Kill | Restart | Leave


def decide(limits: Limits, seen: Situation) -> Action:
    """The one next action."""
    if len(seen.exits) < seen.workers:
        return _while_some_run(limits, seen)
    return _after_all(limits, seen)


def first_failure(limits: Limits, seen: Situation) -> WorkerExit | None:
    """The failure that the others' ends follow from, if there is one."""
    own = (e for e in seen.exits if not e.was_asked)
    return next((e for e in own if e.code and not limits.is_preempted(e)), None)


def leave_between_runs(limits: Limits, spent: Spent) -> Leave:
    """A stop while no worker runs (in the back-off)."""
    return Leave(cause=Cause.STOPPED, code=limits.restart_codes[0], spent=spent)


def _while_some_run(limits: Limits, seen: Situation) -> Action:
    if seen.killed_at is not None:
        return _after_kill(limits, seen, seen.killed_at)
    if seen.is_urged:
        return Kill()
    if seen.asked_at is not None:
        # Told to stop, workers commit. After a failure or a preemption those that still
        # run can't be in a commit that all take part in, and get a short time. So do
        # those that hang: who was only slow commits in it.
        is_whole = seen.hung_at is None and not _ended_by_signal(limits, seen)
        can_commit = seen.stop_at is not None and is_whole
        limit = limits.grace if can_commit else limits.failure_grace
        if limit is None:  # how long a step takes nobody knows: the platform kills
            return Wait(until=None)
        return _wait_or(Kill(), seen.now, seen.asked_at + limit)
    is_failed = first_failure(limits, seen) is not None
    if seen.stop_at is not None or is_failed or _ended_by_signal(limits, seen):
        return Ask()
    if seen.hung_at is not None:
        return _wait_or(Ask(), seen.now, seen.hung_at + limits.stacks_grace)
    preempted = _first_preempted(limits, seen)
    if preempted is not None:
        return _wait_or(Ask(), seen.now, preempted.at + limits.leave_grace)
    if seen.hang_due is not None:
        return _wait_or(AskForStacks(), seen.now, seen.hang_due)
    return Wait(until=None)  # some may have finished: uneven ends are fine


def _after_kill(limits: Limits, seen: Situation, killed_at: float) -> Action:
    """What outlives SIGKILL hangs in the kernel; a restart beside it is unsafe."""
    if seen.now < killed_at + limits.unkillable:
        return Wait(until=killed_at + limits.unkillable)
    ended = _after_all(limits, seen)
    if isinstance(ended, Leave):
        return ended
    failure = _failure(limits, seen)
    code = failure.code if failure else limits.restart_codes[0]
    return Leave(cause=ended.cause, code=code, spent=ended.spent)


def _after_all(limits: Limits, seen: Situation) -> Restart | Leave:
    verdict = _after_own_end(limits, seen)
    if seen.stop_at is None:
        return verdict
    if all(e.code == 0 for e in seen.exits) and len(seen.exits) == seen.workers:
        return Leave(cause=Cause.FINISHED, code=0, spent=seen.spent)
    preempted = _first_preempted(limits, seen)
    own = preempted if preempted and not preempted.was_asked else None
    first = _failure(limits, seen) or own
    came_first = first is not None and first.at < seen.stop_at
    # Seen before the stop came and the last one allowed: it is what ended the run.
    if came_first and isinstance(first, _Failure) and isinstance(verdict, Leave):
        return verdict
    return Leave(
        cause=Cause.STOPPED,
        code=limits.restart_code(preempted),
        spent=verdict.spent if came_first else seen.spent,
    )


def _after_own_end(limits: Limits, seen: Situation) -> Restart | Leave:
    """What would follow if the supervisor were not told to leave."""
    failure = _failure(limits, seen)
    if failure is not None:
        return _after_failure(limits, seen, failure)
    preempted = _first_preempted(limits, seen)
    if preempted is not None:
        return _after_preemption(limits, seen, preempted)
    return Leave(cause=Cause.FINISHED, code=0, spent=seen.spent)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What counts as one: a worker's end, or that all hang."""

    cause: Cause
    code: int
    at: float


def _failure(limits: Limits, seen: Situation) -> _Failure | None:
    is_finished = len(seen.exits) == seen.workers and not any(
        each.code for each in seen.exits
    )
    if seen.hung_at is not None and not is_finished:  # else they were only slow
        return _Failure(cause=Cause.HANG, code=_HUNG, at=seen.hung_at)
    if (own := first_failure(limits, seen)) is not None:
        return _Failure(cause=Cause.FAILURE, code=own.code, at=own.at)
    return None


def _after_failure(
    limits: Limits, seen: Situation, failure: _Failure
) -> Restart | Leave:
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
            return Leave(
                cause=cause, code=failure.code, spent=spent, is_over_budget=True
            )
    row = 1 if is_long else spent.in_a_row
    return Restart(cause=failure.cause, delay=_backoff(limits, row), spent=spent)


def _after_preemption(
    limits: Limits, seen: Situation, preempted: WorkerExit
) -> Restart | Leave:
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
        (Cause.NO_PROGRESS, spent.idle_in_a_row, limits.max_idle_preemptions),
    ):
        if allowed is not None and count > allowed:
            return Leave(
                cause=cause,
                code=limits.restart_code(preempted),
                spent=spent,
                is_over_budget=True,
            )
    # The run's own time counts: what trains for a while is started again at once. But
    # what leaves at once, every time, must not spin, whatever it commits.
    delay = max(0.0, _backoff(limits, max(1, spent.idle_in_a_row)) - lasted)
    return Restart(cause=Cause.PREEMPTION, delay=delay, spent=spent)


def _backoff(limits: Limits, row: int) -> float:
    """How long the last of so many in a row is paused after."""
    # The exponent is capped because a float is not endless.
    return min(limits.backoff_max, limits.backoff * 2.0 ** min(row - 1, 60))


def _first_preempted(limits: Limits, seen: Situation) -> WorkerExit | None:
    """The first worker with the restart code, of its own accord if there is one."""
    left = [e for e in seen.exits if limits.is_preempted(e)]
    return next((e for e in left if not e.was_asked), left[0] if left else None)


def _ended_by_signal(limits: Limits, seen: Situation) -> bool:
    """Whether SIGTERM has ended a worker before its handler stood.

    The others cannot commit without it, and may wait for it for minutes in the start.
    """
    return any(e.returncode < 0 and limits.is_preempted(e) for e in seen.exits)


def _wait_or(action: AskForStacks | Ask | Kill, now: float, at: float) -> Action:
    return action if now >= at else Wait(until=at)
