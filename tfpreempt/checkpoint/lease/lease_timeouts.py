"""Decides how long a start waits for the lease of another process: no clock, no I/O."""

from __future__ import annotations

import dataclasses

from tfpreempt.checkpoint.lease.lease_record import LeaseOwner, ObservedLease

GRACE = 30.0  # seconds that a holder may need to exit, if unknown
LONGEST_GRACE = 180.0  # seconds at most: the other workers of this start wait too
MARGIN = 10.0  # seconds of waiting beyond the grace period and the expiry
_LOOKS = 5  # at most so many poll periods are counted per poll


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenewalIntervals:
    """The times of a kind of lease, in seconds.

    Attributes:
        renewal: period of the holder's renewals.
        expiry: time without a renewal after which the lease has expired.
        poll: pause of a waiting process between two polls of the lease.
    """

    renewal: float
    expiry: float
    poll: float


@dataclasses.dataclass
class LeaseWait:
    """The wait of one start for one lease.

    Attributes:
        here: the waiting process.
        pace: times of the lease.
        holder: holder of the lease; None before the first poll.
        grace: grace period of the holder in seconds: the time needed for an exit.
        waited: duration of the wait so far, in seconds.
    """

    here: LeaseOwner
    pace: RenewalIntervals
    holder: LeaseOwner | None = None
    grace: float = dataclasses.field(default_factory=lambda: GRACE)
    waited: float = 0.0
    _last: tuple[str, bytes] | None = None
    _silent: float = 0.0

    @property
    def limit(self) -> float:
        """The longest duration of the wait, in seconds."""
        return self.grace + self.pace.expiry + MARGIN

    def passed(self, seconds: float) -> None:
        """Adds the time between two polls of the lease to the wait.

        A long pause of this process or its machine says nothing about the holder, so a
        pause counts as five poll periods at most.

        Args:
            seconds: time from the last poll to the next.
        """
        poll = self.pace.poll
        seconds = min(max(seconds, poll), _LOOKS * poll)
        self.waited += seconds
        self._silent += seconds

    def expiry_reason(self, found: ObservedLease) -> str | None:
        """Returns why a lease can be taken over, for people; None if the lease still
        counts."""
        if self._last != (found.token, found.renewals):
            self._last, self._silent = (found.token, found.renewals), 0.0
        self.holder = found.holder
        if found.holder is None:
            return "which was leaving"
        if found.holder.is_dead(self.here):
            return "which is dead"
        if self._silent >= self.pace.expiry:
            return f"which did not renew the lease for {self._silent:.0f} s"
        grace = found.holder.grace_seconds
        is_one = 0.0 <= grace <= LONGEST_GRACE  # and a number
        self.grace = grace if is_one else LONGEST_GRACE
        return None

    @property
    def is_over(self) -> bool:
        """Whether the wait has timed out: by now a holder would have exited or
        expired."""
        return self.waited >= self.limit
