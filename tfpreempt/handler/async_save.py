"""One save that is written and committed while training goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfpreempt.checkpoint.commit import Permit
from tfpreempt.core.threads import OwnedThread


class AsyncSave:
    """It is under way from the start, in a thread of its own.

    Nothing of what was captured is kept here: its memory is free when the save is over.

    Args:
        name: of the save; equal on all workers, and never used again.
        permit: what the commit asks.
        complete: writes and commits what was captured; on the thread.
        told: is given what that failed by, unless it was given up; on the thread.
    """

    def __init__(
        self,
        name: str,
        permit: Permit,
        complete: Callable[[], object],
        told: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self._permit = permit
        run = functools.partial(self._run, complete, told)
        self._thread = OwnedThread("tfpreempt-save", run)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is over; whether it is. Any thread.

        Args:
            seconds: at most; None: as long as it takes.
        """
        return self._thread.join(seconds)

    def give_up(self) -> bool:
        """It commits nothing any more; False, after a wait, where it just did."""
        if self._permit.give_up():
            return True
        self._thread.join()
        return False

    @property
    def is_given_up(self) -> bool:
        """Whether it commits nothing because a newer save took its place."""
        return self._permit.is_given_up

    def _run(
        self, complete: Callable[[], object], told: Callable[[Exception], None]
    ) -> None:
        try:
            complete()
        except Exception as error:  # noqa: BLE001 - training survives it
            if not self.is_given_up:
                told(error)
