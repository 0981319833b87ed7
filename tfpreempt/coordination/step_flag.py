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
    ends: collections.deque[float] = dataclasses.field(  # of the newest steps
        default_factory=lambda: collections.deque(maxlen=61)
    )
