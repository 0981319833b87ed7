"""The lease of a directory, on its disk: three operations, each atomic on NFS too.

In the checkpoint directory:

    .tfpreempt-lease/<token>/holder     who holds it; never changed
    .tfpreempt-lease/<token>/beat       a counter, written anew while its holder lives
    .tfpreempt-lease.<token>/           a lease that is about to be taken

**Taking it** is one rename of a whole directory, with the holder's record in it, to
`.tfpreempt-lease`. A server refuses that unless what has the name is empty, or not
there: of many who try, one has it. **Ending it**, by its holder or by who takes over,
is the removal of `<token>/`, which no later holder has again.

**The fence.** What makes a commit, or unmakes one, is moved by way of `<token>/`. Once
that is removed it fails, in one operation of the file system, however long a process
was frozen between two lines: there is no moment between a look and an act. It is
removed, not renamed: a client of NFS that has it open could go on using it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
from collections.abc import Iterator
from typing import Protocol

from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.holder import Holder, from_json
from tfpreempt.checkpoint.home import Home
from tfpreempt.storage.files import Files, LocalFiles, remove_if_empty

_HOLDER, _BEAT = "holder", "beat"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
_TRIES = 100  # to remove a directory in which its holder still moves files


class Disk(Files, Protocol):
    """What a lease asks of a file system. All methods raise OSError."""

    def names(self, path: str) -> list[str]:
        """The names in a directory."""
        ...

    def read(self, path: str) -> bytes:
        """A small file."""
        ...


class LocalDisk(LocalFiles):
    """The file system of this machine."""

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:  # which asks the server of a network for it anew
            return file.read()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A lease that somebody has.

    Attributes:
        token: which.
        holder: who has it; None where it is being ended.
        beat: what its holder wrote last.
    """

    token: str
    holder: Holder | None
    beat: bytes


class LeaseDirectory:
    """The lease of one directory; any thread.

    Unlike a `StorePlace` it can be away for a while: unmounted, or moved.

    Args:
        directory: which exists.
        disk: where.
    """

    def __init__(self, directory: str, disk: Disk | None = None) -> None:
        self.where = directory
        self._home = Home(directory)
        self._disk: Disk = disk or LocalDisk()
        self._root = os.path.join(directory, layout.LEASE)
        self._moves = itertools.count()

    def look(self) -> Found | None:
        """Who has it; None if nobody.

        Raises:
            OSError: as the file system says.
        """
        for token in self._names(self._root):
            record = self._read(token, _HOLDER)  # empty: after a loss of power
            return Found(
                token=token,
                holder=from_json(record, token) if record else None,
                beat=self._read(token, _BEAT) or b"",
            )
        return None

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
            self._disk.write(os.path.join(place, _HOLDER), holder.to_json())
            self._disk.rename(new, self._root)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            # Refused; or a network lost the answer, asked again, and was refused then.
            self._remove(new, holder.token)
        return holder.token if self.has(holder.token) else None

    def end(self, token: str) -> None:
        """Ends a lease, if it is still there: its holder commits nothing any more.

        Raises:
            OSError: as the file system says.
        """
        self._remove(self._root, token)

    def has(self, token: str) -> bool:
        """Whether a lease is there still.

        Raises:
            OSError: as the file system says.
        """
        return self._read(token, _HOLDER) is not None

    def beat(self, token: str, count: int) -> None:
        """Renews a lease.

        Raises:
            FileNotFoundError: it was ended, or the directory is not there.
            OSError: as the file system says.
        """
        path = os.path.join(self._root, token, _BEAT)
        self._disk.write(path, b"%d" % count)

    def is_away(self) -> bool:
        """Whether another directory, or none, is in its place for now."""
        return not self._home.is_same()

    def way(self, token: str) -> str:
        """A path in a lease, by which one file can be moved to another place."""
        return os.path.join(self._root, token, f"move-{next(self._moves)}")

    def sweep(self) -> None:
        """Removes what starts left that were killed while they took the lease.

        Raises:
            OSError: as the file system says.
        """
        begins = layout.LEASE + "."
        for name in self._names(self.where):
            if name.startswith(begins):
                new = os.path.join(self.where, name)
                self._remove(new, name.removeprefix(begins))

    def _remove(self, root: str, token: str) -> None:
        place = os.path.join(root, token)
        for _ in range(_TRIES):
            names = self._names(place)
            # first what says that somebody has it: from then on all may help
            for name in sorted(names, key=_HOLDER.__ne__):
                self._disk.remove(os.path.join(place, name))
            try:
                self._disk.remove_dir(place)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        remove_if_empty(self._disk, root)

    def _names(self, path: str) -> list[str]:
        try:
            return self._disk.names(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _read(self, token: str, name: str) -> bytes | None:
        try:
            return self._disk.read(os.path.join(self._root, token, name))
        except (FileNotFoundError, NotADirectoryError):
            return None


class Held(Protocol):
    """A lease, as those see it who write under it."""

    def check(self) -> None:
        """Raises where it is lost."""
        ...

    def moving(self) -> contextlib.AbstractContextManager[str | None]:
        """A path by which to move a file; None where there is no lease to be had."""
        ...


class FencedFiles:
    """The file operations of a commit, by who holds the lease of its directory.

    What readers find commits by, the marker and TensorFlow's `checkpoint` file, goes by
    way of the lease. All else means nothing without them. A save begins by making a
    directory, which is refused at once.

    Args:
        files: the operations.
        lease: is held, or the operations raise.
    """

    def __init__(self, files: Files, lease: Held) -> None:
        self._files, self._lease = files, lease
        self.write, self.write_pieces = files.write, files.write_pieces
        self.sync_file, self.sync_dir = files.sync_file, files.sync_dir
        self.remove_dir = files.remove_dir

    def make_dirs(self, path: str) -> None:
        self._lease.check()
        self._files.make_dirs(path)

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) not in (layout.MARKER, layout.POINTER):
            self._files.rename(source, target)
            return
        with self._moved(source) as moved:
            self._files.rename(moved, target)

    def remove(self, path: str) -> None:
        if os.path.basename(path) != layout.MARKER:
            self._files.remove(path)
            return
        with contextlib.suppress(FileNotFoundError), self._moved(path) as moved:
            self._files.remove(moved)

    @contextlib.contextmanager
    def _moved(self, path: str) -> Iterator[str]:
        """A file where nobody can move it from who does not hold the lease."""
        with self._lease.moving() as way:
            if way is not None:
                self._files.rename(path, way)
            yield way or path
