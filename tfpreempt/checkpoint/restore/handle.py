"""`Checkpoint`: a reference to a checkpoint on this machine or in object storage."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from tfpreempt import errors
from tfpreempt.checkpoint.directory import cache, catalog, layout, user_metadata
from tfpreempt.checkpoint.directory.cache import close_with, key_of, private_directory
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.directory.file_locks import locked
from tfpreempt.checkpoint.directory.retention import explain
from tfpreempt.checkpoint.mirror import resolve
from tfpreempt.checkpoint.mirror.download import download
from tfpreempt.checkpoint.restore.restore import find_candidates, verify
from tfpreempt.core.arguments import check_timeout
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.core.scratch import is_url
from tfpreempt.storage import paths
from tfpreempt.storage.files import LocalFiles, write_durably
from tfpreempt.storage.fsspec_store import is_local as is_local_filesystem
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.open_store import (
    local_path,
    open_store,
    split,
)

if TYPE_CHECKING:
    import fsspec
    import pyarrow.fs
    import tensorflow as tf

# Seconds to wait while another process copies the same checkpoint to the same
# directory; a copy that makes no progress fails earlier.
_COPY_TIMEOUT = 24 * 3600.0
_NOTE_SECONDS = 30.0  # seconds to wait for another process that writes metadata


class Checkpoint:
    """A reference to a saved checkpoint; not a `tf.train.Checkpoint`.

    The constructor reads no file.

    Args:
        path: directory of a commit, TensorFlow's prefix of a checkpoint (`.../ckpt-5`),
            or a directory with a checkpoint's files. A local path (~ is the home
            directory), or a URI with file://, gs://, s3:// or az://. With a
            `filesystem`, a path in the file system.
        filesystem: a file system object of pyarrow or fsspec; None: the file system of
            this machine, or the storage of the URI.
        prefix: argument for `tf.train.Checkpoint.restore`, if already known.
        step: step of the checkpoint, if already known.

    Raises:
        ConfigurationError: the path is invalid, or is a URI and there is a
            `filesystem`; or the `filesystem` has an unsupported type.
    """

    __slots__ = ("_filesystem", "_kept", "_local", "_path", "_prefix", "_step")

    def __init__(
        self,
        path: str | os.PathLike[str],
        filesystem: fsspec.AbstractFileSystem | pyarrow.fs.FileSystem | None = None,
        *,
        prefix: str | None = None,
        step: int | None = None,
    ) -> None:
        show_log_lines()
        text = _check_path(path)
        if filesystem is None and not text:
            raise errors.ConfigurationError(
                "Got an empty path; expected the path or the URI of a checkpoint."
            )
        if filesystem is not None and is_url(text):
            raise errors.ConfigurationError(
                f"Got the URI {paths.without_secrets(text)!r} together with "
                f"filesystem={filesystem!r}; expected either a URI or a file system. "
                "Leave filesystem= out, or pass the path in the file system."
            )
        if isinstance(filesystem, str | os.PathLike):
            raise errors.ConfigurationError(
                f"Got filesystem={filesystem!r}; expected a file system object of "
                "pyarrow or fsspec. For a URI, leave filesystem= out: "
                "Checkpoint('gs://...')."
            )
        self._filesystem = filesystem
        is_local = filesystem is None or is_local_filesystem(filesystem)
        self._local = local_path(os.path.expanduser(text)) if is_local else None
        if filesystem is None and self._local is None:
            split(text)  # raises for an unsupported URI; sends no request
        self._path = self._local or text.rstrip("/")
        self._prefix = prefix
        self._step = step
        self._kept = ""

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Returns a reference to the checkpoint in a local directory.

        Any program may have written the checkpoint.

        Raises:
            ConfigurationError: the path is not local.
        """
        handle = cls(path)
        if handle._local is None:
            raise errors.ConfigurationError(
                f"from_directory() got {path!r}; expected a directory of this machine. "
                f"For a URI, use Checkpoint({path!r})."
            )
        return handle

    @property
    def path(self) -> str:
        """The path of the checkpoint.

        The path is the directory of a commit, or TensorFlow's prefix of a
        CheckpointManager's checkpoint. For a remote checkpoint, the path is a URI, or a
        path in the `filesystem`.
        """
        return self._path

    @property
    def filesystem(self) -> fsspec.AbstractFileSystem | pyarrow.fs.FileSystem | None:
        """The `filesystem` argument of the constructor."""
        return self._filesystem

    @property
    def prefix(self) -> str | None:
        """The argument for `tf.train.Checkpoint.restore`; may read the manifest.

        None if the commit has no TensorFlow checkpoint, only named States. None also
        for a remote checkpoint: use `restore()`.
        """
        if self._prefix is None and self._local is not None:
            self._prefix = resolve.tensorflow_prefix(resolve.at_path(self._local))
        return self._prefix

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None if unknown. May read the manifest."""
        if self._step is None:
            found = self._find()
            self._step = found.step if found.is_committed else None
        return self._step

    @property
    def kept_because(self) -> str:
        """The reasons why retention keeps the commit: "newest", "every 1000 steps",
        "best val_loss", or several, separated by ", ".

        `checkpoints()` sets the value, by the rules of the newest commit; in other
        references the value is "".
        """
        return self._kept

    def to_directory(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> str:
        """Copies the checkpoint's files into a directory, and verifies the copies.

        If several processes of this machine name the same directory, one process copies
        and the other processes wait. Files that a killed process has copied are not
        copied again. Unrelated files in the directory stay.

        Args:
            path: the directory, created if missing; ~ is the home directory. By default
                a temporary directory, the same in every process of this user; the
                caller must delete this directory after the last use.
            timeout: seconds for the whole call; None: no timeout while bytes keep
                arriving.

        Returns:
            The path of the directory.

        Raises:
            CheckpointCorruptedError: a file of the checkpoint is missing, or has
                another checksum than in the manifest.
            CheckpointError: there is no checkpoint, the disk is full, or the timeout
                has passed. Or the directory contains another program's file, under a
                name that the checkpoint needs; such a file is never overwritten.
        """
        check_timeout(timeout)
        began = time.monotonic()
        found = self._find(with_sums=True)
        if path is None:
            key = key_of(found.path, found.token)[:16]
            name = f"tfpreempt-checkpoint-{os.getuid()}-{key}"
            name = os.path.join(tempfile.gettempdir(), name)
            target = private_directory(name, "TMPDIR")
        else:
            target = _check_target(path)
        is_ours = path is None or not os.path.lexists(target)
        seconds = _COPY_TIMEOUT if timeout is None else timeout
        with locked(target, "copy a checkpoint", seconds=seconds, makes=True):
            if path is None:  # another process may have removed the directory
                private_directory(target, "TMPDIR")
            left = None if timeout is None else began + timeout - time.monotonic()
            try:
                _fill(found, target, left and max(0.0, left))
            except BaseException:
                if is_ours:
                    with contextlib.suppress(OSError):
                        os.rmdir(target)  # has an effect only on an empty directory
                raise
            if notes := user_metadata.read(found):
                user_metadata.write(catalog.unread_entry(LocalStore(target)), notes)
        return target

    @contextlib.contextmanager
    def as_directory(self, *, timeout: float | None = None) -> Iterator[str]:
        """Returns a context whose value is a local directory that contains the files.

        Do not change the files. A local checkpoint is not copied: the value is the
        directory of the commit, or the directory that contains the files of a flat
        checkpoint. A remote checkpoint is downloaded once for all processes of this
        machine. The download is deleted when the last process leaves the context.

        Args:
            timeout: seconds for a download, or for the wait for another process's
                download; None: no timeout while bytes keep arriving.

        Raises:
            CheckpointCorruptedError: a file of the checkpoint is missing, or has
                another checksum than in the manifest.
            CheckpointError: there is no checkpoint, the disk is full, or the timeout
                has passed.
        """
        check_timeout(timeout)
        found = self._find(with_sums=self._local is None)
        if self._local is not None:
            yield found.store.uri
            return
        fill = functools.partial(_fill, found, timeout=timeout)
        with cache.reading(
            key_of(found.path, found.token), fill, timeout=timeout
        ) as path:
            yield path

    def restore(self, tf_checkpoint: tf.train.Checkpoint) -> Any:
        """Restores a `tf.train.Checkpoint` from this checkpoint.

        The files of a commit are verified first. A remote checkpoint is downloaded; the
        download is deleted once no variable can be restored from it any more.

        Args:
            tf_checkpoint: the object to restore, by a call of its method `restore`.

        Returns:
            The result of `tf_checkpoint.restore`, for example for `assert_consumed()`.

        Raises:
            ConfigurationError: the object has no method `restore`; or the path contains
                [, *, ? or \\, so TensorFlow would not find the files.
            CheckpointError: the checkpoint contains no tf.train.Checkpoint, or cannot
                be read.
        """
        _check_restorable(tf_checkpoint)
        if self._local is not None:
            found = resolve.at_path(self._local)
            if found.is_committed:
                verify(found)
            return tf_checkpoint.restore(_checked_prefix(found))
        with contextlib.ExitStack() as copy:
            directory = copy.enter_context(self.as_directory())
            prefix = _checked_prefix(resolve.at_path(directory))
            status = tf_checkpoint.restore(prefix)
            # Delete the download when this object of TensorFlow is deleted: the status
            # and the restores of variables that are created later refer to the object.
            close_with(getattr(status, "_checkpoint", None), copy.pop_all().close)
        return status

    def get_metadata(self) -> dict[str, Any]:
        """Returns the metadata that users attached to the checkpoint; may be empty.

        Raises:
            CheckpointError: there is no checkpoint, or the metadata cannot be read.
        """
        return user_metadata.read(self._find())

    def set_metadata(self, values: Mapping[str, Any]) -> None:
        """Replaces the metadata of the checkpoint by a JSON object of the values.

        Raises:
            ConfigurationError: JSON cannot represent the values.
            CheckpointError: there is no checkpoint, or the metadata cannot be written.
        """
        user_metadata.encoded(values)
        with self._noting() as found:
            user_metadata.write(found, values)

    def update_metadata(self, values: Mapping[str, Any]) -> None:
        """Adds values to the metadata of the checkpoint.

        If several processes of one machine call the method at the same time, the values
        of all calls are added.

        Raises:
            ConfigurationError: JSON cannot represent the values.
            CheckpointError: there is no checkpoint, or the metadata cannot be written.
        """
        user_metadata.encoded(values)
        with self._noting() as found:
            user_metadata.write(found, {**user_metadata.read(found), **values})

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is a reference, not a path. Use `with checkpoint.as_directory() "
            "as path`; or `.path`, the location of the checkpoint; or `.prefix` for "
            "tf.train.Checkpoint.restore()."
        )

    def __truediv__(self, other: object) -> NoReturn:
        self.__fspath__()

    __add__ = __truediv__

    def __repr__(self) -> str:
        """Returns a text for users. Reads no file, so an unknown step is not shown."""
        step = "" if self._step is None else f", step={self._step}"
        where = "local" if self._local is not None else "remote"
        if self._filesystem is not None:
            where += f" in {type(self._filesystem).__name__}"
        return f"Checkpoint({self._path!r}{step}, {where})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        if self._local is not None or other._local is not None:
            return self._local == other._local
        return bool(self._path == other._path and self._filesystem == other._filesystem)

    def __hash__(self) -> int:
        return hash(self._path)

    def _find(self, *, with_sums: bool = False) -> Entry:
        if self._local is not None:
            return resolve.at_path(self._local, with_sums=with_sums)
        store = open_store(self._path or "/", self._filesystem)
        return resolve.in_store(store, with_sums=with_sums)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[Entry]:
        """Returns a context for a change of the metadata; the value of the context is
        the checkpoint.

        If the checkpoint is local, no other process writes metadata before the context
        ends.
        """
        found = self._find()
        if found.kind is Kind.EXTERNAL:
            raise errors.CheckpointError(
                f"{self!r} was written without tfpreempt and has no directory of its "
                "own, so there is no file for metadata. Copy the checkpoint with "
                "to_directory() first."
            )
        holder = os.path.join(found.store.uri, found.holder)
        alone = locked(holder, "write metadata", seconds=_NOTE_SECONDS)
        with contextlib.nullcontext() if self._local is None else alone:
            yield found


def checkpoints_in(directory: str) -> list[Checkpoint]:
    """Returns the checkpoints in a directory, oldest first.

    Args:
        directory: path of the checkpoint directory; need not exist.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    found = find_candidates(directory)
    kept, handles = explain(found), []
    for entry in reversed(found):
        handles.append(Checkpoint(entry.path, prefix=entry.prefix, step=entry.step))
        handles[-1]._kept = kept.get(entry.token, "")
    return handles


def latest_prefix(directory: str) -> str | None:
    """Returns TensorFlow's prefix of the newest checkpoint in a directory.

    Args:
        directory: path of the checkpoint directory; need not exist.

    Returns:
        The prefix; None if there is no checkpoint, or if the newest checkpoint has no
        TensorFlow checkpoint, only named States.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    return next((found.prefix for found in find_candidates(directory)), None)


def _check_restorable(given: Any) -> None:
    """Raises ConfigurationError if the object has no method `restore`."""
    # Refuse a CheckpointManager, which has no `restore`, and also the class
    # tf.train.Checkpoint, passed in place of an object of the class.
    if callable(getattr(given, "restore", None)) and not isinstance(given, type):
        return
    advice = (
        "create a Checkpoint of the objects to restore: "
        "tf.train.Checkpoint(model=model)"
    )
    if hasattr(given, "checkpoint") and hasattr(given, "latest_checkpoint"):
        advice = "pass the .checkpoint of the CheckpointManager"
    raise errors.ConfigurationError(
        f"restore() got {given!r}; expected a tf.train.Checkpoint: {advice}."
    )


def _checked_prefix(found: Entry) -> str:
    """Returns TensorFlow's prefix of a local checkpoint.

    Raises:
        CheckpointError: the checkpoint contains no tf.train.Checkpoint, or several.
        ConfigurationError: the path has a special character of glob patterns, so
            TensorFlow would not find the files.
    """
    prefix = resolve.tensorflow_prefix(found)
    if prefix is None:
        raise errors.CheckpointError(
            f"{found.path} contains no tf.train.Checkpoint, or more than one; expected "
            "exactly one `.index` file. For a directory with several checkpoints, pass "
            "the prefix of a checkpoint. To load named States, use load_state()."
        )
    paths.check_restorable(prefix)
    return prefix


def _fill(found: Entry, target: str, timeout: float | None) -> None:
    """Copies a checkpoint into the directory `target`; writes the marker last."""
    download(found, target, timeout=timeout, progress=True)
    if found.is_committed:
        path = os.path.join(target, layout.MARKER)
        write_durably(LocalFiles(target), path, found.marker)


def _check_path(path: object) -> str:
    if isinstance(path, Checkpoint) or not isinstance(path, str | os.PathLike):
        raise errors.ConfigurationError(
            f"Got {path!r} as the path of a checkpoint; expected a path or a URI (str "
            "or os.PathLike)."
        )
    text = os.fsdecode(os.fspath(path))
    paths.check_no_user_info(text)
    if "\0" in text:
        raise errors.ConfigurationError(
            f"Got the path {text!r}; expected a path without a NUL character."
        )
    return text


def _check_target(path: object) -> str:
    """Returns the real path of the directory to copy into.

    Raises:
        ConfigurationError: the path is not a local path.
        CheckpointError: the path exists and is not a directory.
    """
    local = local_path(os.path.expanduser(_check_path(path)))
    if local is None:
        raise errors.ConfigurationError(
            f"to_directory() got {path!r}; expected a directory of this machine."
        )
    target = os.path.realpath(local)
    if os.path.lexists(target) and not os.path.isdir(target):
        raise errors.CheckpointError(
            f"{target!r} is not a directory; expected a directory, or a path that does "
            "not exist. No file was written. Remove the file or choose another "
            "directory."
        )
    return target
