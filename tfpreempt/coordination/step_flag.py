"""The flag that stops the training loop, and the loop's counter, without a lock.

An interval is the time between two boundaries, such as a step. At a boundary the loop
first counts the next interval and then reads the flag. Another thread, the watcher,
first raises the flag and then reads the counter. So either the loop sees the flag, or
the watcher sees the new count. The loop never starts an interval that is missing in the
count that the watcher inserts into the key-value store.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from time import monotonic


@dataclasses.dataclass(slots=True, eq=False)
class StepFlag:
    """Counter and flag of the training loop.

    The main thread writes every field but `flag`, which the coordinator writes.
    """

    busy: bool = False  # whether run() is running; read by the main thread only
    started: int = 0  # number of intervals that this process has started
    failed: int = -1  # number of the newest interval whose step raised an error
    bare: int = -1  # newest interval with a step whose end tfpreempt cannot observe
    flag: bool = False  # whether to stop before the next interval, for a directive
    # Monotonic times at which the newest steps ended. A negative number is a time from
    # which the next step is measured.
    ends: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=61)
    )

    def measure_from_now(self) -> None:
        """Excludes the time before this call from the duration of the next step.

        Called at boundaries that are not followed by a step, as in an evaluation.
        """
        if self.ends and self.ends[-1] < 0:
            self.ends.pop()
        self.ends.append(-monotonic())

    def leave_out_first(self, seconds: float) -> None:
        """Excludes the first step, which also traces, from `step_times`.

        Args:
            seconds: seconds since the end of the first step that do not count as a part
                of the second step.
        """
        end = abs(self.ends[-1]) if self.ends else monotonic()
        self.ends.clear()
        self.ends.append(-(end + seconds))

    def step_times(self) -> list[float]:
        """Returns the seconds of the newest steps; any thread may call the method."""
        # `copy` is atomic. `tuple` creates a tuple during the iteration, and until
        # Python 3.11 a garbage collection at this moment lets other threads run.
        pairs = itertools.pairwise(self.ends.copy())
        return [end - abs(before) for before, end in pairs if end > 0]

    @property
    def step_seconds(self) -> float:
        """Mean of `step_times`; 0 before the second step."""
        return statistics.fmean(self.step_times() or [0.0])
