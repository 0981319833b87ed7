"""ObjectStore: the few operations that every place for checkpoints has.

An object's content never changes once it is there; that is what makes a marker, written
last and only if absent, a commit everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import IO, Protocol

from tfpreempt import errors
from tfpreempt.checkpoint import layout


class ObjectMissingError(errors.CheckpointError):
    """There is no object of this name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """What a store knows of an object.

    Attributes:
        name: relative to the store's root, "/" between parts.
        size: bytes.
        crc32c: of all its bytes, unsigned 32 bits.
        generation: differs between two objects that had the same name in turn.
    """

    name: str
    size: int
    crc32c: int
    generation: str


class ObjectStore(Protocol):
    """A place for objects. Any thread may call it.

    All methods raise ConfigurationError for a name that is absolute, empty, or has
    "..", and SaveError or CheckpointError, with what to do, for what the place reports.
    """

    def put_if_absent(self, name: str, source: IO[bytes]) -> bool:
        """Creates an object, durable when this returns; all of it or nothing.

        Returns:
            Whether it was created; False if there is one of this name already.
        """
        ...

    def get(self, name: str, target: IO[bytes]) -> ObjectStat:
        """Copies an object's bytes into a file.

        Raises:
            ObjectMissingError: there is none of this name.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Names that begin with a string, in name order."""
        ...

    def stat(self, name: str) -> ObjectStat | None:
        """Size and checksum of an object; None if there is none."""
        ...

    def delete(self, name: str) -> bool:
        """Deletes an object.

        Returns:
            Whether there was one.
        """
        ...


def check_name(name: str) -> str:
    """Returns the name if it is safe.

    Raises:
        ConfigurationError: it is not.
    """
    if reason := layout.why_unsafe(name):
        raise errors.ConfigurationError(
            f"Object name {name!r} {reason}; expected a relative path with '/' "
            "between its parts."
        )
    return name
