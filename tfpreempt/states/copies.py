"""What a program without a handler has in an object store: it looks, fetches, copies.

The same as a handler does at its start and at its end, by `checkpoint/mirror`, except
that nobody agrees with anybody: each worker looks for itself, by the same rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import logging
import os
import uuid
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.file_locks import acquire
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror import import_commit
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.shard_transfer import clear_others
from tfpreempt.checkpoint.mirror.store_selection import REMOTE_VARIABLE, Scratch
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Fault
from tfpreempt.handler.exit import on_interpreter_end
from tfpreempt.storage import failure
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.interface import ObjectStore

_log = logging.getLogger(__name__)

_FETCH_SECONDS = 3600.0  # that another worker may take to fetch a commit
_END_SECONDS = 60.0  # that the end of the program waits for the last copy
MAX_TO_KEEP = 2  # commits, in the directory and in the store


@dataclasses.dataclass(eq=False)
class Copies:
    """One worker's part; main thread.

    Args:
        store: where commits are copied to.
        directory: the checkpoint directory, which exists.
        cluster: who the workers are.
        newest: finds the newest commit in the directory that is whole.
        files: the file operations; on the chief, by its lease of the directory.
        scratch: where the directory is the scratch directory of a URL.
        seconds: how long the end of the program may wait for the last copy; of a URL as
            long as the upload gets on.

    Attributes:
        mirror: the mirror of the directory, once `begin` was called.
    """

    store: ObjectStore
    directory: str
    cluster: Cluster
    newest: Callable[[], Entry | None]
    files: Files
    scratch: Scratch | None = None
    seconds: float = _END_SECONDS
    _has_looked: bool = False
    _process: int = 0  # the one whose end waits; not that of a forked child

    def __post_init__(self) -> None:
        lease = Lease() if self.cluster.is_chief else None
        self.mirror = self._make_mirror(lease)

    def begin(self, hold: Callable[[], None] = lambda: None) -> None:
        """Before anything is loaded or saved: once, the newest commit is brought here.

        On the chief copying begins, with what the last run did not finish. After a
        handler, which takes copying over as long as it is open, it begins again.

        Args:
            hold: on the chief, takes the lease of the directory. No other worker looks
                meanwhile: a worker that finds the lease taken knows that the chief has
                settled the scratch directory.

        Raises:
            CheckpointDamagedError: no commit in the store is whole, and there is no
                local one.
            CheckpointError: the store cannot be read, and there is no local commit.
            SaveError: the disk.
        """
        with contextlib.nullcontext() if self._has_looked else self._locked():
            hold()
            if not self._has_looked:
                self._bring()
                self._has_looked = True
        if self.cluster.is_chief and not self.mirror.is_open:
            taken = self.mirror.highest_sequence
            self.mirror = self._make_mirror(self.mirror.lease, taken)
            self.mirror.begin(self.directory, self.newest(), self._record)
            none = uuid.uuid4().hex  # there are no shards under way here
            self.mirror.task(functools.partial(clear_others, self.store, none))
            if self._process != os.getpid():
                self._process = os.getpid()
                on_interpreter_end(self._end)

    def _make_mirror(self, lease: Lease | None, taken: int = 0) -> Mirror:
        return Mirror(
            self.store,
            max_to_keep=MAX_TO_KEEP,
            taken=taken,
            lease=lease,
            scratch=self.scratch,
        )

    def _bring(self) -> None:
        instead = f"unset {REMOTE_VARIABLE}"
        if self.scratch is not None:
            instead = "name another checkpoint directory"
        copies = None
        with self._settling() as files:
            if files is not None:
                copies = import_commit.settle(self.mirror, files, instead=instead)
        local = self.newest()
        lost: list[str] = []
        import_commit.look_for_newer(
            self.mirror,
            local,
            lambda found: import_commit.newest_first(
                self.files, found, local, self.directory, lost.append, lost.append
            ),
            instead=instead,
            copies=copies,
        )
        if lost and self.newest() is None:
            found = "; ".join(text.rstrip(".") for text in lost)
            raise errors.CheckpointDamagedError(
                f"no copy in {self.store.uri} is whole ({found}). Put the objects "
                f"back; or, to begin anew, move them away or {instead}"
            )
        for problem in lost:
            _log.warning("tfpreempt: %s; it is passed over", problem.rstrip("."))

    @contextlib.contextmanager
    def _settling(self) -> Iterator[Files | None]:
        """Yields the file operations to settle with; None where the worker only reads.

        A worker without the chief on its machine takes the lease for that moment. If
        the lease is taken, the chief commits in the directory.
        """
        if self.cluster.is_chief or self.scratch is None:
            yield self.files
            return
        lease = Lease()
        if not lease.acquire_if_free(self.directory):
            yield None
            return
        try:
            yield FencedFiles(LocalFiles(self.directory), lease)
        finally:
            lease.release()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Of workers that share the directory one fetches; the others find it there."""
        path = os.path.join(self.directory, layout.FETCH_LOCK)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with failure.translated("lock a file", self.directory):
            descriptor = acquire(path, fcntl.LOCK_EX, _FETCH_SECONDS, flags)
        try:
            yield
        finally:
            os.close(descriptor)

    def _record(self, fault: Fault) -> None:
        """Nothing: the mirror logs it, and there is no journal without a handler."""

    def _end(self) -> None:
        """The program is over: the copy of its last commit gets some time."""
        if self._process != os.getpid() or not self.mirror.is_open:
            return
        if not self.mirror.wait(None if self.scratch else self.seconds):
            self.mirror.finish(0.0)  # says what is not there
        self.mirror.close()
