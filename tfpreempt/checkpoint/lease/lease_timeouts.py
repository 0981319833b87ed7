"""Computes how long a new run waits for the holder of a lease; no clock, no I/O."""

from __future__ import annotations

import dataclasses

from tfpreempt.checkpoint.lease.lease_record import LeaseOwner, ObservedLease

GRACE = 30.0  # seconds; assumed if the holder's grace period is unknown
# Seconds; longer grace periods in a record count as this value, because all workers of
# the new run wait.
LONGEST_GRACE = 180.0
MARGIN = 10.0  # seconds added to the grace period and the expiry time
_LOOKS = 5  # a late poll adds at most this many poll periods to the wait


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenewalIntervals:
    """Times of a lease in seconds; directories and object stores have different times.

    Attributes:
        renewal: time between two renewals by the holder.
        expiry: time without a renewal after which another process may take the lease.
        poll: time between two polls of the lease by a waiting process.
    """

    renewal: float
    expiry: float
    poll: float


@dataclasses.dataclass
class LeaseWait:
    """Decides when a new run may take over a lease, and when the new run gives up.

    Attributes:
        here: record of the waiting process.
        pace: times of the lease.
        holder: holder of the lease, as found by the last poll; None before that.
        grace: grace period of the holder in seconds: the time that the holder may need
            for its exit.
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
        """Timeout of the wait in seconds: the sum of the holder's grace period, the
        expiry time and the margin."""
        return self.grace + self.pace.expiry + MARGIN

    def passed(self, seconds: float) -> None:
        """Adds the time since the last poll to the duration of the wait.

        If this process or its machine was suspended, the holder may have been suspended
        too, and could not renew the lease. So at most five poll periods are added.

        Args:
            seconds: time since the last poll.
        """
        poll = self.pace.poll
        seconds = min(max(seconds, poll), _LOOKS * poll)
        self.waited += seconds
        self._silent += seconds

    def expiry_reason(self, found: ObservedLease) -> str | None:
        """Decides whether a lease may be taken over.

        Args:
            found: the lease as found by this poll.

        Returns:
            The reason for taking over, as text for people; None if the lease is valid.
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
        """Whether the wait has timed out: by now, a holder that received a preemption
        notice would have exited, or its lease would have expired."""
        return self.waited >= self.limit
