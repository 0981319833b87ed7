"""Reserves memory for the workers' snapshots for the duration of a run.

The memory is a directory on a file system in memory (tmpfs). So snapshots survive a
crash of the workers, but not a crash of the machine. The supervisor locks the directory
while it runs. If a directory is not locked, its supervisor was killed; the next
supervisor that starts removes the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpreempt.checkpoint.directory.file_locks import is_at, lock
from tfpreempt.cli.doctor.storage_check import mount_of
from tfpreempt.cli.sizes import size_text
from tfpreempt.core.snapshot_memory import SnapshotMemory, available_bytes
from tfpreempt.errors import ConfigurationError

log = logging.getLogger(__name__)

AUTO = -1
"""Value of the option --snapshots for a size that depends on the free memory."""

_SHARE = 4  # `AUTO` uses a quarter of the available memory
_LEAST = 64 << 20  # with `AUTO`, no snapshots if a worker would have fewer bytes
# Fraction of a worker's snapshot memory for the files of two snapshots. The rest is for
# the copy of the state that is captured before a snapshot is written.
_IN_FILES = 2 / 3
_TRIES = 10


@contextlib.contextmanager
def lent(
    asked: int, workers: int, directories: Sequence[Path] | None = None
) -> Iterator[SnapshotMemory | None]:
    """Context manager: reserves memory for snapshots, and frees it at the end.

    Args:
        asked: bytes for all workers together; 0: no snapshots; `AUTO`: a quarter of
            the free memory.
        workers: number of workers.
        directories: directories on tmpfs to try; by default /dev/shm and
            $XDG_RUNTIME_DIR.

    Yields:
        The memory for the workers; None without snapshots.

    Raises:
        ConfigurationError: the requested number of bytes is not available.
    """
    made = None
    try:
        found = [each for each in directories or _directories() if _is_in_memory(each)]
        for each in found:
            _sweep(each)
        made = _lend(found, asked, workers)
    except OSError as error:
        if asked > 0:
            raise ConfigurationError(
                f"--snapshots: no memory can be reserved: {error}"
            ) from error
        if asked:
            log.warning(
                "no memory for snapshots, so a crash without a notice loses "
                "the steps since the last commit: %s",
                error,
            )
    if made is None:
        yield None
        return
    memory, descriptor = made
    try:
        yield memory
    finally:
        shutil.rmtree(memory.directory, ignore_errors=True)
        os.close(descriptor)


def _lend(
    found: Sequence[Path], asked: int, workers: int
) -> tuple[SnapshotMemory, int] | None:
    """Creates and locks a directory for snapshots.

    Args:
        found: directories on tmpfs; the first one is used.
        asked: number of bytes, see `lent`.
        workers: number of workers.

    Returns:
        The memory, and the descriptor with the directory's lock. None if no snapshots
        are requested, or if `AUTO` finds too little memory.

    Raises:
        ConfigurationError: the requested number of bytes is not available.
        OSError: the free memory cannot be determined, or the directory cannot be
            created.
    """
    if asked == 0:
        return None
    room = _room(found[0]) if found else 0
    if asked > room:
        where = f"on {found[0]}" if found else "(no /dev/shm or other tmpfs)"
        raise ConfigurationError(
            f"--snapshots requests {size_text(asked)}, but {size_text(room)} are "
            f"available {where}. Request less, or use --snapshots auto."
        )
    share = (room // _SHARE if asked == AUTO else asked) // workers
    if not found or (asked == AUTO and share < _LEAST):
        return None
    path, descriptor = _make(found[0])
    return SnapshotMemory(directory=str(path), bytes=share, workers=workers), descriptor


def _directories() -> list[Path]:
    given = os.environ.get("XDG_RUNTIME_DIR")
    return [Path("/dev/shm"), *([Path(given)] if given else [])]


def _is_in_memory(directory: Path) -> bool:
    """Returns whether a path is a writable directory on tmpfs."""
    if not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        return False
    mount = mount_of(directory)
    return mount is not None and mount.kind == "tmpfs"


def _room(directory: Path) -> int:
    """Returns the number of bytes available for snapshots."""
    status = os.statvfs(directory)
    return min(available_bytes(), int(status.f_bavail * status.f_frsize / _IN_FILES))


def _begins() -> str:
    return f"tfpreempt-snapshots-{os.getuid()}-"


def _make(directory: Path) -> tuple[Path, int]:
    """Creates and locks a directory for snapshots inside a directory on tmpfs.

    Returns the path of the new directory, and the descriptor with the lock.
    """
    for _ in range(_TRIES):
        path = directory / f"{_begins()}{secrets.token_hex(8)}"
        path.mkdir(0o700)
        descriptor = _locked(path)
        if descriptor is not None:
            return path, descriptor
        # Another supervisor may have removed the directory.
        with contextlib.suppress(OSError):
            path.rmdir()
    raise OSError(f"no directory can be locked in {directory}")


def _locked(path: Path) -> int | None:
    """Locks a directory; returns the descriptor with the lock.

    Returns None if another process has locked the directory, or if the directory was
    removed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if lock(descriptor, fcntl.LOCK_EX) and is_at(descriptor, str(path)):
        return descriptor
    os.close(descriptor)
    return None


def _sweep(directory: Path) -> None:
    """Removes the snapshot directories of this user's killed supervisors."""
    name = re.compile(re.escape(_begins()) + "[0-9a-f]{16}")
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if not name.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                continue
            descriptor = _locked(path)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
