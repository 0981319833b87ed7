"""The deadline of this process, and the actions shortly before the deadline.

A known deadline is never moved to a later time. The module also computes how long
before the deadline to act, from the durations of a save and of a step.
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

LEAVING = 0.2  # seconds reserved for the exit of the process
BYES = 10.0  # maximum seconds that the chief waits for the exit of the other workers


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The times at which waits for other workers must end, if they begin now.

    Attributes:
        of: for each awaited key, the time on the monotonic clock at which the wait must
            end. `Key.COUNT`: the wait for the counts; `Key.DONE`: for the reports that
            a worker has written its part of a save; `Key.BYE`: for the reports of an
            exit.
        may_train_on: whether the time suffices for a second commit after this commit.
    """

    of: Mapping[Key, float]
    may_train_on: bool


@dataclasses.dataclass(eq=False)
class Deadlines:
    """The time at which the machine is terminated, with two alarms before this time.

    The first alarm opens the final round (the last save of a long grace period); the
    second alarm ends the process shortly before the machine is terminated. If a notice
    has no grace period, this time is unknown; a *soft* deadline then limits the waits
    for other workers.

    Not thread-safe: the coordinator calls the methods under its lock, and the functions
    that the alarms call acquire the same lock.

    Args:
        executor: calls functions at the times of the alarms.
        clock: time source for the alarms.
        peer_timeout: seconds to wait for other workers if the deadline is unknown.
        step_seconds: function that returns the duration of a step.
        on_last_call: function that opens the final round; called when a long grace
            period is almost over.
        on_guard: function called just before the deadline. Its argument is True for the
            deadline of a notice, False for a soft deadline. The function returns
            whether the process is ending; if not, the function is called again later.
        num_workers: number of workers.

    Attributes:
        peer_timeout: the argument of this name; a later handler may change the value.
        save_seconds: expected duration of a save, from `planned`; None before the first
            save.
        share_seconds: measured duration of writing this worker's share in the current
            save; 0 without shares. (A share is a subset of the tensors that are equal
            on all workers; every worker writes one share.)
        noticed_at: time on the monotonic clock at which the first worker saw the
            current notice.
        terminates_at: time on the monotonic clock at which the machine is terminated;
            None if no source gave a grace period.
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
    _grace: float | None = None  # the grace period that ends at `terminates_at`
    _soft: float | None = None  # end of the waits, if no source gave a grace period
    _ends: float | None = None  # time by which the process must have exited
    _last_call_at: float | None = None
    # Latest time at which the machine of a notice may be shut down. `forget` keeps the
    # value, because the shutdown may come after the notice was handled with a commit.
    _goes_by: float = -math.inf

    @property
    def at(self) -> float | None:
        """The known deadline or the soft deadline, whichever is earlier.

        None without a notice.
        """
        known = (t for t in (self.terminates_at, self._soft) if t is not None)
        return min(known, default=None)

    @property
    def left(self) -> float:
        """Seconds left for work after a commit; `peer_timeout` without a notice.

        `extend` adds time only after a step that has taken longer than all the time
        left. The parent of the process (a supervisor, Kubernetes) may count the seconds
        from the signal, so other waits add no time.
        """
        if self._ends is None:
            return self.peer_timeout
        return max(0.0, self._ends - self.clock.monotonic() - LEAVING)

    @property
    def shutdown_pending(self) -> bool:
        """Whether a machine of this run may still be shut down because of a notice."""
        return self.clock.monotonic() < self._goes_by

    @property
    def since_notice(self) -> float | None:
        """Seconds since the first worker saw the notice; None without a notice.

        May be read on any thread.
        """
        at = self.noticed_at
        return None if at is None else self.clock.monotonic() - at

    def shorten(self, received_at: float, grace: float | None) -> bool:
        """Sets the deadline of a notice, unless an earlier deadline is set.

        Args:
            received_at: time on the monotonic clock at which the notice arrived.
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
        """Moves a soft deadline, so that a wait that begins now has its full time.

        Args:
            at_boundary: whether the main thread waits after a step. If the process
                still runs after a step that was longer than the time left, the platform
                does not count the seconds since the notice. The time for work after the
                commit then begins now.
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
        """Returns whether to train on after a first commit, until a second commit.

        True if the grace period is at least three times as long as a save and two
        steps together. Also True if no save was measured so far: the first commit is
        made at once and measures a save, and the caller asks again after that commit.
        False if the grace period is unknown.

        Args:
            grace: grace period of the notice in seconds; None or 0 if unknown.
        """
        if not grace:
            return False
        save = self.save_seconds
        return save is None or grace >= 3 * (save + 2 * self.step_seconds())

    def schedule_final_round(self) -> None:
        """Sets the alarm that opens the final round, and replaces an earlier alarm.

        The final round is the last save before the machine is terminated.
        """
        when = self._last_call_time()
        if when is not None:
            self._last_call_at = when
            self.executor.call_at(when, functools.partial(self._last_call, when))

    def _last_call_time(self) -> float | None:
        """Returns the latest time at which the final round can begin and still commit.

        The final round is the last save before the machine is terminated. None if no
        grace period is known.
        """
        if self.terminates_at is None or self._grace is None:
            return None
        save = self._grace / 4 if self.save_seconds is None else self.save_seconds
        needed = dl.needed_seconds(save, self._grace)
        return self.terminates_at - (needed + 2 * self.step_seconds())

    def limits(self) -> Limits:
        """Returns the times at which waits for other workers must end, if begun now.

        The wait for counts is short, to leave time for the save: a thread that never
        waits sends the count, so a late count means a crashed or frozen worker. No wait
        is longer than `peer_timeout`, however long the grace period is.

        The wait for the workers' parts of a save ends early, because the chief must
        then write the shares of workers that have not answered. With a known deadline,
        time for one share is always reserved. Time for the shares of all other workers
        is reserved if this leaves three tenths of the time for the wait. If the time is
        too short even for one share, the chief only waits, because a worker slower than
        the chief may still answer.
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
        """Returns the seconds that the next save takes in the worst case.

        In the worst case the chief writes the shares of all workers.

        Args:
            save: measured duration of a save in seconds.
            share: seconds of `save` in which the chief wrote its share; 0 without
                shares.
        """
        return save + share * (self.num_workers - 1)

    def forget(self) -> None:
        """Clears the deadline. Called after a final round or the end of training."""
        self.terminates_at = self._soft = self._ends = self._grace = None
        self._last_call_at = self.noticed_at = None

    def _last_call(self, when: float) -> None:
        if self._last_call_at == when:
            self.on_last_call()

    @property
    def default_wait_seconds(self) -> float:
        """Seconds to wait for other workers if the deadline is unknown.

        At least the duration of three saves, because a shorter wait could end while
        another worker still writes its part of a save.
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
