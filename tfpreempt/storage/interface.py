"""ObjectStore: the few operations that every place for checkpoints has.

`ComposingStore` is for places that have one more: an object of others' bytes.

An object's content never changes once it is there; that is what makes a marker, written
last and only if absent, a commit everywhere. `replace` is the one exception, for what
no restore rests on: TensorFlow's pointer, and a handle's metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from tfpreempt import errors
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.pieces import Source, Target

MAX_PARTS = 32  # of which a store makes one object


class ObjectMissingError(errors.CheckpointError):
    """There is no object of this name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """What a store knows of an object.

    Attributes:
        size: bytes.
        crc32c: of all its bytes, unsigned 32 bits; None where the place keeps none.
    """

    size: int
    crc32c: int | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """A place for objects. Any thread may call it, many at a time.

    All methods raise ConfigurationError for a name that is absolute, empty, or has
    "..", and SaveError or CheckpointError, with what to do, for what the place reports.
    What passes by itself (a 503, a cut connection) is tried again within `timeout`:
    seconds for the whole call, however many requests it makes; None: the store's own
    limit.
    """

    @property
    def uri(self) -> str:
        """Where it is, such as "gs://bucket/run"; an absolute path for a local one."""
        ...

    def put_if_absent(
        self, name: str, source: Source, *, timeout: float | None = None
    ) -> bool:
        """Creates an object, durable when this returns; all of it or nothing.

        Args:
            name: of the object.
            source: a seekable file at its beginning, read in pieces; what its `read`
                raises ends the call and is raised.
            timeout: see above.

        Returns:
            Whether it was created; False if there is one of this name already.
        """
        ...

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        """Creates an object or takes the place of the one that is there."""
        ...

    def get(
        self,
        name: str,
        target: Target,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copies an object's bytes into a file.

        Args:
            name: of the object.
            target: only written to, in pieces, from its position on.
            offset: first byte that is wanted.
            length: bytes wanted; None: all that follow.
            timeout: see above.

        Returns:
            The number of bytes copied; fewer than asked for where the object ends.

        Raises:
            ObjectMissingError: there is none of this name.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Names that begin with a string, in name order; hostile until checked."""
        ...

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        """First parts of all names with a "/", each once, in any order; likewise."""
        ...

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        """What is known of an object without reading it; None if there is none."""
        ...

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Deletes an object; one that is not there is fine."""
        ...


@runtime_checkable
class ComposingStore(ObjectStore, Protocol):
    """An ObjectStore that makes one object of others, whose bytes it has already."""

    def compose(
        self, name: str, parts: Sequence[str], *, timeout: float | None = None
    ) -> bool:
        """Creates an object of the bytes of others, which stay; all of it or nothing.

        Args:
            name: of the object.
            parts: names of the others, in the order of their bytes; 1 to `MAX_PARTS`.
            timeout: as of all methods.

        Returns:
            Whether it was created; False if there is one of this name already.

        Raises:
            ObjectMissingError: one of the others is not there.
        """
        ...


def summed(store: ObjectStore, name: str) -> ObjectStat | None:
    """As a store's `stat`, with a checksum: all bytes are read where none is kept."""
    found = store.stat(name)
    if found is None or found.crc32c is not None:
        return found
    read = checksum.Sum()
    try:
        store.get(name, read)
    except ObjectMissingError:
        return None
    return ObjectStat(size=read.size, crc32c=read.crc32c)


def check_name(name: str) -> str:
    """Returns the name if it is safe.

    Raises:
        ConfigurationError: it is not.
    """
    if reason := paths.why_unsafe(name):
        raise errors.ConfigurationError(
            f"Object name {name!r} {reason}; expected a relative path with '/' "
            "between its parts."
        )
    return name
