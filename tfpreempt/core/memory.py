"""Memory that whoever supervises a program lends it for snapshots.

It is a directory that lies in memory, and outlives the program's processes. Nobody else
writes there. Variables of the environment say where it is, how much of it each worker
may use, and how many do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

_DIRECTORY = "TFPREEMPT_SNAPSHOT_DIR"
_BYTES = "TFPREEMPT_SNAPSHOT_BYTES"
_WORKERS = "TFPREEMPT_SNAPSHOT_WORKERS"

VARIABLES = (_DIRECTORY, _BYTES, _WORKERS)
_MOST_DIGITS = 19  # of a number that a computer's memory could have

_UNIFIED = ("memory.max", "memory.current", "inactive_file")  # of control groups
_LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LentMemory:
    """What each worker of this machine may use.

    Attributes:
        directory: in memory; it exists.
        bytes: that one worker's snapshots may take, with the copies that it makes while
            it takes one.
        workers: how many of this machine may; they do so at the same time.
    """

    directory: str
    bytes: int
    workers: int = 1

    def to_environment(self) -> dict[str, str]:
        """The variables by which a worker is told."""
        values = self.directory, str(self.bytes), str(self.workers)
        return dict(zip(VARIABLES, values, strict=True))


def lent_memory(environment: Mapping[str, str] | None = None) -> LentMemory | None:
    """What was lent to this process; None if nothing was, or it is gone.

    Args:
        environment: to read it from; None: this process's.
    """
    environment = os.environ if environment is None else environment
    directory = environment.get(_DIRECTORY, "")
    texts = environment.get(_BYTES, ""), environment.get(_WORKERS, "1")
    are_numbers = all(
        text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS
        for text in texts
    )
    if not (are_numbers and os.path.isabs(directory) and os.path.isdir(directory)):
        return None
    size, workers = map(int, texts)
    if not workers:
        return None
    return LentMemory(directory=directory, bytes=size, workers=workers)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had: of the machine, and in each control group around us.

    Args:
        root: where the kernel's files are.

    Raises:
        OSError: they cannot be read.
    """
    rooms = [_field(root / "proc/meminfo", "MemAvailable:") * 1024]
    groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in groups or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _LEGACY if controllers else _UNIFIED
        mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit is set there
                rooms.append(_room(mounted / each, *names))
    return max(0, min(rooms))


def _room(group: Path, limit: str, used: str, inactive: str) -> int:
    """What a control group has left, by the names of its files."""
    most = int((group / limit).read_text(encoding="ascii"))
    taken = int((group / used).read_text(encoding="ascii"))
    return most - taken + _field(group / "memory.stat", inactive)


def _field(path: Path, name: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    found = (line.split()[1] for line in lines if line.split()[0] == name)
    return int(next(found, "0"))
