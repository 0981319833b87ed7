"""The lease of a directory, as files on its disk. The operations are atomic on NFS too.

In the checkpoint directory:

    .tfpreempt-lease/<token>/holder     record of the holder; never changed
    .tfpreempt-lease/<token>/renewals   number of renewals, rewritten by the holder
    .tfpreempt-lease.<token>/           a lease that a process is about to take

**Taking the lease.** A process creates the complete directory, with the record inside,
and renames the directory to `.tfpreempt-lease`. A file server refuses the rename unless
the target is missing or an empty directory, so only one of several processes succeeds.

**Ending the lease**, by its holder or by the process that takes over, is the removal of
`<token>/`. No later holder has the same token.

**The fence.** A process that lost the lease must not commit, even after the process was
suspended. A check before each operation would not suffice, since the process may be
suspended between the check and the operation. So a file that makes a commit is written
in `<token>/`, and then moved to the final name. A file whose removal ends a commit is
first moved into `<token>/`, and removed there. Once `<token>/` is removed, both moves
fail: the move is check and operation at once.

The end of a lease removes `<token>/`. A rename would not suffice: an NFS client that
has the directory open could continue to use the directory under its new name. A file
is first written in `<token>/`, not in the directory of its final name (as temporary
files usually are), because two runs would write to the same temporary file there.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Iterator
from typing import Protocol

from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.head import HeldLease
from tfpreempt.checkpoint.directory.storage_identity import DirectoryIdentity
from tfpreempt.checkpoint.lease.lease_record import (
    MAX_BYTES,
    LeaseOwner,
    ObservedLease,
    from_json,
    is_token,
)
from tfpreempt.checkpoint.lease.lease_timeouts import RenewalIntervals
from tfpreempt.core import contained
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import (
    NOTHING_THERE,
    Files,
    LocalFiles,
    remove_if_empty,
    write_durably,
)

_HOLDER, _RENEWALS, _MOVE = "holder", "renewals", "move-"
# Names in the directory of a lease. Earlier versions counted the renewals in "beat".
_OURS = re.compile(rf"{_HOLDER}|{_RENEWALS}|beat|{_MOVE}\d+")
_UNREADABLE = b"?"  # returned in place of the content of a file that must not be read
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
_IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY)
# Attempts to remove the directory of a lease: the holder may move files into the
# directory during an attempt.
_TRIES = 100

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Error numbers that mean that the lease was removed; ESTALE: by another NFS client."""

# For comparison, leases of Kubernetes nodes: renewal 10 s, expiry 40 s.
PACE = RenewalIntervals(renewal=5.0, expiry=30.0, poll=0.2)


class LeaseFileSystem(Files, Protocol):
    """The file operations needed by a directory's lease. Any method may raise
    OSError."""

    def names(self, path: str) -> list[str]:
        """Returns the names of the entries of a directory."""
        ...

    def read(self, path: str) -> bytes:
        """Returns the content of a small file. Returns `_UNREADABLE` for a pipe, a link
        or a large file, which another user may have created."""
        ...


class LocalLeaseFileSystem(LocalFiles):
    """The file operations of a lease, on the file system of this machine."""

    def names(self, path: str) -> list[str]:
        with contained.directory(path, self.root, reads=True) as folder:
            return os.listdir(folder)

    def read(self, path: str) -> bytes:
        try:  # open() makes an NFS client ask the server, not its cache
            return contained.read(path, MAX_BYTES, root=self.root)
        except OSError as error:
            is_unsafe = isinstance(error, contained.UnsafeFileError)
            if error.filename != path or not (is_unsafe or error.errno == errno.EFBIG):
                raise
            return _UNREADABLE


