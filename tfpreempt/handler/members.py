"""The open members of a session."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator

from tfpreempt.core.events import Event, Fault
from tfpreempt.handler.member import Member

log = logging.getLogger(__name__)


class Members:
    """Those that take part, oldest first; iterated on any thread.

    A member that was never used is held weakly: who drops the handler has closed it.
    From the first step on it is kept, because a program that never closes its handler
    still gets a last boundary.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Member]] = []
        self._kept: set[Member] = set()

    def __iter__(self) -> Iterator[Member]:
        return iter([member for ref in self._refs if (member := ref()) is not None])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def add(self, member: Member) -> None:
        """It takes part from now on."""
        self._refs.append(weakref.ref(member))

    def keep(self, member: Member) -> None:
        """Training with it has begun."""
        self._kept.add(member)

    def let_go(self) -> None:
        """What is kept is dropped with its handler again."""
        self._kept.clear()

    def remove(self, member: Member) -> None:
        """It takes part no more."""
        self._kept.discard(member)
        self._refs = [ref for ref in self._refs if ref() not in (None, member)]

    def record(self, event: Event) -> None:
        """Writes an event to every journal; any thread."""
        for member in self:
            member.record(event)

    def fault(self, where: str, error: Exception) -> None:
        """Training survives this; it is logged and written to the journals."""
        log.error("tfpreempt: %s failed: %s", where, error)
        self.record(Fault(where=where, error=f"{type(error).__name__}: {error}"))
