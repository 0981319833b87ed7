"""MirrorStatus: how far the copies in an object store are, for users."""

from __future__ import annotations

import dataclasses


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
