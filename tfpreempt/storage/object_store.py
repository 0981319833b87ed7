"""ObjectStore: the operations common to every storage of checkpoints.

`ComposingStore` is for storage with one more operation: an object made from others.

The content of an existing object never changes. So a marker, written last and only if
absent, is a commit in every store. `replace` is the only exception, for objects that no
restore depends on: TensorFlow's pointer, and a handle's metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from tfpreempt import errors
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.chunks import SeekableReader, SequentialWriter

MAX_PARTS = 32  # maximum number of parts of a composed object


class ObjectNotFoundError(errors.CheckpointError):
    """There is no object of the requested name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """Properties of an object, as known to the store.

    Attributes:
        size: size in bytes.
        crc32c: checksum of the object's bytes, unsigned 32 bits; None if the store has
            none.
    """

    size: int
    crc32c: int | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """Storage of objects. Any number of threads may call the methods at a time.

    Every method raises ConfigurationError for a name that is absolute, empty, or has
    "..". Errors of the storage become SaveError or CheckpointError, with advice.
    Transient failures (a 503, a cut connection) are retried within `timeout`: seconds
    for the whole call, whatever the number of its requests; None: the store's own
    limit.
    """

    @property
    def uri(self) -> str:
        """URI of the store, such as "gs://bucket/run"; an absolute path if local."""
        ...

    def put_if_absent(
        self, name: str, source: SeekableReader, *, timeout: float | None = None
    ) -> bool:
        """Creates an object, completely or not at all; durable after the return.

        Args:
            name: name of the object.
            source: a seekable file at its beginning, read in pieces; an exception of
                `read` ends the call and is raised.
            timeout: time limit, see the class.

        Returns:
            Whether the object was created; False if an object of the name exists.
        """
        ...

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        """Creates an object, or replaces an existing object."""
        ...

    def get(
        self,
        name: str,
        target: SequentialWriter,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copies an object's bytes into a file.

        Args:
            name: name of the object.
            target: file to write to, in pieces, from its position on.
            offset: index of the first byte to copy.
            length: number of bytes to copy; None: up to the end.
            timeout: time limit, see the class.

        Returns:
            The number of bytes copied; less than `length` if the object ends before.

        Raises:
            ObjectNotFoundError: there is no object of the name.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yields names with a prefix, in name order. The names are not checked."""
        ...

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        """Yields distinct first parts of names with a "/", in any order, unchecked."""
        ...

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        """Returns an object's properties without reading its bytes; None if missing."""
        ...

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Deletes an object; a missing object is no error."""
        ...


@runtime_checkable
class ComposingStore(ObjectStore, Protocol):
    """An ObjectStore that can make an object from the bytes of stored objects."""

    def compose(
        self, name: str, parts: Sequence[str], *, timeout: float | None = None
    ) -> bool:
        """Creates an object from the bytes of its parts, completely or not at all.

        The parts are kept.

        Args:
            name: name of the new object.
            parts: names of the objects to join, in the order of the bytes; 1 to
                `MAX_PARTS`.
            timeout: time limit, see `ObjectStore`.

        Returns:
            Whether the object was created; False if an object of the name exists.

        Raises:
            ObjectNotFoundError: a part does not exist.
        """
        ...


def summed(store: ObjectStore, name: str) -> ObjectStat | None:
    """Returns the `stat` of an object, always with a checksum; None if missing.

    The object's bytes are read if the store has no checksum.
    """
    found = store.stat(name)
    if found is None or found.crc32c is not None:
        return found
    read = checksum.ChecksumWriter()
    try:
        store.get(name, read)
    except ObjectNotFoundError:
        return None
    return ObjectStat(size=read.size, crc32c=read.crc32c)


def check_name(name: str) -> str:
    """Returns the name if the name is safe.

    Raises:
        ConfigurationError: the name is unsafe.
    """
    if reason := paths.why_unsafe(name):
        raise errors.ConfigurationError(
            f"Object name {name!r} {reason}; expected a relative path with '/' "
            "between its parts."
        )
    return name
