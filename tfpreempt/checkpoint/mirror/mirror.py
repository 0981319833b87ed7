"""Uploads the commits of a directory to an object store, in the background of training.

A thread of the chief uploads the newest commit missing from the store (`upload.py`).
The thread then deletes commits beyond the number to keep, and incomplete folders of
crashed uploads. A failed upload is logged once and retried, with growing pauses; its
error never interrupts training. `finish` is called when the machine is about to be
preempted: the newest commit is uploaded first, and no wait exceeds the time left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.object_store_lease import ObjectStoreLease
from tfpreempt.checkpoint.mirror import upload
from tfpreempt.checkpoint.mirror.journal_mirror import JournalMirror
from tfpreempt.checkpoint.mirror.mirror_retention import Naming, Retention, delete
from tfpreempt.checkpoint.mirror.mirror_status import (
    MirrorStatus,
    RetryState,
    log_finished,
    log_waiting,
)
from tfpreempt.checkpoint.mirror.store_selection import Scratch
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.events import Fault
from tfpreempt.core.threads import ManagedThread
from tfpreempt.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)

LETTING_GO = 10.0  # seconds for a cancelled upload to end; see upload.py
HURRIED_PAUSE = 0.5  # seconds between attempts while the machine is being preempted
SILENT = 2.0  # `wait` logs a message after so many seconds


_in_use: weakref.WeakValueDictionary[str, Mirror] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The directory that a mirror uploads. `Mirror.begin` describes the fields."""

    directory: str = ""
    record: Callable[[], Callable[[Fault], None] | None] = lambda: None
    journals: JournalMirror | None = None


