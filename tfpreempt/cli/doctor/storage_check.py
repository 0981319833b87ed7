"""Measures the time of a trial save in a directory."""

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
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.os_errors import ADVICE

_BLOCK_BYTES = 4 * 1024 * 1024
_MOUNTS = Path("/proc/self/mounts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Facts about a checkpoint directory, and the result of a trial save.

    Attributes:
        path: absolute path of the directory.
        filesystem: type of the file system, such as "ext4"; "" if unknown.
        mount: mount point of the file system; None if unknown.
        missing: first directory of the path that did not exist; None if `path` existed.
        free_bytes: free bytes that this user can use.
        save_bytes: size of the trial save.
        save_seconds: duration of the trial save, including the sync to the disk; None
            if the save failed.
        fault: reason why the trial save failed; "" if it succeeded.
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
    """A mounted file system: its mount point, and its type, such as "ext4"."""

    point: Path
    kind: str


def try_save(directory: Path, size: int) -> Storage:
    """Measures a trial save: writes a file, syncs the file, and removes the file.

    If the directory does not exist, the function creates the directory, and removes it
    at the end.

    Args:
        directory: directory where a checkpoint would be saved.
        size: number of bytes to write.
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
                    f"{size_text(free)} free, {size_text(size)} needed; free space, "
                    "or name another directory"
                )
            else:
                seconds = _time_save(path, size)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "name a writable directory")
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
    """Returns the file system of a path; None if unknown.

    Args:
        path: existing path.
        mounts: file with the mount table, in the format of proc(5).
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    kinds = {}  # a later mount hides an earlier mount on the same directory
    for line in lines:
        _, escaped, kind, *_ = line.split()
        text = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), escaped)
        kinds[Path(text)] = kind
    real = path.resolve()
    point = next((each for each in (real, *real.parents) if each in kinds), None)
    return None if point is None else Mount(point=point, kind=kinds[point])


def _time_save(directory: Path, size: int) -> float:
    path = directory / f".tfpreempt-doctor-{secrets.token_hex(8)}"
    # Write random bytes, because storage with compression would write zeros too fast.
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
    """Context manager: creates missing directories, and removes them at the end.

    Yields:
        The first directory of the path that did not exist; None if the path existed.
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
                break  # the directory does not exist, or already contains files
