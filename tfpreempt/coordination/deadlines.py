"""The deadline of this process: kept, only ever shortened, and acted on in time."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfpreempt import deadline as dl
from tfpreempt.clock import Clock
from tfpreempt.coordination.runtime import Runtime


class Deadlines:
    """When the machine goes, and the two alarms that belong to it.

    Not thread-safe by itself: the coordinator calls it under its lock, and the alarms'
    callbacks take that lock.

    Args:
        runtime: for the alarms.
        clock: for the alarms.
        save_timeout: seconds to wait where no deadline is known.
        on_last_call: opens the final round; called when a long grace is almost over.
        on_guard: called just before the deadline, with whether one was really told.
    """

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        save_timeout: float,
        on_last_call: Callable[[], None],
        on_guard: Callable[[bool], bool],
    ) -> None:
        self.at: float | None = None
        self.grace: float | None = None
        self.noticed_at: float | None = None
        self._runtime = runtime
        self._clock = clock
        self._save_timeout = save_timeout
        self._on_last_call = on_last_call
        self._on_guard = on_guard
        self._last_call_at: float | None = None

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, where a source told one."""
        if self.at is None or not self.grace:
            return None
        return self.at - self._clock.monotonic()

    @property
    def since_notice(self) -> float | None:
        """Seconds since this machine's own first notice of the round; None without."""
        if self.noticed_at is None:
            return None
        return self._clock.monotonic() - self.noticed_at

    def shorten(
        self, received_at: float, grace: float | None, save: float | None
    ) -> bool:
        """Takes an earlier deadline; a later one changes nothing.

        Args:
            received_at: when the notice came.
            grace: seconds told with it.
            save: measured seconds of a save.

        Returns:
            Whether it was earlier.
        """
        new = dl.deadline(received_at, grace, dl.patience(self._save_timeout, save))
        if self.at is not None and self.at <= new:
            return False
        self.at, self.grace = new, grace
        self._set_guard(dl.guard(new, new - received_at), new)
        return True

    def pays_twice(self, save: float, step: float) -> bool:
        """Whether to train on after a commit, and commit again at the end."""
        if self.at is None or not dl.pays_twice(self.grace, save, step):
            return False
        last_call = dl.last_call(self.at, self.grace or 0.0, save, step)
        return last_call > self._clock.monotonic()

    def set_last_call(self, save: float | None, step: float) -> None:
        """Sets the alarm for the final round; a newer setting replaces it.

        Args:
            save: measured seconds of a save; unknown before the first commit.
            step: measured seconds of a step.
        """
        if self.at is None or self.grace is None:
            return
        save = self.grace / 4 if save is None else save
        when = dl.last_call(self.at, self.grace, save, step)
        self._last_call_at = when
        self._runtime.at(when, functools.partial(self._last_call, when))

    def forget(self) -> None:
        """The notice was served, and the process stays."""
        self.at = self.grace = self._last_call_at = None

    def _last_call(self, when: float) -> None:
        if self._last_call_at == when:
            self._on_last_call()

    def _set_guard(self, when: float, deadline: float) -> None:
        self._runtime.at(when, functools.partial(self._guard, deadline))

    def _guard(self, deadline: float) -> None:
        if self.at is None or self.at > deadline:
            return
        if not self._on_guard(bool(self.grace)):
            self._set_guard(self._clock.monotonic() + self._save_timeout, deadline)
