"""A target of the fuzz campaign, and functions that create targets."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.storage import FaultyObjectStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A reader of data that other programs may have written.

    Attributes:
        name: name of the target.
        read: reads an input; raises only errors of tfpreempt. The argument is an empty
            directory, for targets that read files.
        seeds: inputs that tfpreempt has written.
    """

    name: str
    read: Callable[[bytes, Path], object]
    seeds: Sequence[bytes]


def written(data: bytes, path: Path) -> Path:
    """Writes a file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def store_of(objects: dict[str, bytes]) -> FaultyObjectStore:
    """Returns an object store with the given objects."""
    store = FaultyObjectStore()
    for name, data in objects.items():
        store.replace(name, data)
    return store


def environment(text: bytes) -> str:
    """Returns the text of an environment variable, which cannot contain NUL."""
    return os.fsdecode(text.replace(b"\0", b""))


def as_json(*values: Any) -> list[bytes]:
    """Returns each value as JSON."""
    return [json.dumps(value).encode() for value in values]
