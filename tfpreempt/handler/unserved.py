"""Notices that came while nobody in this process listened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfpreempt.core.events import Notice


class Unserved:
    """They are kept until somebody takes them; each is taken once. Any thread."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []

    def __iter__(self) -> Iterator[Notice]:
        return iter(list(self._notices))

    def keep(self, notice: Notice) -> None:
        """Whoever listens next serves it."""
        self._notices.append(notice)

    def take(self, notice: Notice) -> bool:
        """Whether it was still there; it is the caller's now."""
        with contextlib.suppress(ValueError):
            self._notices.remove(notice)
            return True
        return False
