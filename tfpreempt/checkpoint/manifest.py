"""The manifest of a commit: its files, their sizes and checksums, and who wrote it.

A manifest comes from a disk that may be damaged, or from somebody else's bucket, so
every field is checked before it is used; the error names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import paths

_FORMAT = 1
MAX_FILES = 100_000
_MAX_FILE_BYTES = 1 << 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a commit.

    Attributes:
        name: relative to the directory that the manifest speaks for, "/" between parts.
        size: bytes.
        crc32c: checksum of all its bytes, unsigned 32 bits.
    """

    name: str
    size: int
    crc32c: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a commit holds.

    Attributes:
        step: the step number that the checkpoint carries.
        sequence: 1 for the first commit in a directory, then counting up.
        world_size: number of workers of the run that wrote it.
        workers: those whose shard is in it.
        files: in name order.
        prefix: TensorFlow's prefix relative to the manifest's base directory; None
            where no tf.train.Checkpoint is part of the commit.
        versions: of what wrote it, by package name.
        because: "preemption", "periodic" or "save".
        save_seconds: from the start of writing to the manifest.
        metadata: further JSON-able facts.
    """

    step: int
    sequence: int
    world_size: int
    workers: tuple[int, ...]
    files: tuple[FileEntry, ...]
    prefix: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    because: str = "save"
    save_seconds: float = 0.0
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Total size of its files."""
        return sum(entry.size for entry in self.files)


def to_json(manifest: Manifest) -> bytes:
    """The manifest as the bytes of MANIFEST.json."""
    record = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


@functools.lru_cache(maxsize=8)
def from_json(data: bytes, source: str) -> Manifest:
    """Reads and checks a manifest; the same bytes of one place only once.

    Args:
        data: the bytes of MANIFEST.json.
        source: where they come from, for the error.

    Raises:
        CheckpointDamagedError: a field is missing or impossible; the message names it.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointDamagedError(
            f"The manifest {source} is not JSON: {error}"
        ) from error
    check = _Checker(source)
    if not isinstance(record, dict):
        raise check.bad("(whole file)", record, "a JSON object")
    if record.get("format") != _FORMAT:
        raise check.bad("format", record.get("format"), f"{_FORMAT}")
    files = record.get("files")
    if not isinstance(files, list):
        raise check.bad("files", files, "a list of files")
    if len(files) > MAX_FILES:
        raise check.bad("len(files)", len(files), f"at most {MAX_FILES} files")
    world_size = check.whole(record, "world_size", 1, 1 << 31)
    return Manifest(
        step=check.whole(record, "step", 0, 1 << 63),
        sequence=check.whole(record, "sequence", 1, 1 << 63),
        world_size=world_size,
        workers=check.workers(record.get("workers"), world_size),
        files=check.entries(files),
        prefix=check.prefix(record.get("prefix")),
        versions=check.mapping(record, "versions"),
        because=check.text(record, "because"),
        save_seconds=check.seconds(record, "save_seconds"),
        metadata=check.mapping(record, "metadata"),
    )


class _Checker:
    """Takes fields out of an untrusted record, or says which one is wrong."""

    def __init__(self, source: str) -> None:
        self._source = source

    def bad(self, field: str, value: object, expected: str) -> Exception:
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:120] + "..."
        return errors.CheckpointDamagedError(
            f"The manifest {self._source} has {field} = {shown}; expected {expected}. "
            "The file is damaged or wasn't written by tfpreempt."
        )

    def whole(self, record: dict[str, Any], field: str, low: int, limit: int) -> int:
        value = record.get(field)
        # bool is an int in Python, but not in a manifest
        if type(value) is not int or not low <= value < limit:
            raise self.bad(field, value, f"a whole number from {low} below {limit}")
        return value

    def seconds(self, record: dict[str, Any], field: str) -> float:
        value = record.get(field, 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1e9:
            raise self.bad(field, value, "seconds, 0 or more")
        return float(value)

    def text(self, record: dict[str, Any], field: str) -> str:
        value = record.get(field)
        if not isinstance(value, str):
            raise self.bad(field, value, "a string")
        return value

    def mapping(self, record: dict[str, Any], field: str) -> dict[str, Any]:
        value = record.get(field, {})
        if not isinstance(value, dict):
            raise self.bad(field, value, "a JSON object")
        return value

    def prefix(self, value: object) -> str | None:
        if value is None:
            return None
        if reason := paths.why_unsafe(value):
            raise self.bad("prefix", value, f"a safe relative path, but it {reason}")
        return str(value)

    def workers(self, value: object, world_size: int) -> tuple[int, ...]:
        ok = isinstance(value, list) and all(
            type(index) is int and 0 <= index < world_size for index in value
        )
        if not isinstance(value, list) or not ok or len(set(value)) != len(value):
            raise self.bad("workers", value, f"distinct indices below {world_size}")
        return tuple(sorted(value))

    def entries(self, values: list[Any]) -> tuple[FileEntry, ...]:
        found: dict[str, FileEntry] = {}
        for position, value in enumerate(values):
            field = f"files[{position}]"
            if not isinstance(value, dict):
                raise self.bad(field, value, "a JSON object")
            name = value.get("name")
            if reason := paths.why_unsafe(name):
                raise self.bad(
                    f"{field}.name", name, f"a safe relative path, but it {reason}"
                )
            if name in found:
                raise self.bad(f"{field}.name", name, "every name once")
            found[str(name)] = FileEntry(
                name=str(name),
                size=self._part(value, field, "size", _MAX_FILE_BYTES),
                crc32c=self._part(value, field, "crc32c", 1 << 32),
            )
        return tuple(found[name] for name in sorted(found))

    def _part(self, value: dict[str, Any], field: str, part: str, limit: int) -> int:
        number = value.get(part)
        if type(number) is not int or not 0 <= number < limit:
            raise self.bad(f"{field}.{part}", number, f"0 or more and below {limit}")
        return number
