"""The children of this process that a signal ended: what a hanging step may wait for.

SIGTERM to a whole group, as systemd and Slurm send it, ends readers of data too. They
are looked for among those that nobody has waited for yet; whoever made them soon does.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_NAMES = {each.value: each.name for each in signal.Signals}


def killed_children() -> list[str]:
    """Each as "4711 (python, SIGTERM)"; any thread. Reaps nobody."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").rpartition(") ")
        except OSError:
            continue  # gone meanwhile
        state, parent = rest.split()[:2]
        if state == "Z" and int(parent) == os.getpid():
            signum = _killed_by(int(stat.parent.name))
            if signum:
                command = name.partition("(")[2]
                by = _NAMES.get(signum, f"signal {signum}")  # a real-time one has none
                found.append(f"{stat.parent.name} ({command}, {by})")
    return sorted(found)


def _killed_by(pid: int) -> int:
    """The signal that ended a child; 0 if none did, or it was waited for meanwhile."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    is_killed = end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return end.si_status if end is not None and is_killed else 0
