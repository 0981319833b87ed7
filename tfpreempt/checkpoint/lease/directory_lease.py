"""The lease of a directory, on its disk: three operations, each atomic on NFS too.

In the checkpoint directory:

    .tfpreempt-lease/<token>/holder     who holds it; never changed
    .tfpreempt-lease/<token>/beat       a counter, written anew while its holder lives
    .tfpreempt-lease.<token>/           a lease that is about to be taken

**Taking it** is one rename of a whole directory, with the holder's record in it, to
`.tfpreempt-lease`. A server refuses that unless what has the name is empty, or not
there: of many who try, one has it. **Ending it**, by its holder or by who takes over,
is the removal of `<token>/`, which no later holder has again.

**The fence.** What makes a commit is written in `<token>/` and moved from there to its
name; what unmakes one is moved there, and removed. Once that directory is removed both
fail, in one operation of the file system, however long a process was frozen between two
lines: there is no moment between a look and an act. It is removed, not renamed: a
client of NFS that has it open could go on using it. Nor can anybody else's bytes get to
that name: a temporary file beside it would be the same one for all runs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from typing import Protocol

from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.head import Held
from tfpreempt.checkpoint.directory.storage_identity import DirectoryIdentity
from tfpreempt.checkpoint.lease.lease_record import MAX_BYTES, Found, Holder, from_json
from tfpreempt.checkpoint.lease.lease_timeouts import Renewal
from tfpreempt.core import contained
from tfpreempt.storage import reading
from tfpreempt.storage.files import (
    NOTHING_THERE,
    Files,
    LocalFiles,
    remove_if_empty,
    write_durably,
)

_HOLDER, _BEAT = "holder", "beat"
_UNREADABLE = b"?"  # stands for a record that must not be read
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
_IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY)
_TRIES = 100  # to remove a directory in which its holder still moves files

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What a lease says that is over; the last on NFS, where another machine removed it."""

PACE = Renewal(renewal=5.0, expiry=30.0, poll=0.2)  # a node's in Kubernetes: 10 and 40


class Disk(Files, Protocol):
    """What a lease asks of a file system. All methods raise OSError."""

    def names(self, path: str) -> list[str]:
        """The names in a directory."""
        ...

    def read(self, path: str) -> bytes:
        """A small file; `_UNREADABLE` for a pipe, a link or a larger file."""
        ...


class LocalDisk(LocalFiles):
    """The file system of this machine."""

    def names(self, path: str) -> list[str]:
        with contained.directory(path, self.root, reads=True) as folder:
            return os.listdir(folder)

    def read(self, path: str) -> bytes:
        try:  # Opening asks the server of a network file system again.
            return contained.read(path, MAX_BYTES, root=self.root)
        except OSError as error:
            is_unsafe = isinstance(error, contained.UnsafeFileError)
            if error.filename != path or not (is_unsafe or error.errno == errno.EFBIG):
                raise
            return _UNREADABLE


