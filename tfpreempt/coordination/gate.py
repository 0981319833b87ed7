"""What the training loop touches at a boundary: a counter and a flag, no lock.

The loop counts the next interval and then looks at the flag; the watcher raises the
flag and then reads the counter. Whichever comes first, one of the two sees the other,
so that no interval is ever started that the watcher did not publish.
"""

from __future__ import annotations


class Gate:
    """The counter is written by the main thread, the flag by the coordinator."""

    __slots__ = ("bare", "busy", "failed", "flag", "started")

    def __init__(self) -> None:
        self.busy = False  # inside a run(); only the main thread looks
        self.started = 0  # intervals started by this process
        self.failed = -1  # the newest one that was left half done
        self.bare = -1  # the newest one whose step nobody sees the end of
        self.flag = False  # look before starting another
