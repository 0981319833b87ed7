"""Counter and flag for the training loop at a boundary, without a lock.

The loop counts the next interval and then reads the flag; the watcher raises the flag
and then reads the counter. In any order of the two, the loop sees the flag or the
watcher sees the count. So the loop never starts an interval missing from the count that
the watcher publishes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, eq=False)
class StepFlag:
    """Counter and flag. Main writes the counter, the coordinator writes the flag."""

    busy: bool = False  # inside a run(); read by the main thread only
    started: int = 0  # intervals started by this process
    failed: int = -1  # newest interval that ended before completion
    bare: int = -1  # newest interval with a step whose end tfpreempt cannot observe
    flag: bool = False  # take the slow path before the next interval
