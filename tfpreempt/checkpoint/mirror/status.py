"""MirrorStatus, which shows users how far a mirror is; and the state of its retries."""

from __future__ import annotations

import dataclasses
import logging

from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.core.clock import Clock

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """How far the mirror is, at one moment.

    Attributes:
        uri: where commits are copied to.
        newest: step of the newest local commit; None before the first.
        mirrored: step of the newest commit that this process knows to be whole there.
        is_complete: whether that is the newest local one.
        pending: commits that wait or are under way.
        uploading: step of the one under way; None while there is none.
        sent_bytes: of that one.
        total_bytes: of that one.
        fault: what went wrong at the last try; None while all is well.
        faults: how many tries went wrong so far.
        dropped: commits that went before they were copied.
    """

    uri: str
    newest: int | None = None
    mirrored: int | None = None
    is_complete: bool = True
    pending: int = 0
    uploading: int | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    fault: str | None = None
    faults: int = 0
    dropped: int = 0

    @property
    def progress(self) -> str:
        """How far the upload that is under way has come, in words."""
        if self.uploading is None or not self.total_bytes:
            return "not begun"
        sent, total = self.sent_bytes / (1 << 20), self.total_bytes / (1 << 20)
        return f"{sent:.1f} of {total:.1f} MiB"


def say_waiting(status: MirrorStatus, patience: float, timeout: float | None) -> None:
    """Logs that a caller waits for the newest commit to be copied.

    Args:
        status: how far the mirror is; nothing is logged if only old copies are deleted.
        patience: seconds without progress after which the wait ends.
        timeout: seconds that the wait may take; None without a limit.
    """
    if status.is_complete:
        return
    limit = f"until {patience:g} s bring nothing new"
    _log.warning(
        "tfpreempt: waiting for the copy of step %s in %s (%s), %s%s",
        status.newest,
        status.uri,
        status.progress,
        limit if timeout is None else f"for {timeout:g} s",
        f"; the last try failed: {status.fault}" if status.fault else "",
    )


def say_finished(status: MirrorStatus, directory: str) -> None:
    """Logs whether the newest commit was copied before the machine goes away.

    Args:
        status: how far the mirror is.
        directory: the checkpoint directory; empty if not known.
    """
    if status.newest is None:
        return
    if status.is_complete:
        _log.warning(
            "tfpreempt: the copy of step %s in %s is whole", status.newest, status.uri
        )
        return
    known = status.mirrored
    there = "what was there before" if known is None else f"step {known}"
    _log.error(
        "tfpreempt: the copy of step %s in %s was not whole when the time was up "
        "(%s; %s). The commit stands in %s, and a start there finishes the copy; a "
        "start on another machine goes on from %s.",
        status.newest,
        status.uri,
        status.progress,
        (status.fault or "no fault, too little time").rstrip("."),
        directory or "the local directory",
        there,
    )


FIRST_PAUSE = 1.0  # seconds after a fault; doubles
LONGEST_PAUSE = 60.0
STALLED = 300.0  # seconds without a byte after which an end without a limit gives up
REFUSED = 10.0  # likewise, where trying again is of no use


class Tries:
    """What is known of the newest try, and of those before; used under a lock.

    Args:
        clock: for durations.

    Attributes:
        is_awaited: whether a caller waits without a limit, so the pause after a fault
            is to end.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_awaited = False
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
