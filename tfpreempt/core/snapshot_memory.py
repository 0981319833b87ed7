"""Memory for snapshots, which the supervisor provides for the program it runs.

The memory is a directory on a file system in memory (tmpfs), so snapshots outlive the
processes of the program. Only this program writes there. The supervisor passes the path
of the directory, the maximum bytes per worker and the number of workers to the program
in environment variables.
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
_MOST_DIGITS = 19  # digits of the largest plausible memory size

# Arguments `limit`, `used` and `inactive` of `_room`, for control groups of version 2
# and of version 1.
_UNIFIED = ("memory.max", "memory.current", "inactive_file")
_LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMemory:
    """The memory in which the workers of this machine can keep snapshots.

    Attributes:
        directory: path of an existing directory on a file system in memory.
        bytes: maximum size of one worker's snapshots, including the copies made during
            a snapshot.
        workers: number of workers of this machine. They write snapshots at the same
            time, so they need the memory at the same time.
    """

    directory: str
    bytes: int
    workers: int = 1

    def to_environment(self) -> dict[str, str]:
        """Returns the environment variables that pass these values to a worker."""
        values = self.directory, str(self.bytes), str(self.workers)
        return dict(zip(VARIABLES, values, strict=True))


def from_environment(
    environment: Mapping[str, str] | None = None,
) -> SnapshotMemory | None:
    """Returns the snapshot memory that the supervisor has provided for this process.

    Args:
        environment: environment to read; by default os.environ.

    Returns:
        The snapshot memory; None if the supervisor has provided none, or if the
        directory no longer exists.
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
    return SnapshotMemory(directory=directory, bytes=size, workers=workers)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the number of bytes of memory that the process can still allocate.

    This is the minimum of the machine's available memory and the free memory of each
    control group (cgroup) that contains the process.

    Args:
        root: directory that contains `proc` and `sys`; for tests.

    Raises:
        OSError: the files in `proc` cannot be read.
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
            with contextlib.suppress(OSError, ValueError):  # a group without a limit
                rooms.append(_room(mounted / each, *names))
    return max(0, min(rooms))


def _room(group: Path, limit: str, used: str, inactive: str) -> int:
    """Returns the bytes that the processes of a control group can still allocate.

    Args:
        group: directory of the control group.
        limit: name of the file with the limit.
        used: name of the file with the used bytes.
        inactive: field of `memory.stat` with the bytes of inactive file pages, which
            the kernel can free.
    """
    most = int((group / limit).read_text(encoding="ascii"))
    taken = int((group / used).read_text(encoding="ascii"))
    return most - taken + _field(group / "memory.stat", inactive)


def _field(path: Path, name: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    found = (line.split()[1] for line in lines if line.split()[0] == name)
    return int(next(found, "0"))
