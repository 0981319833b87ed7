"""Tries a save in a directory: down to the disk, timed, and removed again."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfpreempt.cli.sizes import size_text
from tfpreempt.storage.failure import ADVICE
from tfpreempt.storage.files import LocalFiles

_BLOCK_BYTES = 4 * 1024 * 1024
_MOUNTS = Path("/proc/self/mounts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The checkpoint directory.

    Attributes:
        path: absolute.
        filesystem: its type, such as "ext4"; "" if unknown.
        mount: where that file system is mounted; None if unknown.
        missing: the uppermost part of the path that was not there; None: all is.
        free_bytes: what this user may still write there.
        save_bytes: the size of the save that was tried.
        save_seconds: how long it took, down to the disk; None: it failed.
        fault: why it failed.
    """

    path: Path
    filesystem: str
    free_bytes: int
    save_bytes: int
    save_seconds: float | None
    mount: Path | None = None
    missing: Path | None = None
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A file system: where it is mounted, and its type, such as "ext4"."""

    point: Path
    kind: str


def try_save(directory: Path, size: int) -> Storage:
    """Writes a file of a size, syncs it, and removes it.

    A directory that is not there is made and removed again.

    Args:
        directory: where a checkpoint would be saved.
        size: bytes to write.
    """
    path = directory.absolute()
    mount, free, seconds, fault = None, 0, None, ""
    missing = None
    try:
        with _made(path) as missing:
            mount = mount_of(path)
            free = shutil.disk_usage(path).free
            if size > free:
                fault = (
                    f"only {size_text(free)} are free, {size_text(size)} are needed; "
                    "make room, or name another directory"
                )
            else:
                seconds = _time_save(path, size)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "name a directory that can be written to")
        fault = f"{error.filename or path}: {error.strerror or error}; {advice}"
    return Storage(
        path=path,
        filesystem=mount.kind if mount else "",
        mount=mount.point if mount else None,
        missing=missing,
        free_bytes=free,
        save_bytes=size,
        save_seconds=seconds,
        fault=fault,
    )


def mount_of(path: Path, mounts: Path = _MOUNTS) -> Mount | None:
    """The file system that a path lies on; None if it can't be told.

    Args:
        path: must exist.
        mounts: the system's table, in the format of proc(5).
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    kinds = {}  # the later one covers an earlier one at the same place
    for line in lines:
        _, escaped, kind, *_ = line.split()
        text = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), escaped)
        kinds[Path(text)] = kind
    real = path.resolve()
    point = next((each for each in (real, *real.parents) if each in kinds), None)
    return None if point is None else Mount(point=point, kind=kinds[point])


def _time_save(directory: Path, size: int) -> float:
    path = directory / f".tfpreempt-doctor-{secrets.token_hex(8)}"
    # Random: what is all zeros costs nothing on storage that compresses.
    block = os.urandom(min(size, _BLOCK_BYTES))
    try:
        began = time.monotonic()
        with path.open("xb", buffering=0) as file:
            left = size
            while left > 0:
                left -= file.write(block[: min(left, len(block))])
            os.fsync(file.fileno())
        LocalFiles().sync_dir(str(directory))
        return time.monotonic() - began
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _made(directory: Path) -> Iterator[Path | None]:
    """Makes the directory; gone again afterwards if it was not there before.

    Yields:
        The uppermost part of the path that was not there; None: all was.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield missing[-1] if missing else None
    finally:
        for each in missing:
            try:
                each.rmdir()
            except OSError:
                break  # it could not be made, or somebody else uses it by now
