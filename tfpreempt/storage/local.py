"""ObjectStore in a directory of this machine.

Other users may be able to write to the directory. So the folders in the path of an
object are opened one by one, each relative to its parent folder, and checked to be
directories; the last part of the path must be a regular file. No link is followed, and
opening a pipe does not wait for the pipe's writer.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
from collections.abc import Iterator

from tfpreempt import errors
from tfpreempt.core import contained
from tfpreempt.storage import chunks, file_reading, os_errors
from tfpreempt.storage.chunks import SeekableReader, SequentialWriter
from tfpreempt.storage.files import (
    Files,
    LocalFiles,
    make_lasting_dirs,
    remove_if_empty,
)
from tfpreempt.storage.object_store import (
    ObjectNotFoundError,
    ObjectStat,
    check_name,
)

TEMPORARY = ".tfpreempt-put-"  # prefix of a file's name until the file is complete
# Bytes per read; few enough to stay in the processor's cache for the checksum. Smaller
# pieces are slower: after every read the thread waits for the interpreter's lock.
_PIECE = 2 << 20
# A temporary file without a write for this time is deleted, as left by a killed
# process. If the process was only suspended, its write fails when the process resumes.
_LEFT_OVER_SECONDS = 3600.0


class LocalStore:
    """Store of files below a directory; the directory itself may be a link.

    A link below the directory is listed, so that users notice the link, but its target
    is never read, written or deleted. Timeouts are ignored, because file operations
    have no timeout.

    Args:
        root: path of the directory, created by the first write; a missing directory
            counts as empty.
        files: file system operations that make the changes; None: `LocalFiles`.
        unreadable: class of the error for a file that the disk cannot read now. Because
            the file may be readable later, pass CheckpointCorruptedError only if the
            caller can restore an older commit in that case.

    Raises:
        ConfigurationError: the root is a file.
    """

    def __init__(
        self,
        root: str,
        files: Files | None = None,
        *,
        unreadable: type[errors.CheckpointError] = errors.CheckpointError,
    ) -> None:
        self.uri = os.path.abspath(root)
        is_folder = True  # if stat() fails, assume a directory
        with contextlib.suppress(OSError):
            is_folder = stat.S_ISDIR(os.stat(self.uri).st_mode)
        if not is_folder:
            raise errors.ConfigurationError(
                f"{self.uri!r} is a file; expected a directory. Remove the file or "
                "choose another directory."
            )
        self._files = files or LocalFiles(self.uri)
        self._unreadable = unreadable
        self._is_swept = False

    def put_if_absent(
        self, name: str, source: SeekableReader, *, timeout: float | None = None
    ) -> bool:
        with self._written(name, source) as (temporary, path):
            if not self._link(temporary, path):
                return False
            self._files.sync_dir(os.path.dirname(path))
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        with self._written(name, io.BytesIO(data)) as (temporary, path):
            self._files.rename(temporary, path)
            self._files.sync_dir(os.path.dirname(path))

    def get(
        self,
        name: str,
        target: SequentialWriter,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        copied = 0
        with self._reading(name) as path:
            descriptor = contained.open_file(path, os.O_RDONLY, root=self.uri)
        try:
            while length is None or copied < length:
                wanted = _PIECE if length is None else min(_PIECE, length - copied)
                with self._reading(name):
                    piece = os.pread(descriptor, wanted, offset + copied)
                if not piece:
                    break
                target.write(piece)
                copied += len(piece)
        finally:
            os.close(descriptor)
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._listing():
            found = sorted(self._names(prefix))
        yield from found

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        with self._listing():
            _, found, _ = next(file_reading.walk(self.uri), ("", [], []))
        yield from (name for name in found if not self._is_linked(name))

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        try:
            with self._reading(name) as path:
                descriptor = contained.open_file(path, os.O_RDONLY, root=self.uri)
                with open(descriptor, "rb", buffering=0):
                    return ObjectStat(size=os.fstat(descriptor).st_size)
        except ObjectNotFoundError:
            return None

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        path = os.path.join(self.uri, check_name(name))
        if self._is_linked(name) or not os.path.isfile(path):
            return
        with os_errors.translated(f"delete {name!r}", self.uri):
            self._files.remove(path)
            self._files.sync_dir(os.path.dirname(path))
            self._remove_empty(os.path.dirname(path))

    def _link(self, temporary: str, path: str) -> bool:
        """Gives a complete temporary file the path of the object, by a hard link.

        Unlike a rename, a hard link never replaces an existing file.

        Returns:
            True if the link was made; False if a file exists at the path.
        """
        try:
            try:
                self._give_name(temporary, path)
            except FileNotFoundError:  # `delete` has removed the still empty folder
                make_lasting_dirs(self._files, os.path.dirname(path))
                self._give_name(temporary, path)
        except FileExistsError:
            return False
        return True

    def _give_name(self, temporary: str, path: str) -> None:
        with contained.parent(path, self.uri) as (folder, name):
            os.link(temporary, name, dst_dir_fd=folder, follow_symlinks=False)

    def _remove_empty(self, folder: str) -> None:
        """Removes a folder if empty, then its empty parent folders below the root.

        Without the removal, `folders` would list empty folders, unlike an object store.
        """
        while folder != self.uri and not os.listdir(folder):
            remove_if_empty(self._files, folder)
            folder = os.path.dirname(folder)

    @contextlib.contextmanager
    def _written(self, name: str, source: SeekableReader) -> Iterator[tuple[str, str]]:
        """Context that writes the source to a durable temporary file.

        The body of the context gives the file the path of the object. At the end the
        temporary name is deleted. Errors of reading the source are raised unchanged;
        errors of the disk become SaveError.

        Yields:
            The path of the temporary file, and the path of the object.
        """
        path, doing = os.path.join(self.uri, check_name(name)), f"write {name!r}"
        if self._is_linked(name):
            raise errors.SaveError(
                f"{path!r} contains a symbolic link; expected plain directories "
                f"below {self.uri!r}. Remove the link, or choose another directory."
            )
        temporary = os.path.join(self.uri, TEMPORARY + secrets.token_hex(8))
        try:
            with os_errors.translated(doing, self.uri):
                make_lasting_dirs(self._files, os.path.dirname(path))
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                made = contained.open_file(temporary, flags)
                file = io.FileIO(temporary, "w", opener=lambda *_: made)
            with file:
                self._sweep(os.fstat(file.fileno()).st_mtime)
                for piece in chunks.of(source, _PIECE):
                    with os_errors.translated(doing, self.uri):
                        chunks.write(file, piece)
            with os_errors.translated(doing, self.uri):
                self._files.sync_file(temporary)
                yield temporary, path
        finally:
            with os_errors.translated("delete a temporary file", self.uri):
                self._files.remove(temporary)

    def _sweep(self, now: float) -> None:
        """Deletes the temporary files of killed processes, at the store's first write.

        Args:
            now: current time by the clock of the file system: the modification time of
                a new file.
        """
        if self._is_swept:
            return
        self._is_swept = True
        with contextlib.suppress(OSError):  # the write continues without the cleanup
            for name in os.listdir(self.uri):
                path = os.path.join(self.uri, name)
                is_ours = name.startswith(TEMPORARY)
                if is_ours and now - os.lstat(path).st_mtime > _LEFT_OVER_SECONDS:
                    self._files.remove(path)

    def _names(self, prefix: str) -> Iterator[str]:
        """Yields the names of the files and links whose name begins with the prefix.

        Reads only the folders that can contain such names.
        """

        above = prefix.rpartition("/")[0]
        if above and self._is_linked(check_name(above)):
            return
        top = os.path.join(self.uri, above) if above else self.uri
        start = len(os.path.join(self.uri, ""))
        for folder, folders, files in file_reading.walk(top):
            links = [n for n in folders if os.path.islink(os.path.join(folder, n))]
            for each in (*files, *links):
                name = os.path.join(folder, each)[start:]
                if name.startswith(prefix) and not name.startswith(TEMPORARY):
                    yield name

    def _is_linked(self, name: str) -> bool:
        """Returns whether any part of the path of an object is a symbolic link."""
        path = self.uri
        for part in name.split("/"):
            path = os.path.join(path, part)
            if os.path.islink(path):
                return True
        return False

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[str]:
        """Context that translates the errors of reading an object.

        Yields:
            The path of the object.

        Raises:
            ObjectNotFoundError: there is no object with this name.
            CheckpointCorruptedError: a part of the path is a link, or the path is not a
                regular file.
            CheckpointError: the disk cannot read the object; the class is `unreadable`.
        """
        path = os.path.join(self.uri, check_name(name))
        corrupt = errors.CheckpointCorruptedError
        try:
            yield path
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            text = f"The object {name!r} does not exist in {self.uri!r}."
            # The name is missing, or is a folder; or a part of the path is a file.
            raise ObjectNotFoundError(text) from error
        except contained.LinkError as error:
            raise corrupt(
                f"The path of {name!r} in {self.uri!r} contains a symbolic link; "
                "expected a regular file, because links are not followed. Replace the "
                "link by the file."
            ) from error
        except contained.UnsafeFileError as error:
            text = f"{name!r} in {self.uri!r} is not a regular file."
            raise corrupt(text) from error
        except OSError as error:
            file_reading.check_shortage(error, path)
            raise self._unreadable(
                f"{name!r} in {self.uri!r} cannot be read: {error.strerror or error}. "
                "Check the disk, the mount and the permissions."
            ) from error

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise errors.CheckpointError(
                f"The directory {self.uri!r} cannot be listed: {error}. Check the "
                "disk, the mount and the permissions."
            ) from error
