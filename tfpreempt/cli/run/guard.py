"""Ends the workers that a supervisor leaves behind when it is killed itself.

A script of its own (run by path). It reads lines from its standard input, `+PGID` for
a process group that has started and `-PGID` for one that is gone. When the input ends,
the supervisor has: what is left gets SIGTERM, some seconds to commit, and SIGKILL.
The workers' pipes do not break meanwhile: their reading ends are open here too, and
what is written is appended to the logs.
The kernel's parent-death signal is not enough: TensorFlow's own SIGTERM handler
swallows it, and two runs in one checkpoint directory would follow.

Usage: guard.py GRACE_SECONDS [DESCRIPTOR LOG ...]
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable

_TICK_SECONDS = 0.05
_READ_BYTES = 1 << 20


def read_groups(lines: Iterable[str]) -> set[int]:
    """Follows the supervisor's lines to their end; returns the groups that are left."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def end_groups(groups: set[int], grace_seconds: float, outputs: dict[int, str]) -> None:
    """Asks the workers to leave and kills what stays; keeps what they say."""
    deadline = time.monotonic() + grace_seconds
    for group in groups:
        # The worker alone, so that its loader processes live through its commit; where
        # only children are left, all of them.
        _signal(group, signal.SIGTERM) or _signal(-group, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        _copy(outputs, _TICK_SECONDS)
        groups = {group for group in groups if _signal(-group, 0)}
    for group in groups:
        _signal(-group, signal.SIGKILL)
    _copy(outputs, 0.0)


def _copy(outputs: dict[int, str], seconds: float) -> None:
    """Appends to the logs what comes within a time; drops the pipes that have ended."""
    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(seconds * 1000):
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            del outputs[descriptor]
            continue
        with contextlib.suppress(OSError), open(outputs[descriptor], "ab") as log:
            log.write(data)


def _signal(target: int, number: int) -> bool:
    """Sends a signal to a process or, below 0, a group; False where there is none."""
    try:
        os.kill(target, number)
    except OSError:
        return False
    return True


def main() -> None:
    """Guards until the supervisor ends; only that ends the guard."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outputs = dict(zip(map(int, sys.argv[2::2]), sys.argv[3::2], strict=True))
    if groups := read_groups(sys.stdin):
        end_groups(groups, float(sys.argv[1]), outputs)


if __name__ == "__main__":
    main()
