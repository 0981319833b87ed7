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
    """Something that reads what others wrote.

    Attributes:
        name: of it.
        read: raises errors of ours, or none. It gets an empty directory, for what is
            read from a disk.
        seeds: what our own writers write.
    """

    name: str
    read: Callable[[bytes, Path], object]
    seeds: Sequence[bytes]


def written(data: bytes, path: Path) -> Path:
    """A file with these bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def store_of(objects: dict[str, bytes]) -> FaultyObjectStore:
    """An object store with these objects."""
    store = FaultyObjectStore()
    for name, data in objects.items():
        store.replace(name, data)
    return store


def environment(text: bytes) -> str:
    """As the operating system gives it: no NUL is in it."""
    return os.fsdecode(text.replace(b"\0", b""))


def as_json(*values: Any) -> list[bytes]:
    """Each as JSON."""
    return [json.dumps(value).encode() for value in values]
