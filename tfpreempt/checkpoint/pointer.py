"""TensorFlow's `checkpoint` state file, read and written without TensorFlow.

It is a CheckpointState protocol buffer in text form: one field a line, strings in
double quotes with C escapes (tensorflow/python/training/checkpoint_state.proto).
"""

from __future__ import annotations

import dataclasses
import os
import re

from tfpreempt.checkpoint import layout
from tfpreempt.storage import reading
from tfpreempt.storage.files import Files, write_durably

_LINE = re.compile(r'^\s*(\w+)\s*:\s*(?:"((?:[^"\\]|\\.)*)"|(\S+))\s*$')
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
_PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """What the state file says.

    Attributes:
        latest: prefix of the newest checkpoint, relative to the directory or absolute.
        paths: all that are kept, oldest first.
        timestamps: seconds since the epoch, one per path, or none at all.
        last_preserved: bookkeeping of a CheckpointManager, kept as found.
    """

    latest: str
    paths: tuple[str, ...] = ()
    timestamps: tuple[float, ...] = ()
    last_preserved: float | None = None


def read(directory: str) -> Pointer | None:
    """The directory's state file; None if there is none or it says nothing."""
    try:
        with reading.open_file(os.path.join(directory, layout.POINTER)) as file:
            text = file.read().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    fields: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            name, quoted, bare = match.groups()
            value = bare if quoted is None else _unescape(quoted)
            fields.setdefault(name, []).append(value)
    latest = fields.get("model_checkpoint_path", [""])[0]
    if not latest:
        return None
    paths = tuple(fields.get("all_model_checkpoint_paths", ()))
    times = _floats(fields.get("all_model_checkpoint_timestamps", []))
    preserved = _floats(fields.get("last_preserved_timestamp", []))
    return Pointer(
        latest=latest,
        paths=paths,
        timestamps=times if len(times) == len(paths) else (),
        last_preserved=preserved[0] if preserved else None,
    )


def write(files: Files, directory: str, pointer: Pointer) -> None:
    """Replaces the state file atomically and durably.

    Raises:
        OSError: as the file system says.
    """
    path = os.path.join(directory, layout.POINTER)
    write_durably(files, path, to_bytes(pointer))


def to_bytes(pointer: Pointer) -> bytes:
    """The state file's content."""
    lines = [f'model_checkpoint_path: "{_escape(pointer.latest)}"']
    lines += [f'all_model_checkpoint_paths: "{_escape(p)}"' for p in pointer.paths]
    lines += [f"all_model_checkpoint_timestamps: {t!r}" for t in pointer.timestamps]
    if pointer.last_preserved is not None:
        lines.append(f"last_preserved_timestamp: {pointer.last_preserved!r}")
    return ("\n".join(lines) + "\n").encode()


def _floats(values: list[str]) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except ValueError:
        return ()


def _escape(text: str) -> str:
    out = []
    for byte in os.fsencode(text):
        char = chr(byte)
        if char in '"\\':
            out.append("\\" + char)
        elif 32 <= byte < 127:
            out.append(char)
        else:
            out.append(f"\\{byte:03o}")
    return "".join(out)


def _unescape(text: str) -> str:
    def one(match: re.Match[bytes]) -> bytes:
        body = match.group(1)
        if body[:1].isdigit():
            return bytes([int(body, 8) & 255])
        if body[:1] == b"x" and len(body) > 1:
            return bytes([int(body[1:], 16)])
        return _PLAIN.get(body, body)

    return os.fsdecode(_ESCAPE.sub(one, text.encode("utf-8", "surrogateescape")))
