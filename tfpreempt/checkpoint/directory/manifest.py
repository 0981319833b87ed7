"""The manifest of a commit: the files with sizes and checksums, the step, the writer.

A manifest may come from a failing disk, or from another user's bucket. So every field
is checked before it is used; the error names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import paths

_FORMAT = 1
MAX_FILES = 100_000
_MAX_TOKEN = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a commit.

    Attributes:
        name: path of the file, with "/" between the parts. The path is relative to the
            directory of the commit. For a flat checkpoint (see `flat_commit.py`), the
            path is relative to the directory that contains the checkpoint's files.
        size: number of bytes.
        crc32c: checksum of the whole file, unsigned 32 bits.
    """

    name: str
    size: int
    crc32c: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The parent of a commit: the commit that was the newest before this commit.

    Attributes:
        token: token of the parent; "" if there was no commit, or no readable commit.
        sequence: sequence number of the parent; 0 if there was no commit.
    """

    token: str
    sequence: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a commit, stored in MANIFEST.json.

    Attributes:
        step: the saved step.
        sequence: number of the commit, in the order of the commits in a directory; the
            first commit has number 1.
        world_size: number of workers of the run that wrote the commit.
        workers: indices of the workers whose shards are in the commit.
        files: name, size and checksum of each file, sorted by name.
        prefix: path prefix of TensorFlow's checkpoint files, relative to the same
            directory as the names in `files`; None if the commit contains no
            tf.train.Checkpoint.
        versions: versions of the software that wrote the commit, by package name.
        because: reason of the save: "preemption", "periodic", "save", "error",
            "finished" or "snapshot".
        save_seconds: time from the start of the save to the writing of the manifest.
        metadata: further JSON values.
        parent: the commit that was the newest when this commit was made; for a
            snapshot, the newest commit of the checkpoint directory. None in manifests
            of earlier versions of tfpreempt.
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
    parent: Parent | None = None

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(entry.size for entry in self.files)


def to_json(manifest: Manifest) -> bytes:
    """Returns a manifest as the content of MANIFEST.json."""
    record = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def _is_integer(low: int, limit: int) -> Callable[[Any], bool]:
    # Compare the type: isinstance() would also accept a bool as an integer.
    return lambda value: type(value) is int and low <= value < limit


_IS_SIZE, _IS_CRC32C = _is_integer(0, 1 << 50), _is_integer(0, 1 << 32)
_IS_SEQUENCE = _is_integer(0, 1 << 63)
_FEW = f"at most {MAX_FILES}"
_DEFAULTS: dict[str, Any] = {
    "workers": None,
    "prefix": None,
    "versions": {},
    "save_seconds": 0.0,
    "metadata": {},
    "parent": None,
}
_FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "format": (lambda it: it == _FORMAT, f"{_FORMAT}"),
    "step": (_IS_SEQUENCE, "an integer of 0 or more"),
    "sequence": (_is_integer(1, 1 << 63), "an integer of 1 or more"),
    # A restore looks for the files of each worker.
    "world_size": (_is_integer(1, MAX_FILES + 1), f"an integer from 1 to {MAX_FILES}"),
    "files": (lambda it: type(it) is list, "a list of files"),
    "versions": (lambda it: type(it) is dict, "a JSON object"),
    "because": (lambda it: type(it) is str, "a string"),
    "save_seconds": (
        lambda it: type(it) in (int, float) and 0 <= it < 1e9,
        "seconds, 0 or more",
    ),
    "metadata": (lambda it: type(it) is dict, "a JSON object"),
}


@functools.lru_cache(maxsize=8)
def from_json(data: bytes, source: str) -> Manifest:
    """Parses the content of MANIFEST.json, and checks every field. The results for the
    last eight manifests are cached.

    Args:
        data: the bytes of MANIFEST.json.
        source: path or URI of the manifest, for the error.

    Raises:
        CheckpointCorruptedError: a field is missing or impossible; the message names
            the field.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointCorruptedError(
            f"The manifest {source} is not valid JSON: {error}. The file is corrupt, "
            "or was not written by tfpreempt."
        ) from error
    _check(source, "(whole file)", record, type(record) is dict, "a JSON object")
    record = {**_DEFAULTS, **record}
    for field, (is_good, expected) in _FIELDS.items():
        value = record.get(field)
        _check(source, field, value, is_good(value), expected)

    # Check the workers.
    num_workers, workers, files = (
        record["world_size"],
        record["workers"],
        record["files"],
    )
    are_indices = (
        type(workers) is list
        and all(type(worker) is int and 0 <= worker < num_workers for worker in workers)
        and len(set(workers)) == len(workers)
    )
    _check(
        source, "workers", workers, are_indices, f"distinct indices below {num_workers}"
    )

    # Check the files, and sort them by name.
    _check(source, "len(files)", len(files), len(files) <= MAX_FILES, _FEW)
    found: dict[str, FileEntry] = {}
    for position, file in enumerate(files):
        at = f"files[{position}]"
        _check(source, at, file, type(file) is dict, "a JSON object")
        name, size, crc32c = (file.get(part) for part in ("name", "size", "crc32c"))
        if reason := paths.why_unsafe(name):
            expected = f"a relative path inside the checkpoint; the name {reason}"
            _check(source, f"{at}.name", name, False, expected)
        _check(source, f"{at}.name", name, name not in found, "each name only once")
        _check(source, f"{at}.size", size, _IS_SIZE(size), "a number of bytes")
        _check(source, f"{at}.crc32c", crc32c, _IS_CRC32C(crc32c), "a 32-bit number")
        found[name] = FileEntry(name=name, size=size, crc32c=crc32c)
    in_order = tuple(found[name] for name in sorted(found))

    # Check the prefix of TensorFlow's files, and the parent.
    if record["prefix"] is not None and (reason := paths.why_unsafe(record["prefix"])):
        expected = f"a relative path inside the checkpoint; the prefix {reason}"
        _check(source, "prefix", record["prefix"], False, expected)
    if (parent := record["parent"]) is not None:
        _check(source, "parent", parent, type(parent) is dict, "a JSON object")
        token, sequence = parent.get("token"), parent.get("sequence")
        is_token = type(token) is str and len(token) <= _MAX_TOKEN
        _check(source, "parent.token", token, is_token, "the token of a commit")
        expected = "an integer of 0 or more"
        _check(source, "parent.sequence", sequence, _IS_SEQUENCE(sequence), expected)
        record["parent"] = Parent(token=token, sequence=sequence)

    known = {field.name: record[field.name] for field in dataclasses.fields(Manifest)}
    known |= {"workers": tuple(sorted(workers)), "files": in_order}
    return Manifest(**known | {"save_seconds": float(record["save_seconds"])})


def _check(
    source: str, field: str, value: object, is_good: object, expected: str
) -> None:
    if is_good:
        return
    shown = repr(value)
    shown = shown if len(shown) <= 120 else shown[:120] + "..."
    raise errors.CheckpointCorruptedError(
        f"The manifest {source} has {field} = {shown}; expected {expected}. The file "
        "is corrupt, or was not written by tfpreempt."
    )
