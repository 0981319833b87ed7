"""The deadline of this process: stored, only ever shortened, and acted on in time.

The estimates behind the deadline are here too: the durations of a save and of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from tfpreempt.coordination.protocol_types import Key
from tfpreempt.coordination.store_executor import StoreExecutor
from tfpreempt.core import deadline as dl
from tfpreempt.core.clock import Clock

LEAVING = 0.2  # seconds taken by the exit itself
BYES = 10.0  # maximum seconds that the chief waits for the exit of the other workers


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the waits that begin now.

    Attributes:
        of: monotonic seconds at which a wait ends: for the counts of the other workers
            (`Key.COUNT`), for their parts of a save (`Key.DONE`), and for the end of
            their use of the store (`Key.BYE`).
        may_train_on: whether there is time for another commit after the current commit.
    """

    of: Mapping[Key, float]
    may_train_on: bool


@dataclasses.dataclass(eq=False)
class Deadlines:
    """The time at which the machine is preempted, with two alarms.

    A soft deadline limits the waits after a notice without a grace period.

    Not thread-safe by itself: the coordinator calls under its lock, and the callbacks
    of the alarms acquire that lock.

    Args:
        runtime: source of the alarms.
        clock: time source for the alarms.
        peer_timeout: seconds to wait without a known deadline.
        step_seconds: function that returns the duration of a step.
        on_last_call: function that opens the final round; called when a long grace
            period is almost over.
        on_guard: function called just before the deadline, with whether the deadline is
            known from a notice. Returns whether the process ended; if not, the call is
            repeated.
        num_workers: number of workers.

    Attributes:
        peer_timeout: seconds to wait without a known deadline; a later handler may
            change the value.
        save_seconds: expected duration of a save, from `planned`; None before the first
            save.
        share_seconds: measured duration of this worker's share of the current save; 0
            without shares.
        noticed_at: time at which any worker saw the current notice.
        told: time at which the machine is preempted; None if no source gave a time.
    """

    runtime: StoreExecutor
    clock: Clock
    peer_timeout: float
    step_seconds: Callable[[], float]
    on_last_call: Callable[[], None]
    on_guard: Callable[[bool], bool]
    num_workers: int = 1
    save_seconds: float | None = None
    share_seconds: float = 0.0
    noticed_at: float | None = None
    told: float | None = None
    _grace: float | None = None  # grace period that gave `told`, in seconds
    _soft: float | None = None  # end of waiting, if no source gave a time
    _ends: float | None = None  # latest time for the exit of the process
    _last_call_at: float | None = None
    _goes_by: float = -math.inf  # kept by `forget`: the shutdown may follow a commit

    @property
    def at(self) -> float | None:
        """The earlier of the known and the soft deadline; None without a notice."""
        return min((t for t in (self.told, self._soft) if t is not None), default=None)

    @property
    def left(self) -> float:
        """Seconds for work after the commit; without a notice, `peer_timeout`.

        A soft deadline is not extended for the work after the commit: the parent of the
        process (a supervisor, Kubernetes) may measure from the signal.
        """
        if self._ends is None:
            return self.peer_timeout
        return max(0.0, self._ends - self.clock.monotonic() - LEAVING)

    @property
    def shutdown_pending(self) -> bool:
        """Whether a machine of this run had a notice, and may be shutting down."""
        return self.clock.monotonic() < self._goes_by

    @property
    def since_notice(self) -> float | None:
        """Seconds since any worker saw the current notice; None without a notice.

        Any thread.
        """
        at = self.noticed_at
        return None if at is None else self.clock.monotonic() - at

    def shorten(self, received_at: float, grace: float | None) -> bool:
        """Adopts an earlier deadline; ignores a later deadline.

        Args:
            received_at: time at which the notice arrived.
            grace: grace period of the notice in seconds; None or 0 if unknown.

        Returns:
            Whether the new deadline was earlier.
        """
        before = self.at
        patience = grace or self.default_wait_seconds
        end, gone = received_at + patience, received_at + dl.until_end(patience)
        known = self.told if grace else self._soft
        if known is None or end < known:
            if grace:
                self.told, self._grace = end, grace
            else:
                self._soft = end
            self.runtime.call_at(gone, functools.partial(self._on_deadline, end))
        self._ends = gone if self._ends is None else min(self._ends, gone)
        self._goes_by = max(self._goes_by, end + dl.LATEST_SHUTDOWN_SECONDS)
        return before is None or end < before

    def extend(self, *, at_boundary: bool) -> None:
        """Extends a soft deadline by a full wait, because main begins to wait.

        Args:
            at_boundary: whether a step has ended. A step that outlived a soft deadline
                shows that no platform measures from the notice: the time for work after
                the commit then begins now.
        """
        now = self.clock.monotonic()
        has_outlived = self._ends is not None and self._ends <= now
        if at_boundary and self.told is None and has_outlived:
            self._ends = now + self.peer_timeout
        if self._soft is not None:
            self._soft = max(self._soft, now + self.default_wait_seconds)
            self.runtime.call_at(
                self._soft, functools.partial(self._on_deadline, self._soft)
            )

    def second_commit_is_worthwhile(self, grace: float | None) -> bool:
        """Returns whether a second commit at the end of a grace period is worthwhile.

        True if the grace period is at least three times a save and two steps. Before
        the first measured save the result is True: the first commit, made at once,
        measures a save, and the question is asked again.

        Args:
            grace: grace period of the notice in seconds; None or 0: commit at once and
                exit.
        """
        if not grace:
            return False
        save = self.save_seconds
        return save is None or grace >= 3 * (save + 2 * self.step_seconds())

    def schedule_final_round(self) -> None:
        """Sets the alarm for the final round; replaces an earlier alarm."""
        when = self._last_call_time()
        if when is not None:
            self._last_call_at = when
            self.runtime.call_at(when, functools.partial(self._last_call, when))

    def _last_call_time(self) -> float | None:
        """Returns the latest time to open a final round that commits in time."""
        if self.told is None or self._grace is None:
            return None
        save = self._grace / 4 if self.save_seconds is None else self.save_seconds
        needed = dl.needed_seconds(save, self._grace)
        return self.told - (needed + 2 * self.step_seconds())

    def limits(self) -> Limits:
        """Returns the limits of the waits for other workers that begin now.

        Counts come from threads that wait for nothing, so a late count means a crashed
        or frozen worker. The rest of the time belongs to the save. No wait for a peer
        is longer than `peer_timeout`, however long the grace period is.

        The chief writes the shares of workers that never answer. A known deadline
        reserves time for one such share in any case, and for the shares of all other
        workers if three tenths of the time remain for the wait. If there is no time
        even for one share, only waiting helps: workers slower than the chief still
        answer.
        """
        now, at, save = self.clock.monotonic(), self.at, self.save_seconds
        total = self.peer_timeout
        if at is not None:
            total = max(0.0, min(at - now, total))

        reserve = total / 2
        if save is not None:
            reserve = min(dl.SAFETY * save + 1.0, 0.8 * total)
        counts = max(0.1 * total, min(total - reserve, 0.4 * total))

        parts, share = 0.7 * total, dl.SAFETY * self.share_seconds
        left = -math.inf if self.told is None else self.told - now
        if 0 < share <= left:
            reserve = max(
                share, min((self.num_workers - 1) * share, left - 0.3 * total)
            )
            parts = min(parts, max(0.1 * total, left - reserve))

        goodbyes = BYES if at is None else max(0.5, min(at - now, BYES))
        waits = {Key.COUNT: counts, Key.DONE: parts, Key.BYE: goodbyes}
        last_call = self._last_call_time()
        is_early = last_call is not None and now < last_call
        return Limits(
            {key: now + seconds for key, seconds in waits.items()},
            may_train_on=is_early and self.second_commit_is_worthwhile(self._grace),
        )

    def planned(self, save: float, share: float) -> float:
        """Returns the expected duration of the next save.

        Args:
            save: measured duration of a save in seconds.
            share: seconds of that duration spent on the chief's share; 0 without
                shares. A chief without other workers has to write every share.
        """
        return save + share * (self.num_workers - 1)

    def forget(self) -> None:
        """Clears the deadline: the notice was handled, and the process continues."""
        self.told = self._soft = self._ends = self._grace = self._last_call_at = None
        self.noticed_at = None

    def _last_call(self, when: float) -> None:
        if self._last_call_at == when:
            self.on_last_call()

    @property
    def default_wait_seconds(self) -> float:
        """Seconds to wait without a known deadline.

        At least three saves, because a wait shorter than a save can only lose the save.
        """
        return max(self.peer_timeout, 3 * (self.save_seconds or 0.0))

    def _on_deadline(self, deadline: float) -> None:
        is_told = deadline == self.told
        if not is_told and deadline != self._soft:
            return  # replaced, or the notice was handled
        if not self.on_guard(is_told):
            now = self.clock.monotonic()
            again = now + self.peer_timeout
            if self.told is not None:
                again = min(again, max(now, self.told))
            self.runtime.call_at(again, functools.partial(self._on_deadline, deadline))
