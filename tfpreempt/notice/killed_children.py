"""Finds children of this process killed by a signal.

systemd and Slurm send SIGTERM to every process of a job, also to data readers, and then
a step may hang while waiting for a killed reader. A child is found only until the code
that started it has called wait().
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_NAMES = {each.value: each.name for each in signal.Signals}


def killed_children() -> list[str]:
    """Returns killed children as "4711 (python, SIGTERM)"; reaps no child."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").rpartition(") ")
        except OSError:
            continue  # the process has ended in the meantime
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
    """Returns the signal that killed a child; 0 if not killed, or reaped."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    is_killed = end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return end.si_status if end is not None and is_killed else 0