class DirectoryLease:
    """The lease of one checkpoint directory. Methods may be called on any thread.

    Args:
        directory: path of an existing checkpoint directory.
        disk: file operations; by default the file system of this machine.
    """

    def __init__(self, directory: str, disk: LeaseFileSystem | None = None) -> None:
        self.where = directory
        self.pace = PACE
        self._identity = DirectoryIdentity(directory)
        self._disk: LeaseFileSystem = disk or LocalLeaseFileSystem(directory)
        self._root = os.path.join(directory, layout.LEASE)
        self._moves = itertools.count()

    def read_owner(self) -> ObservedLease | None:
        """Returns the directory's lease, as its holder has written it. None if no
        process holds the lease.

        Raises:
            OSError: error of the file system.
        """
        leaving = None
        # An entry with another name is not a lease, and is never removed.
        for token in filter(is_token, self._names(self._root)):
            record = self._read(token, _HOLDER)
            if record:
                return ObservedLease(
                    token=token,
                    holder=from_json(record, token),
                    renewals=self._read(token, _RENEWALS) or b"",
                )
            # The lease is being ended, or a power loss has left an empty record.
            leaving = leaving or ObservedLease(token=token, holder=None, renewals=b"")
        return leaving

    def take(self, holder: LeaseOwner) -> str | None:
        """Takes the lease, if the lease is free.

        Args:
            holder: record of the calling process.

        Returns:
            The token of the new lease; None if another process holds the lease.

        Raises:
            OSError: error of the file system.
        """
        new = f"{self._root}.{holder.token}"
        folder = os.path.join(new, holder.token)
        try:
            self._disk.make_dirs(folder)
            self._disk.write(os.path.join(folder, _HOLDER), [holder.to_json()])
            self._disk.rename(new, self._root)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            # Either the rename was refused; or it succeeded, but the network lost the
            # reply, and the NFS client's second attempt was refused.
            self.end(holder.token, new)
        return holder.token if self._read(holder.token, _HOLDER) is not None else None

    def end(self, token: str, root: str | None = None) -> None:
        """Ends a lease, if the lease still exists, so that the holder of the lease can
        no longer commit.

        Files of other programs stay, and so does the directory: another user, who
        cannot delete the files, may have renamed the directory.

        Args:
            token: token of the lease.
            root: path of the directory that contains `<token>/`; by default
                `.tfpreempt-lease`.

        Raises:
            OSError: error of the file system.
        """
        root = root or self._root
        folder = os.path.join(root, token)
        for _ in range(_TRIES):
            names = self._names(folder)
            try:
                # Remove the holder's record first: without a record, any process may
                # finish an interrupted removal.
                for name in sorted(filter(_OURS.fullmatch, names), key=_HOLDER.__ne__):
                    self._disk.remove(os.path.join(folder, name))
                self._disk.remove_dir(folder)
                break
            except OSError as error:
                if error.errno in GONE:
                    break  # another process removed the lease; or there was no lease
                if error.errno not in _IN_USE:
                    raise
        remove_if_empty(self._disk, root)

    def has(self, token: str) -> bool:
        """Returns whether the lease with this token still exists.

        Raises:
            OSError: it is unknown whether the lease exists. NFS may not find a file for
                a moment. If the directory was unmounted or moved, a file that is
                missing at its path proves nothing.
        """
        try:
            self._disk.read(os.path.join(self._root, token, _HOLDER))
        except (FileNotFoundError, NotADirectoryError):
            pass
        else:
            return True
        if not self._identity.is_same():
            raise OSError(
                f"the path {self.where!r} does not lead to the directory of the start"
            )
        return False

    def renew(self, token: str, count: int) -> None:
        """Renews a lease: writes the number of renewals.

        Args:
            token: token of the lease.
            count: number of renewals of the lease, including this renewal.

        Raises:
            FileNotFoundError: the lease was ended, or the directory is missing.
            OSError: error of the file system.
        """
        path = os.path.join(self._root, token, _RENEWALS)
        self._disk.write(path, [b"%d" % count])

    def fenced_path(self, token: str) -> str:
        """Returns a new path inside the lease's directory. A file is moved from this
        path to its final name, or from its final name to this path; once the lease has
        ended, the move fails.
        """
        return os.path.join(self._root, token, f"{_MOVE}{next(self._moves)}")

    def sweep(self) -> None:
        """Removes the files of processes that were killed while taking the lease.

        Errors are ignored, because the files do no harm.
        """
        begins = layout.LEASE + "."
        with contextlib.suppress(OSError):
            for name in self._names(self.where):
                token = name.removeprefix(begins)
                if name.startswith(begins) and is_token(token):
                    with contextlib.suppress(OSError):
                        self.end(token, os.path.join(self.where, name))

    def _names(self, path: str) -> list[str]:
        try:
            return self._disk.names(path)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return []

    def _read(self, token: str, name: str) -> bytes | None:
        try:
            return self._disk.read(os.path.join(self._root, token, name))
        except OSError as error:
            if error.errno not in GONE:
                raise
            return None


