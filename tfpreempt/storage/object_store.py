"""`ObjectStore`: the operations on objects that every storage of checkpoints offers.

`ComposingStore` offers one more operation: joining stored objects into a new object.

The content of an object changes only by `replace`, which is used only for objects that
no restore needs: TensorFlow's state file, the user's metadata, and the objects of a
lease. The marker, which makes a commit, is created last, and only if absent.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from tfpreempt import errors
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.chunks import SeekableReader, SequentialWriter

MAX_PARTS = 32  # maximum number of parts of a composed object


class ObjectNotFoundError(errors.CheckpointError):
    """There is no object with the requested name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """Size and checksum of an object, as reported by the store.

    Attributes:
        size: size in bytes.
        crc32c: checksum of the object's bytes, as an unsigned 32-bit number; None if
            the store does not know the checksum.
    """

    size: int
    crc32c: int | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """Storage of objects by name. Methods may be called on any thread.

    Every method raises ConfigurationError for an unsafe name (absolute, empty, or with
    ".."). Errors of the storage become SaveError or CheckpointError, with advice.

    `timeout` is the number of seconds for the whole call, however many requests the
    call makes. Transient failures (a 503, a broken connection) are retried within that
    time. With None the store's own timeout applies.
    """

    @property
    def uri(self) -> str:
        """URI of the store, such as "gs://bucket/run"; an absolute path if local."""
        ...

    def put_if_absent(
        self, name: str, source: SeekableReader, *, timeout: float | None = None
    ) -> bool:
        """Creates an object, completely or not at all. A created object is durable.

        Args:
            name: name of the object.
            source: seekable file, positioned at its beginning, read in pieces. An error
                raised by `source.read` is raised unchanged.
            timeout: seconds for the call, see the class.

        Returns:
            Whether the object was created; False if an object with this name exists.
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
            target: file that receives the bytes, in pieces, at its current position.
            offset: index of the first byte to copy.
            length: number of bytes to copy; None: up to the end.
            timeout: seconds for the call, see the class.

        Returns:
            The number of bytes copied; less than `length` if the object is too short.

        Raises:
            ObjectNotFoundError: there is no object with this name.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yields the sorted names of the objects whose name begins with a prefix.

        The names may be unsafe as paths (see `check_name`).
        """
        ...

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        """Yields the top folders: from names with a "/", the distinct first parts.

        The order is undefined. The names may be unsafe as paths (see `check_name`).
        """
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
        """Creates an object by joining stored objects, completely or not at all.

        The joined objects are kept.

        Args:
            name: name of the new object.
            parts: names of 1 to `MAX_PARTS` objects to join, in this order.
            timeout: seconds for the call, see `ObjectStore`.

        Returns:
            Whether the object was created; False if an object with this name exists.

        Raises:
            ObjectNotFoundError: a part does not exist.
        """
        ...


def summed(store: ObjectStore, name: str) -> ObjectStat | None:
    """Returns the size and the checksum of an object; None if the object is missing.

    Reads the whole object if the store does not know the checksum.
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


def read_object(store: ObjectStore, name: str, most: int) -> bytes | None:
    """Returns the content of a small object; None if the object is missing.

    Args:
        store: the store.
        name: name of the object.
        most: maximum number of bytes to read.

    Raises:
        CheckpointError: the object cannot be read.
    """
    target = io.BytesIO()
    try:
        store.get(name, target, length=most)
    except ObjectNotFoundError:
        return None
    return target.getvalue()


def check_name(name: str) -> str:
    """Returns an object's name unchanged, after a check that it is safe as a path.

    Raises:
        ConfigurationError: the name is unsafe.
    """
    if reason := paths.why_unsafe(name):
        raise errors.ConfigurationError(
            f"Object name {name!r} {reason}; expected a relative path with '/' "
            "between its parts."
        )
    return name
