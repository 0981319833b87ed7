"""What the training loop touches at a boundary: a counter and a flag, no lock.

The loop counts the next interval and then looks at the flag; the watcher raises the
flag and then reads the counter. Whichever comes first, one of the two sees the other,
so that no interval is ever started that the watcher did not publish.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, eq=False)
class Gate:
    """The counter is written by the main thread, the flag by the coordinator."""

    busy: bool = False  # inside a run(); only the main thread looks
    started: int = 0  # intervals started by this process
    failed: int = -1  # the newest one that was left half done
    bare: int = -1  # the newest one whose step nobody sees the end of
    flag: bool = False  # look before starting another