class LeaseDirectory:
    """The lease of one directory; any thread.

    Args:
        directory: which exists.
        disk: where.
    """

    def __init__(self, directory: str, disk: Disk | None = None) -> None:
        self.where = directory
        self.pace = PACE
        self._identity = DirectoryIdentity(directory)
        self._disk: Disk = disk or LocalDisk(directory)
        self._root = os.path.join(directory, layout.LEASE)
        self._moves = itertools.count()

    def look(self) -> Found | None:
        """Who has it; None if nobody.

        Raises:
            OSError: as the file system says.
        """
        leaving = None
        for token in self._names(self._root):
            record = self._read(token, _HOLDER)
            if record:
                holder, beat = from_json(record, token), self._read(token, _BEAT) or b""
                return Found(token=token, holder=holder, beat=beat)
            # Empty after a loss of power; or it is no lease, and not ours to remove.
            leaving = leaving or Found(token=token, holder=None, beat=b"")
        return leaving

    def take(self, holder: Holder) -> str | None:
        """Takes it, unless somebody has it.

        Returns:
            Its token; None if somebody has it.

        Raises:
            OSError: as the file system says.
        """
        new = f"{self._root}.{holder.token}"
        place = os.path.join(new, holder.token)
        try:
            self._disk.make_dirs(place)
            self._disk.write(os.path.join(place, _HOLDER), [holder.to_json()])
            self._disk.rename(new, self._root)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            # Refused; or a network lost the answer, asked again, and was refused then.
            self.end(holder.token, new)
        return holder.token if self._read(holder.token, _HOLDER) is not None else None

    def end(self, token: str, root: str | None = None) -> None:
        """Ends a lease, if it is still there: its holder commits nothing any more.

        Args:
            token: of the lease.
            root: the directory that it is in; by default where the lease lies once
                it was taken.

        Raises:
            OSError: as the file system says.
        """
        root = root or self._root
        place = os.path.join(root, token)
        for _ in range(_TRIES):
            names = self._names(place)
            try:
                # first what says that somebody has it: from then on all may help
                for name in sorted(names, key=_HOLDER.__ne__):
                    self._disk.remove(os.path.join(place, name))
                self._disk.remove_dir(place)
                break
            except OSError as error:
                if error.errno in GONE:
                    break  # another one was quicker; or it never was a lease
                if error.errno not in _IN_USE:
                    raise
        remove_if_empty(self._disk, root)

    def has(self, token: str) -> bool:
        """Whether a lease is there still.

        Raises:
            OSError: as the file system says, which on NFS may forget for a moment what
                it has; or the directory is away for a while, unmounted or moved, and
                what is in its place says nothing.
        """
        try:
            self._disk.read(os.path.join(self._root, token, _HOLDER))
        except (FileNotFoundError, NotADirectoryError):
            pass
        else:
            return True
        if not self._identity.is_same():
            raise OSError(f"{self.where!r} is not there, or it is another directory")
        return False

    def beat(self, token: str, count: int) -> None:
        """Renews a lease.

        Raises:
            FileNotFoundError: it was ended, or the directory is not there.
            OSError: as the file system says.
        """
        path = os.path.join(self._root, token, _BEAT)
        self._disk.write(path, [b"%d" % count])

    def way(self, token: str) -> str:
        """A path in a lease, by which one file can be moved to another place."""
        return os.path.join(self._root, token, f"move-{next(self._moves)}")

    def sweep(self) -> None:
        """Removes what starts left that were killed while they took the lease; what
        cannot be removed does no harm."""
        begins = layout.LEASE + "."
        with contextlib.suppress(OSError):
            for name in self._names(self.where):
                if name.startswith(begins):
                    new = os.path.join(self.where, name)
                    with contextlib.suppress(OSError):
                        self.end(name.removeprefix(begins), new)

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
    """Returns whether a directory is the one whose lease has a token; any worker.

    The chief gives its token to the other workers, and each worker looks for the lease
    in the directory that has the worker's path. A network file system may serve old
    listings from the cache of a machine, so the worker asks for one name, which no
    machine has asked for before: the server is asked then.

    Args:
        directory: path of the directory on this machine; it need not exist.
        token: token of the chief's lease.
    """
    if os.path.basename(token) != token:  # a peer sent the token
        return False
    try:
        return reading.is_there(os.path.join(directory, layout.LEASE, token, _HOLDER))
    except OSError:
        return False


class FencedFiles:
    """The file operations of a commit, by who holds the lease of its directory.

    What readers find commits by, the marker and TensorFlow's `checkpoint` file, is
    published by way of the lease. By that way goes, too, whatever is deleted outside of
    the staging of saves: who has taken over may have a commit of that name by now. All
    else means nothing without these. A save begins by making a directory, which is
    refused at once.

    Args:
        files: the operations.
        lease: is held, or the operations raise.
    """

    def __init__(self, files: Files, lease: Held) -> None:
        self._files, self._lease = files, lease
        self.write, self.remove_dir = files.write, files.remove_dir
        self.sync_file, self.sync_dir = files.sync_file, files.sync_dir

    def make_dirs(self, path: str) -> None:
        self._lease.check()
        self._files.make_dirs(path)

    def publish(self, path: str, data: bytes) -> None:
        """Writes a small file that readers find commits by; durable, all or nothing.

        Args:
            path: where it goes.
            data: all of its bytes.

        Raises:
            LeaseLostError: another process has the lease.
            OSError: as the file system says.
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
                self._lease.check()  # a save_fn's, on another disk: no fence reaches it
        write_durably(self._files, path, data)

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) not in (layout.MARKER, layout.POINTER):
            self._files.rename(source, target)
            return
        with self._moved(source) as moved:  # whole before, and of a name of its own
            self._files.rename(moved, target)

    def remove(self, path: str) -> None:
        if f"/{layout.STAGING}/" in path:
            self._files.remove(path)
            return
        with contextlib.suppress(*NOTHING_THERE), self._moved(path) as moved:
            self._files.remove(moved)

    @contextlib.contextmanager
    def _moved(self, path: str) -> Iterator[str]:
        """A file where nobody can move it from who does not hold the lease."""
        with self._lease.moving() as way:
            try:
                if way is not None:
                    self._files.rename(path, way)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._lease.check()  # a save_fn's, on another disk: no fence reaches it
                way = None
            yield way or path
