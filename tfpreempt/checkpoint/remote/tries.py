"""How the tries to copy get on: when a wait gives up, how long a pause is."""

from __future__ import annotations

from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.core.clock import Clock

FIRST_PAUSE = 1.0  # seconds after a fault; doubles
LONGEST_PAUSE = 60.0
STALLED = 300.0  # seconds without a byte after which an end without a limit gives up
REFUSED = 10.0  # likewise, where trying again is of no use


class Tries:
    """What is known of the newest try, and of those before; used under a lock.

    Args:
        clock: for durations.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._is_refused = False  # by what only a person can mend
        self._moved_at = clock.monotonic()
        self._commit: Entry | None = None  # of the newest try
        self._most_sent = 0  # by any try of that one

    def sent(self, commit: Entry, count: int) -> None:
        """So many bytes by now; what an earlier try had sent is no progress."""
        if self._commit is not commit:
            self._commit, self._most_sent = commit, 0
        if count > self._most_sent:
            self._most_sent, self._is_refused = count, False
            self.await_again()

    def failed(self, error: Exception) -> None:
        """It ended by an error."""
        self._is_refused = getattr(error, "is_permanent", False)

    def succeeded(self) -> None:
        """The copy is there."""
        self._pause, self._is_refused = FIRST_PAUSE, False

    def next_pause(self) -> float:
        """Seconds until the next try; longer each time."""
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        return pause

    def await_again(self) -> None:
        """Patience begins anew: somebody waits, or it moves."""
        self._moved_at = self._clock.monotonic()

    @property
    def patience(self) -> float:
        """Seconds without progress after which a wait without a limit gives up."""
        return REFUSED if self._is_refused else STALLED

    @property
    def gives_up_at(self) -> float:
        """When such a wait gives up, if nothing moves."""
        return self._moved_at + self.patience
