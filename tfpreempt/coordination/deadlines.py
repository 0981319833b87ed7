"""The deadline of this process: kept, only ever shortened, and acted on in time.

And what it is reckoned with: how long a save and a step take here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from tfpreempt.coordination.events import Key
from tfpreempt.coordination.runtime import Runtime
from tfpreempt.core import deadline as dl
from tfpreempt.core.clock import Clock

LEAVING = 0.2  # seconds that the way out itself takes
BYES = 10.0  # seconds that the store's host waits, at most, for the others to leave


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How long a process may wait from now on.

    Attributes:
        of: monotonic seconds at which a wait that begins now ends: for the counts of
            the others (`Key.COUNT`), for their parts of a save (`Key.DONE`), and until
            they need the store no more (`Key.BYE`).
        may_train_on: whether there is time for another commit after this one.
    """

    of: Mapping[Key, float]
    may_train_on: bool


@dataclasses.dataclass(eq=False)
class Deadlines:
    """When the machine goes, and the two alarms that belong to it.

    Not thread-safe by itself: the coordinator calls it under its lock, and the alarms'
    callbacks take that lock.

    Args:
        runtime: for the alarms.
        clock: for the alarms.
        save_timeout: seconds to wait where no deadline is known.
        step_seconds: how long a step takes.
        on_last_call: opens the final round; called when a long grace is almost over.
        on_guard: called just before the deadline, with whether one was really told;
            says whether that was the end, or it is to be called again.
        world: number of workers.

    Attributes:
        save_timeout: as given; a later handler may say otherwise.
        save_seconds: of the last save, as `planned`; None before the first one.
        share_seconds: measured, of this worker's share of the save that is being made;
            0 where there are no shares.
        noticed_at: when the notice that is served was seen, wherever it came.
        told: when the machine goes; None where no source said it.
    """

    runtime: Runtime
    clock: Clock
    save_timeout: float
    step_seconds: Callable[[], float]
    on_last_call: Callable[[], None]
    on_guard: Callable[[bool], bool]
    world: int = 1
    save_seconds: float | None = None
    share_seconds: float = 0.0
    noticed_at: float | None = None
    told: float | None = None
    _grace: float | None = None  # seconds told with that
    _soft: float | None = None  # when waiting stops, nobody having told
    _ends: float | None = None  # when the process is to be gone, if need be
    _last_call_at: float | None = None
    _goes_by: float = -math.inf  # not forgotten: it may be going after a commit

    @property
    def at(self) -> float | None:
        """The deadline, told or soft, whichever is earlier; None without a notice."""
        return min((t for t in (self.told, self._soft) if t is not None), default=None)

    @property
    def left(self) -> float:
        """Seconds for what comes after the commit; without a notice, a wait's length.

        A deadline that nobody told is not put off for it: whoever started the process
        (a supervisor, Kubernetes) may count from the signal.
        """
        if self._ends is None:
            return self.save_timeout
        return max(0.0, self._ends - self.clock.monotonic() - LEAVING)

    @property
    def may_go(self) -> bool:
        """Whether a machine of this run was told to go, and may still be going."""
        return self.clock.monotonic() < self._goes_by

    @property
    def since_notice(self) -> float | None:
        """Seconds since the notice that is served, wherever it came; None without.

        Any thread.
        """
        at = self.noticed_at
        return None if at is None else self.clock.monotonic() - at

    def shorten(self, received_at: float, grace: float | None) -> bool:
        """Takes an earlier deadline; a later one changes nothing.

        Args:
            received_at: when the notice came.
            grace: seconds told with it; None or 0 mean that nobody knows.

        Returns:
            Whether it was earlier.
        """
        before = self.at
        patience = grace or self.patience
        end, gone = received_at + patience, received_at + dl.until_end(patience)
        known = self.told if grace else self._soft
        if known is None or end < known:
            if grace:
                self.told, self._grace = end, grace
            else:
                self._soft = end
            self.runtime.at(gone, functools.partial(self._guard, end))
        self._ends = gone if self._ends is None else min(self._ends, gone)
        self._goes_by = max(self._goes_by, end + dl.LATE)
        return before is None or end < before

    def extend(self, *, at_boundary: bool) -> None:
        """Main begins to wait: a deadline that nobody told allows a full wait.

        Args:
            at_boundary: whether a step came to its end. One that outlived such a
                deadline shows that nobody counts from the notice: the time for what
                comes after the commit begins here.
        """
        now = self.clock.monotonic()
        has_outlived = self._ends is not None and self._ends <= now
        if at_boundary and self.told is None and has_outlived:
            self._ends = now + self.save_timeout
        if self._soft is not None:
            self._soft = max(self._soft, now + self.patience)
            self.runtime.at(self._soft, functools.partial(self._guard, self._soft))

    def pays_twice(self, grace: float | None) -> bool:
        """Whether a second commit at the end of a grace is worth it.

        It is where the grace is at least three times a save and two steps. While no
        save was measured the answer is yes: the first commit, made at once, measures
        it, and is asked again.

        Args:
            grace: seconds told with the notice; None or 0: commit at once and leave.
        """
        if not grace:
            return False
        save = self.save_seconds
        return save is None or grace >= 3 * (save + 2 * self.step_seconds())

    def set_last_call(self) -> None:
        """Sets the alarm for the final round; a newer setting replaces it."""
        when = self._last_call_time()
        if when is not None:
            self._last_call_at = when
            self.runtime.at(when, functools.partial(self._last_call, when))

    def _last_call_time(self) -> float | None:
        """When the final round must be opened so that its commit is in time."""
        if self.told is None or self._grace is None:
            return None
        save = self._grace / 4 if self.save_seconds is None else self.save_seconds
        needed = dl.needed_seconds(save, self._grace)
        return self.told - (needed + 2 * self.step_seconds())

    def limits(self) -> Limits:
        """Returns how long the waits for the others may last that begin now.

        Counts come from threads that wait for nothing, so a late count means a dead or
        frozen worker; the rest of the time belongs to the save. No wait for a peer is
        longer than `save_timeout`, however long the grace period is.

        The chief writes the shares of workers that never answer. A known deadline
        leaves time for one such share in any case, and for the shares of all others if
        three tenths of the time remain for the wait. If there is no time even for one
        share, only waiting helps: workers that are slower than the chief still answer.
        """
        now, at, save = self.clock.monotonic(), self.at, self.save_seconds
        total = self.save_timeout
        if at is not None:
            total = max(0.0, min(at - now, total))

        reserve = total / 2
        if save is not None:
            reserve = min(dl.SAFETY * save + 1.0, 0.8 * total)
        counts = max(0.1 * total, min(total - reserve, 0.4 * total))

        parts, share = 0.7 * total, dl.SAFETY * self.share_seconds
        left = -math.inf if self.told is None else self.told - now
        if 0 < share <= left:
            reserve = max(share, min((self.world - 1) * share, left - 0.3 * total))
            parts = min(parts, max(0.1 * total, left - reserve))

        goodbyes = BYES if at is None else max(0.5, min(at - now, BYES))
        waits = {Key.COUNT: counts, Key.DONE: parts, Key.BYE: goodbyes}
        last_call = self._last_call_time()
        is_early = last_call is not None and now < last_call
        return Limits(
            {key: now + seconds for key, seconds in waits.items()},
            may_train_on=is_early and self.pays_twice(self._grace),
        )

    def planned(self, save: float, share: float) -> float:
        """What a save is expected to take next time, by what one took.

        Args:
            save: seconds, measured.
            share: of these, for the chief's share; 0 where there were no shares. The
                chief has to write all of them where it finds itself alone.
        """
        return save + share * (self.world - 1)

    def forget(self) -> None:
        """The notice was served, and the process stays."""
        self.told = self._soft = self._ends = self._grace = self._last_call_at = None
        self.noticed_at = None

    def _last_call(self, when: float) -> None:
        if self._last_call_at == when:
            self.on_last_call()

    @property
    def patience(self) -> float:
        """Seconds to wait where nobody knows a deadline.

        Three saves are waited for in any case: waiting less than one takes can only
        lose it.
        """
        return max(self.save_timeout, 3 * (self.save_seconds or 0.0))

    def _guard(self, deadline: float) -> None:
        is_told = deadline == self.told
        if not is_told and deadline != self._soft:
            return  # replaced, or the notice was served
        if not self.on_guard(is_told):
            now = self.clock.monotonic()
            again = now + self.save_timeout
            if self.told is not None:
                again = min(again, max(now, self.told))
            self.runtime.at(again, functools.partial(self._guard, deadline))
