"""TensorFlow's `checkpoint` state file, read and written without TensorFlow.

The file is a CheckpointState protocol buffer in text form: one field per line, strings
in double quotes with C escapes (tensorflow/python/training/checkpoint_state.proto).
"""

from __future__ import annotations

import codecs
import dataclasses
import errno
import functools
import os
import re

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files

MAX_BYTES = 16 << 20  # enough for some 100,000 checkpoints
# Longest line that is read: a path has at most 4,096 bytes, and an escaped byte four
# characters. The pattern below takes 200 times the length of a line in memory.
_MAX_LINE = 1 << 16
# TensorFlow writes only escapes that Python knows, with values up to one byte.
_ESCAPE = r"""\\(?:[\\'"abfnrtv]|x[0-9A-Fa-f]{2}|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7]))"""
_LINE = re.compile(
    rf"""^\s*(\w+)\s*:\s*(?:"((?:[^"\\]|{_ESCAPE})*)"|([^\s"]\S*))\s*$"""
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStateFile:
    """The content of TensorFlow's state file.

    Attributes:
        latest: prefix of the newest checkpoint, relative to the directory or absolute.
        paths: prefixes of the checkpoints that are kept, oldest first.
        timestamps: time of each checkpoint in `paths`, in seconds since the epoch; or
            an empty tuple.
        last_preserved: a time that only a CheckpointManager uses; tfpreempt writes the
            same time again.
    """

    latest: str
    paths: tuple[str, ...] = ()
    timestamps: tuple[float, ...] = ()
    last_preserved: float | None = None


def read(directory: str) -> CheckpointStateFile | None:
    """Returns the content of a directory's state file. None if the file is missing, or
    names no checkpoint.

    A file larger than MAX_BYTES is not TensorFlow's, and counts as missing.
    """
    try:
        data = file_reading.read(os.path.join(directory, layout.POINTER), MAX_BYTES)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return None
    return parse(data)


@functools.lru_cache(maxsize=2)
def parse(data: bytes) -> CheckpointStateFile | None:
    """Returns the content of a state file, given its bytes. None if the file names no
    checkpoint."""
    text = data.decode("utf-8", "surrogateescape")
    fields: dict[str, list[str]] = {}
    for line in text.splitlines():
        if len(line) <= _MAX_LINE and (match := _LINE.match(line)):
            name, quoted, bare = match.groups()
            if quoted is not None:
                data = quoted.encode("utf-8", "surrogateescape")
                bare = os.fsdecode(codecs.escape_decode(data)[0])
            fields.setdefault(name, []).append(bare)
    latest = fields.get("model_checkpoint_path", [""])[0]
    if not latest:
        return None
    paths = tuple(fields.get("all_model_checkpoint_paths", ()))
    seconds: dict[str, tuple[float, ...]] = {}
    for name in ("all_model_checkpoint_timestamps", "last_preserved_timestamp"):
        try:
            seconds[name] = tuple(float(each) for each in fields.get(name, ()))
        except ValueError:
            seconds[name] = ()
    times, preserved = seconds.values()
    return CheckpointStateFile(
        latest=latest,
        paths=paths,
        timestamps=times if len(times) == len(paths) else (),
        last_preserved=preserved[0] if preserved else None,
    )


def named(directory: str) -> list[str]:
    """Returns the prefixes in a directory's state file, relative to the directory,
    newest first.

    If the path is not a regular file, the list is empty.

    Raises:
        OSError: the file cannot be read.
    """
    found = _read_file(directory)
    return [*_relative_names(directory, found)] if found else []


def _read_file(directory: str) -> CheckpointStateFile | None:
    """Returns the content of the state file, as `read` does; None also if the path is
    not a regular file."""
    try:
        return read(directory)
    except OSError:
        if file_reading.is_file(os.path.join(directory, layout.POINTER)):
            raise
        return None


@functools.lru_cache(maxsize=2)  # the names are needed for each incomplete checkpoint
def _relative_names(directory: str, found: CheckpointStateFile) -> tuple[str, ...]:
    names = (found.latest, *found.paths)
    return tuple(_relative(directory, name) for name in names)


def is_listed(directory: str, prefix: str) -> bool:
    """Returns whether a directory's state file names a prefix. True if the file cannot
    be read."""
    try:
        return prefix in named(directory)
    except (OSError, errors.CheckpointError):
        return True


def unlist(files: Files, directory: str, prefix: str) -> None:
    """Removes a prefix from the state file of a directory. Called before the checkpoint
    is deleted.

    Args:
        files: the file operations.
        directory: the checkpoint directory.
        prefix: TensorFlow's prefix, relative to the directory.

    Raises:
        OSError: error of the file system.
    """
    old = _read_file(directory)
    if old is None or prefix not in _relative_names(directory, old):
        return
    left = [i for i, p in enumerate(old.paths) if _relative(directory, p) != prefix]
    paths = tuple(old.paths[i] for i in left)
    latest = old.latest
    if _relative(directory, latest) == prefix:
        latest = paths[-1] if paths else ""
    path = os.path.join(directory, layout.POINTER)
    if not latest:
        files.remove(path)
        files.sync_dir(directory)
        return
    times = tuple(old.timestamps[i] for i in left) if old.timestamps else ()
    new = dataclasses.replace(old, latest=latest, paths=paths, timestamps=times)
    files.publish(path, to_bytes(new))


def to_bytes(pointer: CheckpointStateFile) -> bytes:
    """Returns the content of a state file as bytes, in TensorFlow's format."""
    quoted = []
    for prefix in (pointer.latest, *pointer.paths):
        escaped = [
            chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
            for byte in os.fsencode(prefix)
        ]
        quoted.append("".join(escaped))
    lines = [f'model_checkpoint_path: "{quoted[0]}"']
    lines += [f'all_model_checkpoint_paths: "{prefix}"' for prefix in quoted[1:]]
    lines += [f"all_model_checkpoint_timestamps: {t!r}" for t in pointer.timestamps]
    if pointer.last_preserved is not None:
        lines.append(f"last_preserved_timestamp: {pointer.last_preserved!r}")
    return ("\n".join(lines) + "\n").encode()


def _relative(directory: str, name: str) -> str:
    return os.path.relpath(os.path.join(directory, name), directory)
