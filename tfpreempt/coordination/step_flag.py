"""Counter and flag with which the training loop is stopped, without a lock.

An interval is the time between two boundaries, such as a step. At a boundary the loop
first counts the next interval and then reads the flag. A thread, the watcher, first
raises the flag and then reads the counter. So either the loop sees the flag, or the
watcher sees the new count. The loop never starts an interval that is missing in the
count that the watcher publishes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, eq=False)
class StepFlag:
    """Counter and flag of the training loop.

    The main thread writes every field but `flag`, which the coordinator writes.
    """

    busy: bool = False  # inside a run(); read by the main thread only
    started: int = 0  # intervals started by this process
    failed: int = -1  # number of the newest interval whose step raised an error
    bare: int = -1  # newest interval with a step whose end tfpreempt cannot observe
    flag: bool = False  # stop before the next interval, and ask the coordinator
