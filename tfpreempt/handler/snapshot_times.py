"""On the chief: asks all workers for a snapshot when one is due, and sees what it cost.

It looks on by alarms, so the training loop knows nothing of it. Steps are those of the
member. Times in which something else went on, such as a commit or a validation, say
nothing of what steps and snapshots take, and are left out.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable

from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.runtime import Runtime
from tfpreempt.core.clock import Clock
from tfpreempt.handler.interval import SHARE, SHORTEST, Interval
from tfpreempt.handler.member import Member, Members
from tfpreempt.handler.snapshots import TRIES, Snapshots, Taken

log = logging.getLogger(__name__)

_FEWEST_STEPS = 2  # that tell how long a step takes
_SLACK = 2  # intervals that are counted before their step is
_LOOKS = 0.1  # seconds between two looks for what comes by itself
_LOOKS_WHILE_WRITTEN = 0.02
_LATER = 30  # times as long until the next try, after each that a worker refused
_LOOKS_FOR_A_STEP = 0.005  # at first; then a tenth of what was waited already


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Where training was at a time.

    Attributes:
        at: monotonic seconds.
        steps: that were made.
        intervals: that were, or had begun.
        saved_at: see `Member`; it differs where there was a commit.
    """

    at: float
    steps: int
    intervals: int
    saved_at: int | None

    def has_only_steps(self, steps: int, intervals: int) -> bool:
        """Whether it has been nothing but steps until there were so many."""
        others = (intervals - self.intervals) - (steps - self.steps)
        return abs(others) <= _SLACK


@dataclasses.dataclass(eq=False)
class SnapshotTimes:
    """Of one member, for as long as it is open. On the thread of the alarms.

    Args:
        member: its snapshots; held weakly.
        members: the open ones.
        coordinator: asks all.
        runtime: has alarms.
        clock: measures.
        is_busy: whether a commit is being written.
    """

    member: weakref.ref[Member]
    members: Members
    coordinator: Coordinator
    runtime: Runtime
    clock: Clock
    is_busy: Callable[[], bool]
    interval: Interval = dataclasses.field(default_factory=Interval)
    _due: float = 0.0
    _quiet: _Mark | None = None  # from where on no snapshot was written
    _written: tuple[float, int] | None = None  # when that was seen, and the step then
    _last: int = -1  # steps that were made at the last one, or when it was asked for

    def look(self) -> None:
        """Looks now, and again when there may be something to do."""
        member = self.member()
        if member is None or member not in self.members:
            return
        snapshots = member.commits.snapshots
        if snapshots is None or snapshots.is_off:
            return
        taken = snapshots.taken
        if taken is None:
            seconds = self._ask_if_due(member, snapshots)
        else:
            seconds = self._watch(member, snapshots, taken)
        self.runtime.at(self.clock.monotonic() + seconds, self.look)

    def _mark(self, member: Member) -> _Mark:
        return _Mark(
            at=self.clock.monotonic(),
            steps=member.runs,
            intervals=self.coordinator.gate.started,
            saved_at=member.saved_at,
        )

    def _ask_if_due(self, member: Member, snapshots: Snapshots) -> float:
        """Asks for a snapshot, if one is due; returns seconds to the next look."""
        now, steps = self.clock.monotonic(), member.runs
        if self._quiet is None:
            if steps >= 1:  # the first one also traces
                self._quiet, self._due = self._mark(member), now + SHORTEST
            return _LOOKS
        if self.is_busy():  # what goes on beside a commit is not quiet
            self._quiet = self._mark(member)
        if now < self._due:
            return self._due - now
        is_known = self.interval.step_seconds is not None
        if not is_known and steps - self._quiet.steps < _FEWEST_STEPS:
            return _LOOKS
        if self._may_take(member) and self.coordinator.periodic(snapshot=True):
            wait = SHORTEST * _LATER ** min(snapshots.refused, TRIES)
            self._due, self._last = now + wait, member.runs
        return _LOOKS

    def _may_take(self, member: Member) -> bool:
        is_alone = [each for each in self.members if each.is_armed] == [member]
        has_moved = member.has_moved and member.runs != self._last
        is_quiet = not (self.is_busy() or self.coordinator.is_told_to_go)
        return is_alone and has_moved and is_quiet

    def _watch(self, member: Member, snapshots: Snapshots, taken: Taken) -> float:
        """Waits for the end of the first step after it was written."""
        now, steps = self.clock.monotonic(), member.runs
        if snapshots.is_busy:
            return _LOOKS_WHILE_WRITTEN
        if self._written is None:
            self._written = now, steps
        if steps == self._written[1]:
            return max(_LOOKS_FOR_A_STEP, (now - self._written[0]) / 10)
        stood = taken.left - taken.arrived
        if snapshots.is_dropped:
            period = max(SHORTEST, stood / SHARE)
        else:
            quiet, after = self._quiet, self._mark(member)
            if (
                quiet is not None
                and quiet.saved_at == after.saved_at
                and quiet.has_only_steps(taken.steps, taken.intervals)
            ):
                seconds = taken.arrived - quiet.at
                self.interval.undisturbed(seconds, taken.steps - quiet.steps)
            before = dataclasses.replace(
                after, steps=taken.steps, intervals=taken.intervals
            )
            beside, made = now - taken.left, steps - taken.steps
            if not before.has_only_steps(after.steps, after.intervals):
                beside, made = 0.0, 0
            period = self.interval.after(stood=stood, beside=beside, steps=made)
        of_step = f"of step {member.base + taken.steps}"
        log.info(
            "tfpreempt: the snapshot %s stopped training for %.3f s, and the %d steps "
            "after it took %.3f s; the next one in %.1f s",
            "that a commit broke off" if snapshots.is_dropped else of_step,
            stood,
            steps - taken.steps,
            now - taken.left,
            period,
        )
        self._due, self._quiet = taken.arrived + period, self._mark(member)
        self._last = taken.steps
        self._written = snapshots.taken = None
        return _LOOKS
