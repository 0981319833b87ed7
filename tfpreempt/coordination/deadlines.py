"""The deadline of this process, and the actions shortly before the deadline.

A known deadline is only ever shortened. The module also has the estimates that tell
how long before the deadline to act: the durations of a save and of a step.
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

LEAVING = 0.2  # seconds that the exit of the process takes
BYES = 10.0  # maximum seconds that the chief waits for the exit of the other workers


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The times at which waits for other workers must end, for waits that begin now.

    Attributes:
        of: monotonic seconds at which a wait ends, by the awaited key: `Key.COUNT` for
            counts, `Key.DONE` for reports of written parts of a save, `Key.BYE` for
            reports of an exit.
        may_train_on: whether there is time for a second commit after the current one.
    """

    of: Mapping[Key, float]
    may_train_on: bool


@dataclasses.dataclass(eq=False)
class Deadlines:
    """The time at which the machine is terminated, with two alarms before this time.

    One alarm opens the final round; the other ends the process just in time. After a
    notice without a grace period the time is unknown; a *soft* deadline then limits the
    waits for other workers.

    Not thread-safe: the coordinator calls the methods under its lock, and the callbacks
    of the alarms acquire the same lock.

    Args:
        executor: source of the alarms.
        clock: time source for the alarms.
        peer_timeout: seconds to wait without a known deadline.
        step_seconds: function that returns the duration of a step.
        on_last_call: function that opens the final round; called when a long grace
            period is almost over.
        on_guard: function called just before the deadline. The argument is True for a
            deadline from a notice, False for a soft deadline. Returns whether the
            process is ending; if not, the function is called again later.
        num_workers: number of workers.

    Attributes:
        peer_timeout: seconds to wait without a known deadline; a later handler may
            change the value.
        save_seconds: expected duration of a save, from `planned`; None before the first
            save.
        share_seconds: measured duration of writing this worker's share (the tensors
            that one worker writes for all) in the current save; 0 without shares.
        noticed_at: monotonic time at which the first worker saw the current notice.
        terminates_at: monotonic time at which the machine is terminated; None if no
            source gave a grace period.
    """

    executor: StoreExecutor
    clock: Clock
    peer_timeout: float
    step_seconds: Callable[[], float]
    on_last_call: Callable[[], None]
    on_guard: Callable[[bool], bool]
    num_workers: int = 1
    save_seconds: float | None = None
    share_seconds: float = 0.0
    noticed_at: float | None = None
    terminates_at: float | None = None
    _grace: float | None = None  # grace period of `terminates_at`, seconds
    _soft: float | None = None  # end of the waits, if no source gave a grace period
    _ends: float | None = None  # latest time for the exit of the process
    _last_call_at: float | None = None
    # Latest shutdown of a machine after a notice. `forget` keeps the value, because the
    # shutdown may come after the notice was handled with a commit.
    _goes_by: float = -math.inf

    @property
    def at(self) -> float | None:
        """The earlier of the known and the soft deadline; None without a notice."""
        known = (t for t in (self.terminates_at, self._soft) if t is not None)
        return min(known, default=None)

    @property
    def left(self) -> float:
        """Seconds left for work after a commit; without a notice, `peer_timeout`.

        `extend` gives the waits for other workers more time, but not this work: the
        parent of the process (a supervisor, Kubernetes) may count from the signal.
        """
        if self._ends is None:
            return self.peer_timeout
        return max(0.0, self._ends - self.clock.monotonic() - LEAVING)

    @property
    def shutdown_pending(self) -> bool:
        """Whether a machine of this run had a notice and may still be shut down."""
        return self.clock.monotonic() < self._goes_by

    @property
    def since_notice(self) -> float | None:
        """Seconds since the first worker saw the notice; None without a notice.

        May be read on any thread.
        """
        at = self.noticed_at
        return None if at is None else self.clock.monotonic() - at

    def shorten(self, received_at: float, grace: float | None) -> bool:
        """Sets the deadline of a notice, unless a known deadline is earlier.

        Args:
            received_at: monotonic time at which the notice arrived.
            grace: grace period of the notice in seconds; None or 0 if unknown.

        Returns:
            Whether the notice has set a first or an earlier deadline.
        """
        before = self.at
        seconds = grace or self.default_wait_seconds
        end, gone = received_at + seconds, received_at + dl.until_end(seconds)
        known = self.terminates_at if grace else self._soft
        if known is None or end < known:
            if grace:
                self.terminates_at, self._grace = end, grace
            else:
                self._soft = end
            self.executor.call_at(gone, functools.partial(self._on_deadline, end))
        self._ends = gone if self._ends is None else min(self._ends, gone)
        self._goes_by = max(self._goes_by, end + dl.LATEST_SHUTDOWN_SECONDS)
        return before is None or end < before

    def extend(self, *, at_boundary: bool) -> None:
        """Extends a soft deadline by a full wait: the main thread begins to wait.

        Args:
            at_boundary: whether the main thread waits after a step. If the step ended
                later than `_ends`, nothing has killed the process at that time. So no
                platform counts from the notice, and the time for work after the commit
                begins now.
        """
        now = self.clock.monotonic()
        has_outlived = self._ends is not None and self._ends <= now
        if at_boundary and self.terminates_at is None and has_outlived:
            self._ends = now + self.peer_timeout
        if self._soft is not None:
            self._soft = max(self._soft, now + self.default_wait_seconds)
            self.executor.call_at(
                self._soft, functools.partial(self._on_deadline, self._soft)
            )

    def second_commit_is_worthwhile(self, grace: float | None) -> bool:
        """Returns whether to train on after a first commit, up to a second commit.

        True if the grace period is at least three times as long as a save and two
        steps. True if no save was measured so far: the first commit, made at once,
        measures a save, and the caller asks again after that commit.

        Args:
            grace: grace period of the notice in seconds; None or 0 if unknown, for
                which the result is False.
        """
        if not grace:
            return False
        save = self.save_seconds
        return save is None or grace >= 3 * (save + 2 * self.step_seconds())

    def schedule_final_round(self) -> None:
        """Sets the alarm that opens the final round; replaces an earlier alarm."""
        when = self._last_call_time()
        if when is not None:
            self._last_call_at = when
            self.executor.call_at(when, functools.partial(self._last_call, when))

    def _last_call_time(self) -> float | None:
        """Returns the latest time at which a final round can open and still commit.

        None if no grace period is known.
        """
        if self.terminates_at is None or self._grace is None:
            return None
        save = self._grace / 4 if self.save_seconds is None else self.save_seconds
        needed = dl.needed_seconds(save, self._grace)
        return self.terminates_at - (needed + 2 * self.step_seconds())

    def limits(self) -> Limits:
        """Returns the times at which waits for other workers must end, if begun now.

        The wait for counts is short: a thread that waits for nothing sends the count,
        so a late count means a crashed or frozen worker. The time saved belongs to the
        save. No wait is longer than `peer_timeout`, however long the grace period is.

        The wait for the parts of a save ends early enough for the chief to write the
        shares of workers that never answer. With a known deadline, time for one share
        is always reserved, and time for the shares of every peer if three tenths of
        the time remain for the wait. If the time is too short even for one share, the
        chief only waits: a worker slower than the chief may still answer.
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
        left = -math.inf if self.terminates_at is None else self.terminates_at - now
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
        """Returns how long the next save takes in the worst case.

        In the worst case the chief writes the shares of all workers.

        Args:
            save: measured duration of a save in seconds.
            share: seconds of `save` that the chief's own share took; 0 without shares.
        """
        return save + share * (self.num_workers - 1)

    def forget(self) -> None:
        """Clears the deadline after a notice was handled and the process continues."""
        self.terminates_at = self._soft = self._ends = self._grace = None
        self._last_call_at = self.noticed_at = None

    def _last_call(self, when: float) -> None:
        if self._last_call_at == when:
            self.on_last_call()

    @property
    def default_wait_seconds(self) -> float:
        """Seconds to wait without a known deadline.

        At least the duration of three saves: a shorter wait could end before a save
        that is still being written.
        """
        return max(self.peer_timeout, 3 * (self.save_seconds or 0.0))

    def _on_deadline(self, deadline: float) -> None:
        is_known = deadline == self.terminates_at
        if not is_known and deadline != self._soft:
            return  # the deadline was replaced, or the notice was handled
        if not self.on_guard(is_known):
            now = self.clock.monotonic()
            again = now + self.peer_timeout
            if self.terminates_at is not None:
                again = min(again, max(now, self.terminates_at))
            self.executor.call_at(again, functools.partial(self._on_deadline, deadline))
