"""Tries a save in a directory: down to the disk, timed, and removed again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfpreempt.checkpoint.storage.files import LocalFiles
from tfpreempt.cli._doctor_facts import Storage

_BLOCK_BYTES = 4 * 1024 * 1024
_MOUNTS = Path("/proc/self/mountinfo")


def try_save(directory: Path, size: int) -> Storage:
    """Writes a file of a size, syncs it, and removes it.

    A directory that is not there is made and removed again.

    Args:
        directory: where a checkpoint would be saved.
        size: bytes to write.
    """
    path = directory.absolute()
    filesystem, free, seconds, fault = "", 0, None, ""
    try:
        with _made(path):
            filesystem = filesystem_of(path)
            status = os.statvfs(path)
            free = status.f_bavail * status.f_frsize
            if size > free:
                fault = f"only {free} bytes are free, {size} are needed"
            else:
                seconds = _time_save(path, size)
    except OSError as error:
        fault = str(error)
    return Storage(
        path=path,
        filesystem=filesystem,
        free_bytes=free,
        save_bytes=size,
        save_seconds=seconds,
        fault=fault,
    )


def filesystem_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that a path lies on; "" if it can't be told.

    Args:
        path: must exist.
        mounts: the system's table, in the format of proc(5).
    """
    resolved = path.resolve()
    best, kind = Path(), ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if "-" not in fields[:-1]:
            continue
        point = Path(_unescaped(fields[4]))
        # The later one covers an earlier one at the same place.
        if resolved.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, fields[fields.index("-") + 1]
    return kind


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
def _made(directory: Path) -> Iterator[None]:
    """The directory, which is gone again afterwards if it was not there before."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in missing:
            try:
                each.rmdir()
            except OSError:
                break  # it could not be made, or somebody else uses it by now


def _unescaped(text: str) -> str:
    """A path of the table, in which blanks and the like are octal."""
    for character in " \t\n\\":
        text = text.replace(f"\\{ord(character):03o}", character)
    return text
