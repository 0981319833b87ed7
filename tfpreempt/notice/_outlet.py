"""The one way out of a source: open from start to close, once, and never raising."""

from __future__ import annotations

import logging

from tfpreempt import errors
from tfpreempt.notice.source import OnNotice

_logger = logging.getLogger(__name__)


class Outlet:
    """Where a source sends its notices.

    Args:
        name: the source's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._on_notice: OnNotice | None = None
        self._is_closed = False

    def open(self, on_notice: OnNotice) -> None:
        """Opens it. Once.

        Raises:
            UsageError: the source was started or closed before.
        """
        if self._on_notice is not None or self._is_closed:
            state = "closed" if self._is_closed else "started"
            raise errors.UsageError(
                f"start() of the notice source {self._name!r}, which was already "
                f"{state}; a source is started once: make a new one"
            )
        self._on_notice = on_notice

    def send(self, detail: str) -> None:
        """Passes a notice on; says nothing when closed. Any thread, never raises."""
        if self._on_notice is None or self._is_closed:
            return
        try:
            self._on_notice(detail)
        except Exception:
            # The source must outlive its listener: others may share its thread.
            _logger.exception("on_notice failed for a notice of %s", self._name)

    def close(self) -> bool:
        """Closes it; True the first time if it was open."""
        was_open = self._on_notice is not None and not self._is_closed
        self._is_closed = True
        return was_open
