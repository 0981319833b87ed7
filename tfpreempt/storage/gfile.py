"""Checkpoint directories that only tf.io.gfile reaches, such as gs://bucket/run.

An object appears when its writer is closed, whole or not at all, and stays: there is
nothing to sync, and nothing to rename. TensorFlow's errors become OSErrors here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator
from typing import IO, Any

import tensorflow as tf

from tfpreempt.core import seams

_BUFFER_BYTES = 1 << 20
_NUMBERS = (
    (tf.errors.NotFoundError, errno.ENOENT),
    (tf.errors.AlreadyExistsError, errno.EEXIST),
    (tf.errors.PermissionDeniedError, errno.EACCES),
    (tf.errors.UnauthenticatedError, errno.EACCES),
    (tf.errors.ResourceExhaustedError, errno.EDQUOT),
    (tf.errors.UnimplementedError, errno.ENOTSUP),
    (tf.errors.DeadlineExceededError, errno.ETIMEDOUT),
)


def schemes() -> list[str]:
    """What this TensorFlow serves, without "://"; "file" and "" are left out."""
    found = {str(scheme) for scheme in tf.io.gfile.get_registered_schemes()}
    return sorted(found - {"", "file"})


def names(path: str) -> list[str]:
    """The names in a directory; raises OSError, as all of this."""
    with _translated(path):
        # of a bucket, folders end in "/", and the folder itself may be among them
        found = {name.rstrip("/") for name in tf.io.gfile.listdir(path)}
    return sorted(found - {""})


def stat(path: str) -> Any:
    """TensorFlow's FileStatistics."""
    with _translated(path):
        return tf.io.gfile.stat(path)


def is_directory(path: str) -> bool | None:
    """None where nothing is; any other error is raised, not taken for that."""
    try:
        return bool(stat(path).is_directory)
    except FileNotFoundError:
        return None


def open_file(path: str) -> IO[bytes]:
    """A buffered file, to be read."""
    is_folder = is_directory(path)
    if is_folder is not False:
        number = errno.EISDIR if is_folder else errno.ENOENT
        raise OSError(number, os.strerror(number), path)
    return io.BufferedReader(_Reader(path), _BUFFER_BYTES)


class GfileFiles:
    """The file operations of a commit by tf.io.gfile; see `files.Files`."""

    def __init__(self) -> None:
        seams.require("gfile")

    def make_dirs(self, path: str) -> None:
        with _translated(path):
            tf.io.gfile.makedirs(path)

    def write(self, path: str, data: bytes) -> None:
        if is_directory(path) is not None:
            with _translated(path):  # as TensorFlow replaces its own state file
                seams.file_io.atomic_write_string_to_file(path, data)
            return
        with _translated(path), tf.io.gfile.GFile(path, "wb") as file:
            file.write(data)

    def write_pieces(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        self.write(path, b"".join(bytes(piece) for piece in data))

    def sync_file(self, path: str) -> None:
        """Nothing: an object that is there is durable."""

    def publish(self, path: str, data: bytes) -> None:
        self.write(path, data)  # an object is there whole or not at all

    def sync_dir(self, path: str) -> None:
        """Nothing, likewise."""

    def rename(self, source: str, target: str) -> None:
        raise OSError(
            errno.ENOTSUP,
            "Object storage cannot rename at once; write it under its last name",
            source,
            None,
            target,
        )

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _translated(path):
            tf.io.gfile.remove(path)

    def remove_dir(self, path: str) -> None:
        try:
            if names(path):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            with _translated(path):
                tf.io.gfile.rmtree(path)  # there is no other way to remove one
        except FileNotFoundError:
            pass


class _Reader(io.RawIOBase):
    """One object as Python's own kind of file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._file = tf.io.gfile.GFile(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _translated(self._path):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _translated(self._path):
            self._file.seek(offset, whence)
            return int(self._file.tell())


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turns TensorFlow's errors into the OSErrors that a local disk would raise."""
    try:
        yield
    except tf.errors.OpError as error:
        number = next(
            (number for kind, number in _NUMBERS if isinstance(error, kind)),
            errno.EREMOTEIO,
        )
        said = f"{type(error).__name__}: {error.message}".rstrip(": ")
        raise OSError(number, said, path) from error