def is_leased_by(directory: str, token: str) -> bool:
    """Returns whether the lease of a directory has this token, as seen by this worker.

    Used by every worker to find out whether the chief (worker 0) has the same directory
    at its path: the chief sends the token of its lease, and the worker looks for this
    lease. A network file system may serve old listings from the cache of a machine. So
    the worker looks for a single name, which is new to every machine, and the request
    reaches the server.

    Args:
        directory: path of the directory on this machine; may be missing.
        token: token of the chief's lease.
    """
    if os.path.basename(token) != token:  # do not trust a token sent by another process
        return False
    try:
        return file_reading.is_there(
            os.path.join(directory, layout.LEASE, token, _HOLDER)
        )
    except OSError:
        return False


class FencedFiles:
    """The file operations of commits, for the holder of the directory's lease only.

    Readers find commits by two files: the marker, and TensorFlow's `checkpoint` file.
    Both are moved to their final name from the lease's directory: the move fails if the
    lease, and with it the directory, was removed. Without these two files, the other
    files of a commit have no effect. A file to delete is first moved into the lease's
    directory, because a process that has taken over the lease may have made a commit of
    the same name. (No commit is in the staging directory, so files are deleted there
    directly.) A save begins with `make_dirs`, which fails at once if the lease is lost.

    Args:
        files: file system operations, used for all changes, that ignore the lease.
        lease: lease of the directory. If the lease is lost, `make_dirs`, a deletion and
            the operations on the two files raise LeaseLostError.
    """

    def __init__(self, files: Files, lease: HeldLease) -> None:
        self._files, self._lease = files, lease
        self.write, self.remove_dir = files.write, files.remove_dir
        self.sync_file, self.sync_dir = files.sync_file, files.sync_dir

    def make_dirs(self, path: str) -> None:
        self._lease.check()
        self._files.make_dirs(path)

    def publish(self, path: str, data: bytes) -> None:
        """Writes a small file by which readers find commits, atomically and durably.

        Args:
            path: final path of the file.
            data: complete content of the file.

        Raises:
            LeaseLostError: the lease is lost.
            OSError: error of the file system.
        """
        with self._lease.moving() as way:
            try:
                write_durably(self._files, path, data, way)
                return
            except OSError as error:
                if way is not None:
                    with contextlib.suppress(OSError):
                        self._files.remove(way)
                if way is None or error.errno != errno.EXDEV:
                    raise
                # save_fn wrote to another disk than the lease's. Usually the file moves
                # out of the lease's directory, which fails if the lease is lost. A file
                # cannot move to another disk, so check the lease before the write.
                self._lease.check()
        write_durably(self._files, path, data)

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) not in (layout.MARKER, layout.POINTER):
            self._files.rename(source, target)
            return
        # `source` is complete, and no other process uses its name. So no new temporary
        # file is needed: move `source` itself through the lease's directory.
        with self._moved(source) as moved:
            self._files.rename(moved, target)

    def remove(self, path: str) -> None:
        if f"/{layout.STAGING}/" in path:
            self._files.remove(path)
            return
        with contextlib.suppress(*NOTHING_THERE), self._moved(path) as moved:
            if not file_reading.is_real_dir(moved):
                self._files.remove(moved)
            elif moved != path:
                # A directory is not a file of tfpreempt. Move the directory back:
                # otherwise the lease's directory could not be removed, and no later
                # process could take the lease.
                self._files.rename(moved, path)

    @contextlib.contextmanager
    def _moved(self, path: str) -> Iterator[str]:
        """Returns a context that moves a file into the lease's directory. There, only
        the holder of the lease can rename or delete the file.

        Yields:
            The new path of the file. The old path, if the lease is in an object store,
            or if the file is on another disk than the lease.
        """
        with self._lease.moving() as way:
            try:
                if way is not None:
                    self._files.rename(path, way)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # save_fn wrote to another disk than the disk of the lease, so the file
                # cannot be moved into the lease's directory. The move would fail if the
                # lease were lost; so check the lease here instead.
                self._lease.check()
                way = None
            yield way or path