class Mirror:
    """Mirror of a checkpoint directory, with an upload thread.

    Methods may be called on any thread.

    Args:
        store: object store that receives the commits.
        policy: the rules by which commits stay in the store.
        taken: highest sequence number known to be in the store; updated by `look`.
        lease: lease of the object store, acquired by the first `look`; None on workers
            that only read.
        scratch: scratch directory, if the checkpoint directory is a URL. The local
            commits are then a cache of the mirror, and a run cannot start without the
            lease.

    Attributes:
        scratch: the scratch directory; None if the checkpoint directory is not a URL.
        store: the object store.
        lease: the lease of the object store; None on workers that only read.
        status: current progress of the mirror.
    """

    def __init__(
        self,
        store: ObjectStore,
        policy: RetentionPolicy,
        *,
        taken: int = 0,
        lease: Lease | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.store = store
        self.lease = lease
        self.scratch = scratch
        self._lease_backend = ObjectStoreLease(store)
        self._source = _Source()
        self._retention = Retention(store, policy, taken)
        self._changed = threading.Condition()
        self.status = MirrorStatus(uri=store.uri)
        self._pending: list[Entry] = []  # commits to upload, oldest first
        # Functions added by `enqueue`, oldest first.
        self._tasks: list[Callable[[], None]] = []
        self._upload: upload.Upload | None = None  # the upload in progress
        self._newest: Entry | None = None
        self._is_hurried = False
        self._is_let_go = False  # True between `release` and `resume`
        self._tries = RetryState(SystemClock())
        self._thread = ManagedThread("tfpreempt-mirror", self._run)

    # --- what the owner calls --------------------------------------------------------

    def look(self, timeout: float | None = None) -> list[Entry]:
        """Acquires the lease (unless `lease` is None), and lists the commits.

        The store is listed again after the acquisition, because no other program can
        add a commit while this process holds the lease. If an error prevents the
        acquisition, a warning is logged, and the first upload tries again; for a
        scratch directory, the error is raised.

        Args:
            timeout: timeout of each listing in seconds; None uses the store's own.

        Returns:
            The commits in the store, highest sequence number first; their manifests are
            not read.

        Raises:
            DirectoryLockedError: another program uploads to this store.
            CheckpointError: the store cannot be listed.
            SaveError: the lease cannot be acquired, and the directory is a scratch
                directory.
        """
        # List first, so that an unreachable store fails before the lease is acquired.
        copies = self._retention.look(timeout)
        if self.lease is not None and self.lease.token is None:
            try:
                self.lease.acquire(self._lease_backend)
            # A start needs no lease, only a readable store.
            except errors.SaveError as error:
                if self.scratch is not None:
                    raise
                _log.warning(
                    "could not acquire the lease of the mirror %s: %s. Training "
                    "continues; the first upload retries this",
                    self.store.uri,
                    error,
                )
            copies = self._retention.look(timeout)
            self.lease.head.follow(copies, self.lease)
        return copies

    def begin(
        self,
        directory: str,
        newest: Entry | None,
        record: Callable[[Fault], None],
        journal: Path | None = None,
    ) -> None:
        """Starts the upload thread.

        Args:
            directory: the checkpoint directory. If another mirror of the directory is
                still open in this process, that mirror is closed: a notebook catches
                SystemExit, so handlers stay open.
            newest: newest local commit, which the last run may not have uploaded; None
                without a local commit.
            record: method that records new errors in the journal; referenced weakly.
            journal: directory with the journals, which are uploaded too; None without
                journals.

        Raises:
            ConfigurationError: an open handler of a different directory uploads to this
                store.
        """
        other = _in_use.get(self.store.uri)
        if other is not None and other._source.directory != directory:
            raise errors.ConfigurationError(
                f"Two open handlers of this process, in {other._source.directory!r} "
                f"and {directory!r}, have the same mirror_dir={self.store.uri!r}; "
                "expected a separate mirror_dir for each handler. Pass different "
                "values, or close the first handler before."
            )
        if other is not None:
            other.close()
        _in_use[self.store.uri] = self
        journals = None if journal is None else JournalMirror(self.store, journal)
        self._source = _Source(
            directory=directory, record=weakref.WeakMethod(record), journals=journals
        )
        if journals is not None:
            journals.start()
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads, or Python is exiting
            self._fault(error, "and no commit of this process is uploaded")
        if newest is not None:
            found: list[Entry] = []
            with contextlib.suppress(OSError):
                found = catalog.scan(directory)
            # The last run may not have uploaded older commits that a rule keeps.
            found = [e for e in found if e.is_committed and e.token != newest.token]
            with self._changed:
                self._pending += self._retention.keeps_older(found)[::-1]
                self.add(newest)

    @property
    def is_open(self) -> bool:
        """Whether this mirror was begun, and neither stopped nor replaced since."""
        return _in_use.get(self.store.uri) is self

    @property
    def highest_sequence(self) -> int:
        """Highest sequence number seen in the store; new commits get higher numbers."""
        return self._retention.highest_sequence

    def is_pinned(self, path: str) -> bool:
        """Returns whether retention must not delete a local commit.

        A commit is pinned during its upload. In a scratch directory, a commit that the
        mirror will keep is also pinned before its upload: the newest commit always, an
        older commit only while the disk has room.
        """
        under_way = self._upload
        if under_way is not None and under_way.commit.path == path:
            return True
        newest, pending = self._newest, list(self._pending)
        if self.scratch is None or not any(
            each.path == path and self._retention.keeps(each, newest, pending)
            for each in pending
        ):
            return False
        if newest is not None and newest.path == path:
            return True
        uploading = under_way and under_way.commit
        is_kept = self.scratch.has_room_for(
            path,
            [each for each in pending if each is not uploading],
            max(each.size or 0 for each in pending),
        )
        if not is_kept:
            _log.warning(
                "%s is deleted before its upload to %s, because the disk has no space "
                "for two more commits. A newer commit is uploaded",
                path,
                self.store.uri,
            )
        return is_kept

    def add(self, entry: Entry) -> None:
        """Queues the newest local commit for upload; ignores an incomplete commit."""
        if not entry.is_committed:
            return
        with self._changed:
            self.resume()
            self._newest = entry
            self._pending.append(entry)
            if self._is_hurried:
                self.shorten_waits()
            self._update_status(latest_step=entry.step, is_complete=False)

    def enqueue(self, what: Callable[[], None]) -> None:
        """Queues a function that deletes objects from the store.

        The upload thread calls the function once, between two uploads. An error of the
        function is logged.
        """
        with self._changed:
            self._tasks.append(what)
            self._changed.notify_all()

    def forget(self, path: str) -> None:
        """Cancels the upload of a local commit that the user is about to delete.

        Waits for the end of an upload in progress, at most `LETTING_GO` seconds.
        """
        with self._changed:
            self._pending = [each for each in self._pending if each.path != path]
            self._update_status()
            if self._newest is not None and self._newest.path == path:
                self._newest = max(self._pending, key=catalog.rank, default=None)
                step = None if self._newest is None else self._newest.step
                self._update_status(latest_step=step, is_complete=self._newest is None)
            ended = self._upload
            if ended is not None and ended.commit.path == path:
                ended.cancel()  # otherwise the upload would write to a deleted folder
                self._changed.wait_for(lambda: self._upload is not ended, LETTING_GO)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every commit is uploaded, and old commits are deleted.

        Args:
            timeout: longest wait in seconds; None waits as long as uploads make
                progress, see `RetryState`.

        Returns:
            Whether the newest commit is in the store.
        """
        with self._changed:
            began = time.monotonic()
            self.resume()
            self._tries.reset_stall_timer()
            self._tries.is_awaited = timeout is None
            is_logged = False
            self._changed.notify_all()
            while self._pending or self._tasks or self._retention.is_naming_due:
                now = time.monotonic()
                end = self._tries.stall_deadline if timeout is None else began + timeout
                if now >= end or not self._thread.is_alive() or self._is_hurried:
                    break
                if not is_logged and now >= began + SILENT:
                    is_logged = True
                    log_waiting(self.status, self._tries.stall_timeout, timeout)
                self._changed.wait(min(end - now, SILENT))
            return self.status.is_complete

    def shorten_waits(self) -> None:
        """Makes every `wait` return at once, and uploads the newest commit first.

        Called at once when the machine is about to be preempted. `finish` is called
        later, for the mirrors of several handlers one after the other.
        """
        with self._changed:
            self._is_hurried = True
            under_way = self._upload
            is_older = under_way is not None and under_way.commit is not self._newest
            if under_way is not None and is_older and self._is_newest_pending():
                under_way.cancel()
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        """Uploads the newest commit first, since the machine is about to be preempted.

        Args:
            seconds: time left for the upload.

        Returns:
            Whether the newest commit is in the store; also logged.
        """
        end = time.monotonic() + seconds
        with self._changed:
            self.resume()
            if self._retention.naming is Naming.LATE:
                self._retention.naming = Naming.DUE
            self.shorten_waits()
            while self._is_newest_pending() or self._retention.is_naming_due:
                left = end - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    break
                self._changed.wait(left)
            self._is_hurried = False
            status = self.status
        log_finished(status, self._source.directory)
        return status.is_complete

    def hand_in_journal(self, seconds: float) -> None:
        """Uploads the last records of the journals, unless the last upload failed.

        Args:
            seconds: longest duration of the upload.
        """
        journals = self._source.journals
        if journals is not None and self.status.last_error is None:
            journals.put_within(seconds)

    def delete(self, path: str, entry: Entry | None) -> bool:
        """Deletes a commit from the store.

        Args:
            path: path of the commit in the checkpoint directory, or in the store (the
                path of the user's `Checkpoint`).
            entry: the local commit; None if the local commit is deleted already.

        Returns:
            True if a commit was deleted, or if the path is a path in this store.

        Raises:
            CheckpointError: the store failed.
            LeaseLostError: another program has the lease of the store.
        """
        if entry is not None:
            self.forget(entry.path)
        holder, _, name = path.rstrip("/").rpartition("/")
        meant = []
        for copy in catalog.copies(self.store):
            if entry is not None:
                is_meant = copy.token == entry.token
            elif holder == self.store.uri:
                is_meant = copy.name == name
            else:
                is_meant = holder == self._source.directory and _is_gone(
                    copy, holder, name
                )
            meant += [copy] if is_meant else []
        if meant and self.scratch is not None:
            self.scratch.note_deletion(self.store, meant)
        if meant:
            if self.lease is not None:
                self.lease.check()
            self._retention.name_newest(but={copy.name for copy in meant})
        for copy in meant:
            delete(copy)
        return bool(meant) or holder == self.store.uri

    def stop(self) -> None:
        """Tells the upload thread to end. The next run completes an interrupted upload.

        From now on a new `Mirror` of this process may upload to the store.
        """
        if self.is_open:
            del _in_use[self.store.uri]
        if self._source.journals is not None:
            self._source.journals.stop()
        with self._changed:
            self._thread.stop_event.set()
            if self._upload is not None:
                self._upload.cancel()
            self._changed.notify_all()

    def close(self) -> None:
        """Stops the thread, waits at most 1 s for its end, and releases the lease."""
        self.stop()
        self._thread.join(1.0)
        self.release()

    def release(self) -> None:
        """Pauses uploads until `resume`, and releases the lease.

        Another program can then take the lease of the store.
        """
        with self._changed:
            self._is_let_go = True
            if self._upload is not None:
                self._upload.cancel()
        if self.lease is not None:
            self.lease.release()

    def resume(self) -> None:
        """Continues uploads after `release`. The next upload acquires the lease
        again."""
        with self._changed:
            self._is_let_go = False
            self._changed.notify_all()

    def record_pending_marker(self, folder: str) -> None:
        """Records in the lease that the marker of a folder is about to be written.

        If this process is interrupted, the next holder of the lease writes the marker.
        Acquires the lease if necessary. Called on the upload thread, or before that
        thread starts.

        Args:
            folder: name of the commit's folder, complete except for the marker.

        Raises:
            UploadCancelledError: `release` was called.
            LeaseLostError: another program holds the lease, or has held the lease since
                this process acquired it.
            CheckpointError: the store failed.
        """
        if self.lease is None:
            return
        token = self._hold(self.lease)
        if self.scratch is not None:
            self.scratch.note_upload(catalog.unread_entry(self.store, folder))
        self._lease_backend.record_pending_marker(token, folder)
        if self._hold(self.lease) != token:
            raise errors.SaveError(f"the lease of {self.store.uri} has changed")

    def _hold(self, lease: Lease) -> str:
        before = lease.token
        # This call takes the lease only if the start of the run could not reach the
        # store.
        lease.acquire(self._lease_backend)
        lease.check()
        if self._is_let_go:  # `release` was called during `acquire`
            lease.release()
            raise upload.UploadCancelledError
        token = lease.token
        if token is None:  # the lease was lost since `check`
            raise errors.LeaseLostError(f"the lease of {self.store.uri} is lost")
        if token != before:
            found = catalog.commits(self.store, lambda problem: None)
            lease.head.follow(found, lease)
        return token

    # --- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (act := self._next()) is not None:
            fault = None
            try:
                act()
            except upload.UploadCancelledError:
                pass  # the commit stays queued, unless `forget` has removed it
            except Exception as error:  # noqa: BLE001 - training continues
                fault = error
            with self._changed:  # after an error, too: a task is not retried
                self._tasks = [task for task in self._tasks if task is not act]
            if fault is not None:
                self._fault(fault)
                self._back_off()

    def _next(self) -> Callable[[], None] | None:
        """Waits for the next job of the upload thread, and returns the job.

        Returns None if the thread must end. A job is the write of TensorFlow's state
        file, a task of `enqueue`, or the upload of the newest commit. Uploads come
        last: if commits were made faster than uploaded, tasks behind uploads would
        never run. After `shorten_waits` the upload of the newest commit comes first.
        """
        with self._changed:
            while not self._thread.stop_event.is_set():
                if self._is_let_go:
                    self._changed.wait(3600.0)
                    continue
                is_newest_first = self._is_hurried and self._is_newest_pending()
                if self._retention.is_naming_due and not is_newest_first:
                    return self._name_newest
                if self._tasks and not is_newest_first:
                    return self._tasks[0]
                if self._pending:
                    newest = self._pending[-1]
                    self._upload = upload.Upload(
                        self.store,
                        newest,
                        on_bytes=self._sent,
                        before_marker=self.record_pending_marker,
                    )
                    return functools.partial(self._copy, self._upload)
                self._changed.notify_all()
                is_late = self._retention.naming is Naming.LATE
                pause = self._tries.next_pause() if is_late else 3600.0
                if not self._changed.wait(pause) and is_late:
                    self._retention.naming = Naming.DUE
            return None

    def _name_newest(self) -> None:
        """Writes TensorFlow's state file, then queues the deletion of old commits."""
        lease, is_named = self.lease, False
        try:
            is_named = self._retention.try_to_name_newest(
                lambda: lease is None or self._hold(lease)
            )
        finally:
            with self._changed:
                self._retention.naming = Naming.DONE if is_named else Naming.LATE
                if is_named:
                    self._tasks.append(self._retention.run)
                self._changed.notify_all()

    def _copy(self, under_way: upload.Upload) -> None:
        entry, dropped = under_way.commit, None
        try:
            if self._retention.outranks(entry):
                # The store could not be listed at the start of the run, so the run's
                # sequence numbers may be lower than the numbers in the store.
                # Retention would delete such a commit at once.
                _log.warning(
                    "step %d is not uploaded to %s, which has newer commits that this "
                    "run did not know at its start; the next commit is uploaded",
                    entry.step,
                    self.store.uri,
                )
                raise upload.CommitGoneError(
                    f"the mirror has newer commits than {entry.path}"
                )
            self._update_status(uploading=entry.step or 0, total_bytes=entry.size or 0)
            under_way.run()
            self._note_copied(entry)
        except (upload.CommitGoneError, upload.CommitCorruptError) as error:
            if isinstance(error, upload.CommitCorruptError):
                self._fault(error, "and this commit is not uploaded")
            _log.info("a commit is not uploaded to the mirror: %s", error)
            dropped = entry
        finally:
            with self._changed:
                self._upload = None
                if dropped is not None:
                    self._pending = [e for e in self._pending if e is not dropped]
                    self._update_status(skipped=self.status.skipped + 1)
                self._update_status(uploading=None, sent_bytes=0, total_bytes=0)

    def _note_copied(self, entry: Entry) -> None:
        step = entry.step or 0
        # Tell the head of the lease that the commit belongs to this run: the last run
        # may have made it.
        if self.lease is not None:
            self.lease.head.follow([entry], self.lease)
        _log.info("checkpoint for step %d uploaded to %s", step, self.store.uri)
        if self.scratch is not None:
            self.scratch.note_copied(entry)
        with self._changed:
            if self.status.last_error is not None:
                _log.info("the uploads to %s succeed again", self.store.uri)
            self._tries.succeeded()
            self._retention.naming = Naming.DUE
            self._pending = [each for each in self._pending if each is not entry]
            is_newest = entry is self._newest
            mirrored = max(step, self.status.mirrored_step or 0)
            self._update_status(
                mirrored_step=step if is_newest else mirrored,
                is_complete=is_newest or self.status.is_complete,
                last_error=None,
            )

    def _sent(self, count: int) -> None:
        with self._changed:
            sent = self.status.sent_bytes + count
            self._update_status(sent_bytes=sent)
            if self._upload is not None:
                self._tries.sent(self._upload.commit, sent)

    def _fault(self, error: Exception, then: str = "and is retried") -> None:
        text = f"{type(error).__name__}: {error}"
        with self._changed:
            before = self.status.last_error
            self._tries.failed(error)
            self._update_status(
                last_error=text, error_count=self.status.error_count + 1
            )
        if before is not None and before.split(":")[0] == type(error).__name__:
            return  # the failure is already logged
        _log.warning(
            "upload to %s failed %s. Training continues: %s",
            self.store.uri,
            then,
            text,
        )
        if (record := self._source.record()) is not None:
            record(Fault(where="mirror", error=text))

    def _back_off(self) -> None:
        """Pauses after a failed attempt; the pause is shorter after `shorten_waits`."""
        began, pause = time.monotonic(), self._tries.next_pause()
        with self._changed:
            while not (self._thread.stop_event.is_set() or self._tries.is_awaited):
                longest = min(pause, HURRIED_PAUSE) if self._is_hurried else pause
                left = began + longest - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)
            # A call of `wait` ends one pause, not all later pauses.
            self._tries.is_awaited = False

    def _is_newest_pending(self) -> bool:
        return any(each is self._newest for each in self._pending)

    def _update_status(self, **changes: object) -> None:
        with self._changed:
            changes["pending"] = len(self._pending)
            self.status = dataclasses.replace(self.status, **changes)  # type: ignore[arg-type]  # names of its fields
            self._changed.notify_all()


def _is_gone(copy: Entry, directory: str, name: str) -> bool:
    """Returns whether a commit in the store is the copy of a deleted local commit.

    Args:
        copy: commit in the store.
        directory: the checkpoint directory.
        name: name that the deleted commit had in the directory.
    """
    if name not in (f"{copy.step}", f"{copy.step}.{copy.sequence}"):
        return False
    return all(each.token != copy.token for each in catalog.scan(directory))
