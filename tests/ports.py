"""Ports of the loopback interface for the servers that tests start.

Another process may take a port of `bind(0)` a moment later, and concurrent test
processes need hundreds. Therefore each process takes its ports in sequence from the
range that the kernel does not assign (below ip_local_port_range).
"""

from __future__ import annotations

import itertools
import os
import random
import socket

_FIRST, _END = 12_000, 32_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_MINE = range(_FIRST + _WORKER, _END, _WORKERS)
# Not from the first one on: others may run their tests on this machine too.
_turn = itertools.islice(
    itertools.cycle(_MINE), random.SystemRandom().randrange(len(_MINE)), None
)


def free_ports(count: int) -> list[int]:
    """Returns a number of unused ports."""
    found: list[int] = []
    while len(found) < count:
        port = next(_turn)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
