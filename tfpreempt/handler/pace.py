"""How long a step takes, whatever is evaluated between two of them."""

from __future__ import annotations

from tfpreempt.core.clock import Clock


class Pace:
    """Of the steps of this process. Main thread; any thread may ask.

    Boundaries are counted as in the gate: by the intervals that were started.

    Args:
        clock: measures.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._apart = 0.0  # seconds since then, and intervals, that are no step's
        self._no_steps = 0
        self._checked: tuple[int, float] | None = None  # the newest check, and when

    def begin(self, started: int) -> None:
        """Measures from now on: the first step, which traces its function, is over.

        Args:
            started: intervals so far.
        """
        self._since, self._no_steps, self._apart = self._clock.monotonic(), started, 0.0

    def check(self, started: int) -> None:
        """A boundary that no step follows; between two of these nothing is a step's.

        Args:
            started: intervals so far, that one included.
        """
        now, before = self._clock.monotonic(), self._checked
        self._checked = started, now
        self._no_steps += 1
        if before is not None and before[0] == started - 1:
            self._apart += now - before[1]

    def step_seconds(self, started: int) -> float:
        """Mean seconds of a step so far; 0 while there was none.

        Args:
            started: intervals so far.
        """
        if self._since is None:
            return 0.0
        passed = self._clock.monotonic() - self._since - self._apart
        return passed / max(1, started - self._no_steps)
