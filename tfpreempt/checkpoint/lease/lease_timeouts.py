"""Computes how long a new run waits for the holder of a lease; no clock, no I/O."""

from __future__ import annotations

import dataclasses

from tfpreempt.checkpoint.lease.lease_record import LeaseOwner, ObservedLease

GRACE = 30.0  # seconds; assumed if the holder's grace period is unknown
# Seconds; a limit, because the other workers of the new run wait too.
LONGEST_GRACE = 180.0
MARGIN = 10.0  # seconds added to the grace period and the expiry time
_LOOKS = 5  # a late poll counts as at most this many poll periods


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenewalIntervals:
    """Times of a lease in seconds; directories and object stores have different times.

    Attributes:
        renewal: time between two renewals by the holder.
        expiry: time without a renewal after which the lease has expired.
        poll: time between two polls of the lease by a waiting process.
    """

    renewal: float
    expiry: float
    poll: float


@dataclasses.dataclass
class LeaseWait:
    """Decides when a new run may take over a lease, and when it gives up waiting.

    Attributes:
        here: the waiting process.
        pace: times of the lease.
        holder: holder of the lease; None before the first poll.
        grace: grace period of the holder in seconds: the time for an exit.
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
        """Timeout of the wait in seconds: grace period of the holder, expiry time and
        margin."""
        return self.grace + self.pace.expiry + MARGIN

    def passed(self, seconds: float) -> None:
        """Adds the time since the last poll to the wait.

        After a long pause of this process or its machine, the time says nothing about
        the holder. So at most five poll periods are counted.

        Args:
            seconds: time since the last poll.
        """
        poll = self.pace.poll
        seconds = min(max(seconds, poll), _LOOKS * poll)
        self.waited += seconds
        self._silent += seconds

    def expiry_reason(self, found: ObservedLease) -> str | None:
        """Decides whether a lease may be taken over. Returns the reason as text for
        people; None if the lease is still valid.

        Args:
            found: the lease as found by this poll.
        """
        if self._last != (found.token, found.renewals):
            self._last, self._silent = (found.token, found.renewals), 0.0
        self.holder = found.holder
        if found.holder is None:
            return "which was exiting"
        if found.holder.is_dead(self.here):
            return "which has terminated"
        if self._silent >= self.pace.expiry:
            return f"which did not renew the lease for {self._silent:.0f} s"
        grace = found.holder.grace_seconds
        is_valid = 0.0 <= grace <= LONGEST_GRACE  # False for NaN too
        self.grace = grace if is_valid else LONGEST_GRACE
        return None

    @property
    def is_over(self) -> bool:
        """Whether the wait has timed out: a holder that was asked to exit would have
        exited by now, or its lease would have expired."""
        return self.waited >= self.limit
