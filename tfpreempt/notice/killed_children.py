"""Finds children of this process that a signal has killed.

systemd and Slurm send SIGTERM to every process of a job, also to child processes that
read data. If such a child is killed, a step may wait forever for the child's data. A
killed child is found only until the code that started the child has called wait().
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_NAMES = {each.value: each.name for each in signal.Signals}


def killed_children() -> list[str]:
    """Returns the killed children, as texts such as "4711 (python, SIGTERM)".

    The function does not call wait() for the children.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").rpartition(") ")
        except OSError:
            continue  # the process has ended since `glob`
        state, parent = rest.split()[:2]
        if state == "Z" and int(parent) == os.getpid():
            signum = _killed_by(int(stat.parent.name))
            if signum:
                command = name.partition("(")[2]
                # a real-time signal has no name
                by = _NAMES.get(signum, f"signal {signum}")
                found.append(f"{stat.parent.name} ({command}, {by})")
    return sorted(found)


def _killed_by(pid: int) -> int:
    """Returns the number of the signal that killed a child.

    Returns 0 if no signal killed the child, or if wait() was called for the child.
    """
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    is_killed = end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return end.si_status if end is not None and is_killed else 0
