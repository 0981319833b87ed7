"""Memory for the workers' snapshots: lent for a run, taken back at its end.

It is a directory on a file system that lies in memory (tmpfs), so it outlives the
workers and goes with the machine. A lock on it lives as long as the supervisor: what
has none was left by one that was killed, and goes at the next start of any.
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
from tfpreempt.cli.doctor.storage import mount_of
from tfpreempt.cli.sizes import size_text
from tfpreempt.core.memory import LentMemory, available_bytes
from tfpreempt.errors import ConfigurationError

log = logging.getLogger(__name__)

AUTO = -1
"""As much as the machine can spare."""

_SHARE = 4  # of the memory that is available, one part of so many
_LEAST = 64 << 20  # for each worker; what fits in less is saved in no time
_IN_FILES = 2 / 3  # of what snapshots take; the rest are copies in the workers
_TRIES = 10


@contextlib.contextmanager
def lent(
    asked: int, workers: int, places: Sequence[Path] | None = None
) -> Iterator[LentMemory | None]:
    """A context in which workers have memory for snapshots.

    Args:
        asked: bytes for all of them; 0: none; `AUTO`: as much as can be spared.
        workers: how many there are.
        places: where it may lie; by default those that systems have.

    Yields:
        What each gets; None where there is none to be had, or too little.

    Raises:
        ConfigurationError: bytes were asked for, and cannot be had.
    """
    made = None
    try:
        found = [each for each in places or _places() if _is_in_memory(each)]
        for each in found:
            _sweep(each)
        made = _lend(found, asked, workers)
    except OSError as error:
        if asked > 0:
            raise ConfigurationError(
                f"--snapshots cannot have its memory: {error}"
            ) from error
        if asked:
            log.warning(
                "tfpreempt: there are no snapshots in memory, so a death without a "
                "notice costs what came after the last commit: %s",
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
) -> tuple[LentMemory, int] | None:
    """A directory to lend, and the descriptor that holds its lock.

    Args:
        found: the places in memory.
        asked: see `lent`.
        workers: see `lent`.

    Returns:
        None where none is wanted, or there is too little for `AUTO`.

    Raises:
        ConfigurationError: bytes were asked for, and are not there.
        OSError: the place, or what says how much memory there is.
    """
    if asked == 0:
        return None
    room = _room(found[0]) if found else 0
    if asked > room:
        where = f"on {found[0]}" if found else "as neither /dev/shm nor a tmpfs is here"
        raise ConfigurationError(
            f"--snapshots asks for {size_text(asked)}, and {size_text(room)} can be "
            f"had {where}. Ask for less, or leave it to auto."
        )
    share = (room // _SHARE if asked == AUTO else asked) // workers
    if not found or (asked == AUTO and share < _LEAST):
        return None
    path, descriptor = _make(found[0])
    return LentMemory(directory=str(path), bytes=share, workers=workers), descriptor


def _places() -> list[Path]:
    given = os.environ.get("XDG_RUNTIME_DIR")
    return [Path("/dev/shm"), *([Path(given)] if given else [])]


def _is_in_memory(place: Path) -> bool:
    """Whether it is a directory of ours to write in, on tmpfs."""
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return False
    mount = mount_of(place)
    return mount is not None and mount.kind == "tmpfs"


def _room(place: Path) -> int:
    """Bytes that could be had for snapshots."""
    status = os.statvfs(place)
    return min(available_bytes(), int(status.f_bavail * status.f_frsize / _IN_FILES))


def _begins() -> str:
    return f"tfpreempt-snapshots-{os.getuid()}-"


def _make(place: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        path = place / f"{_begins()}{secrets.token_hex(8)}"
        path.mkdir(0o700)
        descriptor = _locked(path)
        if descriptor is not None:
            return path, descriptor
        with contextlib.suppress(OSError):  # somebody else may have removed it
            path.rmdir()
    raise OSError(f"no directory can be locked in {place}")


def _locked(path: Path) -> int | None:
    """A descriptor that holds its lock; None where somebody else does, or it went."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if lock(descriptor, fcntl.LOCK_EX) and is_at(descriptor, str(path)):
        return descriptor
    os.close(descriptor)
    return None


def _sweep(place: Path) -> None:
    """Removes what supervisors of this user left that were killed."""
    name = re.compile(re.escape(_begins()) + "[0-9a-f]{16}")
    with contextlib.suppress(OSError):
        for path in place.iterdir():
            if not name.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                continue
            descriptor = _locked(path)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
