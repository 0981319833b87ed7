"""What a start may do about a lease that another process has: no clock, no I/O."""

from __future__ import annotations

import dataclasses

from tfpreempt.checkpoint.lease.lease_record import Found, Holder

GRACE = 30.0  # seconds that a holder may need to leave, where nobody knows
LONGEST_GRACE = 180.0  # that is waited for: the other workers wait for this start
MARGIN = 10.0  # more than the grace and the expiry
_LOOKS = 5  # that the time from one look to the next counts for, at most


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """How often leases of one kind are renewed and looked at, in seconds.

    Attributes:
        renewal: from one beat of the holder to the next.
        expiry: without a beat, after which it counts for nothing.
        poll: that who waits pauses between two looks.
    """

    renewal: float
    expiry: float
    poll: float


@dataclasses.dataclass
class Patience:
    """How long one start waits for one lease.

    Attributes:
        here: the process that waits.
        pace: times of the lease.
        holder: the owner of the lease; None before the first look.
        grace: seconds that the owner may need to exit.
        waited: seconds that the wait took so far.
    """

    here: Holder
    pace: Renewal
    holder: Holder | None = None
    grace: float = dataclasses.field(default_factory=lambda: GRACE)
    waited: float = 0.0
    _last: tuple[str, bytes] | None = None
    _silent: float = 0.0

    @property
    def limit(self) -> float:
        """Seconds that the wait may take."""
        return self.grace + self.pace.expiry + MARGIN

    def passed(self, seconds: float) -> None:
        """So long from the last look to the next. Where this process, or its machine,
        stood still, that says nothing of the holder: it counts as a few looks."""
        poll = self.pace.poll
        seconds = min(max(seconds, poll), _LOOKS * poll)
        self.waited += seconds
        self._silent += seconds

    def why_over(self, found: Found) -> str | None:
        """Why a lease counts for nothing, by what is seen now; None if it counts."""
        if self._last != (found.token, found.beat):
            self._last, self._silent = (found.token, found.beat), 0.0
        self.holder = found.holder
        if found.holder is None:
            return "which was leaving"
        if found.holder.is_dead(self.here):
            return "which is dead"
        if self._silent >= self.pace.expiry:
            return f"which did not renew it for {self._silent:.0f} s"
        grace = found.holder.grace_seconds
        is_one = 0.0 <= grace <= LONGEST_GRACE  # and a number
        self.grace = grace if is_one else LONGEST_GRACE
        return None

    @property
    def is_over(self) -> bool:
        """Whether the wait is: its holder would have left, or died, by now."""
        return self.waited >= self.limit
