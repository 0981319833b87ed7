"""One save that is written and committed while training goes on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from tfpreempt.core.events import Commit
from tfpreempt.core.threads import OwnedThread

Complete = Callable[[Callable[[], bool]], Commit | None]
"""Writes and commits what was captured.

It is given what it asks, just before the commit, whether that is still wanted.
"""


class AsyncSave:
    """It is under way from the start, in a thread of its own.

    Nothing of what was captured is kept here: its memory is free when the save is over.

    Args:
        name: of the save; equal on all workers, and never used again.
        complete: what the thread does.
        told: is given what that failed by; on the thread.
    """

    def __init__(
        self, name: str, complete: Complete, told: Callable[[Exception], None]
    ) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._commits = self._is_given_up = False
        run = functools.partial(self._run, complete, told)
        self._thread = OwnedThread("tfpreempt-save", run)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to come of it; any thread."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is over; whether it is. Any thread.

        Args:
            seconds: at most; None: as long as it takes.
        """
        return self._thread.join(seconds)

    def give_up(self) -> bool:
        """It commits nothing any more; False, after a wait, where it just did."""
        with self._lock:
            self._is_given_up = not self._commits
        if self._commits:
            self._thread.join()
        return self._is_given_up

    def _may_commit(self) -> bool:
        with self._lock:
            self._commits = not self._is_given_up
            return self._commits

    def _run(self, complete: Complete, told: Callable[[Exception], None]) -> None:
        try:
            complete(self._may_commit)
        except Exception as error:  # noqa: BLE001 - training survives it
            told(error)
