"""`StandaloneMirror`: the mirror of a program without a handler.

Like the mirror of a handler, the mirror imports the newest commit at the start, uploads
commits in the background, and waits for the last upload at the end. But the workers do
not agree on a commit to restore: every worker finds the newest commit for itself.
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
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror import import_commit
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.shard_transfer import clear_others
from tfpreempt.checkpoint.mirror.store_selection import REMOTE_VARIABLE, Scratch
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Fault
from tfpreempt.handler.exit import on_interpreter_end
from tfpreempt.storage import os_errors
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)

_FETCH_SECONDS = 3600.0  # timeout of the wait for another worker that imports a commit
_END_SECONDS = 60.0  # timeout of the last upload at the end of the program


@dataclasses.dataclass(eq=False)
class StandaloneMirror:
    """Imports and uploads the commits of a directory; used on the main thread.

    Args:
        store: object store of the mirror.
        directory: the checkpoint directory, which exists.
        cluster: the workers of the run.
        newest: function that returns the newest intact commit in the directory.
        files: file operations on the directory, guarded by the lease that the chief
            holds.
        scratch: the scratch directory, if the user's checkpoint directory is a URL.
        seconds: timeout in seconds of the last upload, at the end of the program. With
            a scratch directory there is no timeout while the upload makes progress.

    Attributes:
        mirror: mirror of the directory; opened by `begin`, on the chief.
    """

    store: ObjectStore
    directory: str
    cluster: Cluster
    newest: Callable[[], Entry | None]
    files: Files
    scratch: Scratch | None = None
    seconds: float = _END_SECONDS
    _has_looked: bool = False
    _process: int = 0  # id of the process whose end waits for uploads; not of a fork

    def __post_init__(self) -> None:
        lease = Lease() if self.cluster.is_chief else None
        self.mirror = self._make_mirror(lease)

    def begin(self, hold: Callable[[], None] = lambda: None) -> None:
        """Imports the newest commit of the mirror, and starts the uploads.

        Called before each load or save. Only the first call imports. On the chief,
        `begin` starts the upload thread, which first uploads a commit that the last run
        has not uploaded. While a handler is open, this mirror is closed, and the
        handler uploads the handler's commits. The first call of `begin` after the end
        of the handler starts the uploads of this mirror again.

        Args:
            hold: function that acquires the lease of the directory on the chief. The
                first call of `begin` calls `hold` and imports within one file lock,
                which the other workers of the directory need for their import. So a
                worker that has the lock, and finds the lease acquired, knows that the
                chief has imported.

        Raises:
            CheckpointCorruptedError: no commit in the store is intact, and there is no
                local commit.
            CheckpointError: the store cannot be read, and there is no local commit.
            SaveError: the disk failed.
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
            none = uuid.uuid4().hex  # a new token, so that every old shard is deleted
            self.mirror.enqueue(functools.partial(clear_others, self.store, none))
            if self._process != os.getpid():
                self._process = os.getpid()
                on_interpreter_end(self._end)

    def _make_mirror(self, lease: Lease | None, taken: int = 0) -> Mirror:
        return Mirror(
            self.store,
            RetentionPolicy(),
            taken=taken,
            lease=lease,
            scratch=self.scratch,
        )

    def _bring(self) -> None:
        instead = f"unset {REMOTE_VARIABLE}"
        if self.scratch is not None:
            instead = "use another checkpoint directory"
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
            raise errors.CheckpointCorruptedError(
                f"no commit in {self.store.uri} is intact ({found}). Put the objects "
                "back from a copy. To start from scratch, move the objects away or "
                f"{instead}"
            )
        for problem in lost:
            _log.warning("%s; this checkpoint is skipped", problem.rstrip("."))

    @contextlib.contextmanager
    def _settling(self) -> Iterator[Files | None]:
        """Context manager: lets `import_commit.settle` change the directory.

        A worker other than the chief holds the lease of its scratch directory inside
        the context. If the lease is held by another process, the chief is on this
        machine and uses the same scratch directory.

        Yields:
            The file operations for `settle`; None if the worker must not change the
            directory.
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
        """Context manager: lets only one worker of a directory import at a time.

        The other workers wait for the lock, and then find the imported commit.
        """
        path = os.path.join(self.directory, layout.FETCH_LOCK)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os_errors.translated("lock a file", self.directory):
            descriptor = acquire(path, fcntl.LOCK_EX, _FETCH_SECONDS, flags)
        try:
            yield
        finally:
            os.close(descriptor)

    def _record(self, fault: Fault) -> None:
        """Does nothing: the mirror logs errors, and the program has no journal."""

    def _end(self) -> None:
        """Waits for the upload of the last commit; called when the program ends."""
        if self._process != os.getpid() or not self.mirror.is_open:
            return
        if not self.mirror.wait(None if self.scratch else self.seconds):
            self.mirror.finish(0.0)  # logs the missing commits
        self.mirror.close()
