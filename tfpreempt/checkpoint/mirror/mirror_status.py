"""`MirrorStatus`: progress of a mirror, for users. `RetryState`: times of retries."""

from __future__ import annotations

import dataclasses
import logging

from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.core.clock import Clock

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """Progress of a mirror at one moment. The mirror replaces the object, and never
    changes it.

    Attributes:
        uri: URI of the object store.
        latest_step: step of the newest local commit; None before the first commit.
        mirrored_step: step of the newest commit known to be complete in the store.
        is_complete: whether the newest local commit is complete in the store.
        pending: number of commits that wait for their upload or are being uploaded.
        uploading: step of the commit being uploaded; None between uploads.
        sent_bytes: bytes uploaded so far of the commit being uploaded.
        total_bytes: size in bytes of the commit being uploaded.
        last_error: error of the last attempt to upload; None after a success.
        error_count: number of failed attempts so far.
        skipped: number of commits that were not uploaded, because they were deleted or
            found corrupt before the upload.
    """

    uri: str
    latest_step: int | None = None
    mirrored_step: int | None = None
    is_complete: bool = True
    pending: int = 0
    uploading: int | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    last_error: str | None = None
    error_count: int = 0
    skipped: int = 0

    @property
    def progress(self) -> str:
        """Progress of the current upload, as text."""
        if self.uploading is None or not self.total_bytes:
            return "not started"
        sent, total = self.sent_bytes / (1 << 20), self.total_bytes / (1 << 20)
        return f"{sent:.1f} of {total:.1f} MiB"


def log_waiting(
    status: MirrorStatus, stall_timeout: float, timeout: float | None
) -> None:
    """Logs that a caller waits for the upload of the newest commit.

    Args:
        status: progress of the mirror. If the newest commit is already uploaded, and
            only deletions of old commits are left to do, nothing is logged.
        stall_timeout: seconds without progress after which the wait ends.
        timeout: longest duration of the wait in seconds; None: no timeout.
    """
    if status.is_complete:
        return
    limit = f"until no byte was sent for {stall_timeout:g} s"
    _log.info(
        "waiting for the upload of step %s to %s (%s), %s%s",
        status.latest_step,
        status.uri,
        status.progress,
        limit if timeout is None else f"for {timeout:g} s",
        f"; the last attempt failed: {status.last_error}" if status.last_error else "",
    )


def log_finished(status: MirrorStatus, directory: str) -> None:
    """Logs whether the newest commit was uploaded before the machine is preempted.

    Args:
        status: progress of the mirror.
        directory: the checkpoint directory; "" if unknown.
    """
    if status.latest_step is None:
        return
    if status.is_complete:
        _log.info(
            "the upload of step %s to %s is complete",
            status.latest_step,
            status.uri,
        )
        return
    known = status.mirrored_step
    there = "an older commit" if known is None else f"step {known}"
    _log.error(
        "the upload of step %s to %s was not complete in time (%s; %s). The commit is "
        "intact in %s: a start on this machine completes the upload. A start on "
        "another machine resumes from %s.",
        status.latest_step,
        status.uri,
        status.progress,
        (status.last_error or "no error, but not enough time").rstrip("."),
        directory or "the local directory",
        there,
    )


FIRST_PAUSE = 1.0  # seconds before the first retry; doubled at each failure
LONGEST_PAUSE = 60.0
STALLED = 300.0  # a wait without a timeout ends after so many seconds without a byte
REFUSED = 10.0  # replaces STALLED after an error that a retry cannot repair


class RetryState:
    """Decides when an upload is retried, and when a caller stops waiting for an upload.

    The mirror calls the methods while holding the mirror's lock.

    Args:
        clock: time source that measures durations.

    Attributes:
        is_awaited: whether a caller waits without a timeout. In this case the next
            pause after a failure ends at once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_awaited = False
        self._pause = FIRST_PAUSE
        self._is_refused = False  # the last error cannot be repaired by a retry
        self._moved_at = clock.monotonic()
        self._commit: Entry | None = None  # commit of the newest attempt
        self._most_sent = 0  # most bytes sent in one attempt for `_commit`

    def sent(self, commit: Entry, count: int) -> None:
        """Records that the current attempt has sent `count` bytes of a commit so far.

        Counts as progress only if no earlier attempt has sent as many bytes.
        """
        if self._commit is not commit:
            self._commit, self._most_sent = commit, 0
        if count > self._most_sent:
            self._most_sent, self._is_refused = count, False
            self.reset_stall_timer()

    def failed(self, error: Exception) -> None:
        """Records that an attempt to upload has failed with an error."""
        self._is_refused = getattr(error, "is_permanent", False)

    def succeeded(self) -> None:
        """Records a complete upload."""
        self._pause, self._is_refused = FIRST_PAUSE, False

    def next_pause(self) -> float:
        """Returns the seconds to wait before the next attempt.

        Each call doubles the next value, up to `LONGEST_PAUSE`.
        """
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        return pause

    def reset_stall_timer(self) -> None:
        """Restarts the stall timeout, when a wait begins or the upload progresses."""
        self._moved_at = self._clock.monotonic()

    @property
    def stall_timeout(self) -> float:
        """Seconds without an uploaded byte after which a wait ends.

        Only for a wait whose caller set no time limit.
        """
        return REFUSED if self._is_refused else STALLED

    @property
    def stall_deadline(self) -> float:
        """Instant at which a wait without a time limit ends, if no byte is uploaded
        before this instant; by the monotonic clock."""
        return self._moved_at + self.stall_timeout
