"""On the chief: asks all workers for a snapshot when one is due, and sees what it cost.

It looks on by alarms, so the training loop knows nothing of it: steps are what the
gate counts.
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
from tfpreempt.handler.snapshots import Snapshots, Taken

log = logging.getLogger(__name__)

_FEWEST_STEPS = 2  # that tell how long a step takes
_LOOKS = 0.1  # seconds between two looks for what comes by itself
_LOOKS_WHILE_WRITTEN = 0.02
_LOOKS_FOR_A_STEP = 0.005  # at first; then a tenth of what was waited already


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
    _quiet: tuple[float, int] | None = None  # since when, and steps made by then
    _written: tuple[float, int] | None = None  # when that was seen, and the step then

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
            seconds = self._ask_if_due(member)
        else:
            seconds = self._watch(snapshots, taken)
        self.runtime.at(self.clock.monotonic() + seconds, self.look)

    @property
    def _steps(self) -> int:
        """Intervals that were made; one more has been started."""
        return self.coordinator.gate.started - 1

    def _ask_if_due(self, member: Member) -> float:
        """Asks for a snapshot, if one is due; returns seconds to the next look."""
        now, steps = self.clock.monotonic(), self._steps
        if self._quiet is None:
            if steps >= 1:  # the first one also traces
                self._quiet, self._due = (now, steps), now + SHORTEST
            return _LOOKS
        if now < self._due:
            return self._due - now
        is_known = self.interval.step_seconds is not None
        if not is_known and steps - self._quiet[1] < _FEWEST_STEPS:
            return _LOOKS
        if self._may_take(member) and self.coordinator.periodic(snapshot=True):
            self._due = now + SHORTEST
        return _LOOKS

    def _may_take(self, member: Member) -> bool:
        is_alone = [each for each in self.members if each.is_armed] == [member]
        return is_alone and member.has_moved and not self.is_busy()

    def _watch(self, snapshots: Snapshots, taken: Taken) -> float:
        """Waits for the end of the first step after it was written."""
        now, steps = self.clock.monotonic(), self._steps
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
            if self._quiet is not None:
                since, made = self._quiet
                self.interval.undisturbed(taken.arrived - since, taken.steps - made)
            period = self.interval.after(
                stood=stood, beside=now - taken.left, steps=steps - taken.steps
            )
        log.info(
            "tfpreempt: a snapshot stopped training for %.3f s, and the %d steps "
            "after it took %.3f s; the next one in %.1f s",
            stood,
            steps - taken.steps,
            now - taken.left,
            period,
        )
        self._due, self._quiet = taken.arrived + period, (now, steps)
        self._written = snapshots.taken = None
        return _LOOKS
