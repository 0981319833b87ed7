"""`Save` writes a commit, on each worker, in four phases; `AsyncSave` in a thread.

    capture   every worker, main thread   writes TensorFlow's small files and the States
    write     every worker, any thread    writes large tensors and States; syncs files
    publish   the chief, any thread       manifest, rename, marker, retention
    discard   the chief, any thread       deletes the staged files; never raises

Files are written to a staging directory. The chief calls `publish` once every worker
has written its files, or `discard` after a failure. The marker makes the save a commit:
a save that fails before the marker is written commits nothing, and its staged files are
deleted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, flat_commit, layout, retention
from tfpreempt.checkpoint.directory import commit as committing
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.directory.head import newest, this_process
from tfpreempt.checkpoint.directory.manifest import Manifest, Parent
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.state.contents import StagedSave
from tfpreempt.checkpoint.state.state import (
    Capture,
    State,
    WorkerSteps,
    sync_states,
    write_captured,
    write_states,
)
from tfpreempt.core import events
from tfpreempt.core.threads import ManagedThread
from tfpreempt.storage import file_reading, os_errors

_log = logging.getLogger(__name__)

_MANY = 10  # commits of a run after which a metric that never appeared is reported


class Save(StagedSave):
    """One save, on one worker. `capture`, `write`, `publish`, `discard` are its phases.

    Args:
        directory: the checkpoint directory to save in.
        step: number of steps that this worker has completed. The chief's number is the
            step of the commit.
        attempt: name of the save; equal on all workers, and never used again.
        cancel_token: token by which another thread can cancel an asynchronous save.
            None for a synchronous save: tensors are not copied, and must not change
            before the end of `write`.

    Attributes:
        made: the commit; None before the end of `publish`.
    """

    def __init__(
        self,
        directory: Directory,
        step: int,
        attempt: str,
        cancel_token: CancellationToken | None = None,
    ) -> None:
        super().__init__(
            step=step,
            attempt=attempt,
            staging=layout.staging_directory(directory.path, attempt),
            started_at=directory.clock.monotonic(),
            cancel_token=cancel_token,
            number=step,
        )
        self.directory = directory
        worker = layout.worker_name(directory.cluster.worker)
        self._own_folder = os.path.join(self.staging, worker)
        # The intent of a flat checkpoint: a file that announces the save. Set before
        # TensorFlow writes files, because a failed write leaves incomplete files, which
        # `discard` finds by the intent.
        self._intent: flat_commit.Intent | None = None
        self._needs_every_worker = False
        # States whose files `write` writes, in an asynchronous save.
        self._captured: list[tuple[State, str, Capture]] = []
        self._metadata = directory.metadata  # metadata of the captured step
        self.made: Entry | None = None

    # --- the phases ------------------------------------------------------------------

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Captures the current state of this worker.

        Called on every worker, on the main thread. Small values and the States are
        written at once, but not synced. In an asynchronous save, a State may be copied
        instead, and is written by `write`.

        Args:
            *args: arguments for CheckpointManager.save, or the save_fn.
            **kwargs: arguments for CheckpointManager.save, or the save_fn.

        Raises:
            SaveError: the disk failed; the message has advice.
        """
        directory = self.directory
        states = directory.registry.in_order()
        captured = self._captured if self.is_async else None
        self._needs_every_worker = directory.needs_parts()
        with self._discarded_on_failure("save"):
            try:
                directory.contents.capture(self, *args, **kwargs)
            finally:  # also after a failure: the other workers wait in `sync_states`
                sync_states(states)
            directory.identity.check()
            if directory.cluster.is_chief:
                replicated = [state for state in states if not state.per_worker]
                folder = os.path.join(self.staging, layout.STATES)
                write_states(folder, replicated, directory.path, captured)
            own = [*directory.contents.states]
            if directory.random_state is not None:
                own.append(directory.random_state)
                if directory.cluster.num_workers > 1:
                    own.append(WorkerSteps(self.step))
            own += [state for state in states if state.per_worker]
            write_states(self._own_folder, own, directory.path, captured)
        self.capture_seconds = directory.clock.monotonic() - self.started_at

    @property
    def captured_bytes(self) -> int:
        """Bytes of the captured tensors and States that are not written yet."""
        return sum(each.data.nbytes for each in self.tensors) + sum(
            capture.size for _, _, capture in self._captured
        )

    def write(self) -> None:
        """Writes the captured tensors and States, and syncs the files.

        Called on any thread.

        Raises:
            SaveError: the disk failed; the message has advice.
        """
        directory = self.directory
        began = directory.clock.monotonic()
        with self._discarded_on_failure("save"):
            directory.contents.write(self)
            if self.cancel_token is not None:
                write_captured(directory.files, self._captured, self.cancel_token.check)
            # Sync here: the chief cannot sync files that are cached on this machine.
            is_chief, own = directory.cluster.is_chief, self._own_folder
            if not is_chief and (names := file_reading.names(own)):
                for name in names:
                    directory.files.sync_file(os.path.join(own, name))
                directory.files.sync_dir(own)
            if directory.exchange is not None:
                directory.exchange.send(self)
        if self.is_dealt:
            self.share_seconds = directory.clock.monotonic() - began

    def publish(
        self,
        because: str,
        workers: Sequence[int],
        parent: Parent | None = None,
        left: Callable[[], float] = lambda: math.inf,
    ) -> events.Commit | None:
        """Makes the save the newest commit; called on the chief, on any thread.

        Args:
            because: reason of the save, see `Manifest`.
            workers: indices of the workers that have written their files; the files of
                other workers are excluded from the commit.
            parent: for a snapshot, the newest commit of the checkpoint directory; None:
                the newest commit of this directory.
            left: function that returns the seconds until the commit must be made
                because of a preemption.

        Returns:
            The commit; None if save_fn or the manager wrote no checkpoint.

        Raises:
            SaveError: the commit failed; older commits are unchanged.
        """
        directory = self.directory
        if not directory.cluster.is_chief:
            worker = directory.cluster.worker
            raise errors.UsageError(
                f"Worker {worker} called commit; expected a call on worker 0, the only "
                "worker that can commit."
            )
        if self.is_empty:
            _log.warning(
                "no commit at step %d: save_fn returned None (expected the path of the "
                "checkpoint), or the checkpoint_interval of the CheckpointManager has "
                "not passed.",
                self.step,
            )
            self.discard()
            return None
        with self._discarded_on_failure("commit"):
            if directory.exchange is not None:
                workers = directory.exchange.collect(self, workers, because, left)
            if directory.lease is not None:
                # Another run that took the lease may have deleted the staged files.
                directory.lease.check()
            directory.identity.check()
            if self.cancel_token is not None:
                self.cancel_token.check()
            present = self._keep_parts_of(workers)
            if self.is_dealt:
                directory.contents.complete(self, workers)
            self.made = self._commit(because, present, parent)
        took = directory.clock.monotonic() - self.started_at
        self._clear_up(workers)
        if directory.mirror is not None:
            directory.mirror.add(self.made)
        manifest = self.made.manifest
        assert manifest is not None
        return events.Commit(
            step=manifest.step,
            path=self.made.path,
            sequence=manifest.sequence,
            world_size=manifest.world_size,
            save_seconds=took,
            bytes=manifest.bytes,
            because=manifest.because,
            blocked_seconds=self.capture_seconds if self.is_async else took,
        )

    def discard(self) -> None:
        """Deletes the files of a save that will not be committed.

        Called on the chief. An error is only logged.
        """
        directory = self.directory
        try:
            retention.delete_staging(directory.files, self.staging)
            self._clear_up(finished=(directory.cluster.worker,))
            intent, self._intent = self._intent, None
            if intent is None and self.prefix is not None:
                intent = flat_commit.intent_of(self.attempt, self.prefix)
            if intent is not None and directory.identity.is_same():
                flat_commit.abandon(directory.files, intent)
        except (OSError, errors.CheckpointError) as error:
            _log.warning(retention.LEFT_BEHIND, self.staging, error)

    # --- details ---------------------------------------------------------------------

    def create_staging(self, prefix: str | None = None) -> None:
        directory = self.directory
        directory.identity.check()
        if directory.cluster.is_chief:
            # A slow worker may have written its share of an earlier save too late. The
            # shares of later saves stay: other workers do not wait for the chief.
            for earlier in directory.ended_saves:
                self._delete_shares(earlier)
            directory.files.make_dirs(self.staging)
        if prefix is not None:
            self._intent = flat_commit.intent_of(self.attempt, prefix)
            flat_commit.write_intent(directory.files, self._intent)

    @contextlib.contextmanager
    def _discarded_on_failure(self, doing: str) -> Iterator[None]:
        """Returns a context that discards the save if the body raises an error.

        So the files of failed saves do not fill the disk. An OSError of the body
        becomes a SaveError.

        Args:
            doing: verb for the error message, such as "commit".
        """
        directory = self.directory
        try:
            with os_errors.translated(f"{doing} step {self.step}", directory.path):
                yield
        except Exception:
            if directory.cluster.is_chief:
                self.discard()
            with contextlib.suppress(OSError):
                # If the path leads to another directory now, the new directory is the
                # cause of the failure: `check` raises an error with this cause.
                directory.identity.check()
            raise

    def _clear_up(self, finished: Sequence[int]) -> None:
        """Deletes the files with the workers' shares of the tensors, after a save.

        The files are beside the staging directory, and in the object store if a worker
        has no access to the chief's disk.

        Args:
            finished: indices of the workers that have written their files. If another
                worker writes a file later, the next save deletes the file.
        """
        directory = self.directory
        self._delete_shares(self.staging)
        cluster = directory.cluster
        if not cluster.saves_all and len(set(finished)) < cluster.num_workers:
            directory.ended_saves.append(self.staging)
        if directory.exchange is not None and directory.mirror is not None:
            clear = functools.partial(directory.exchange.clear, self.attempt)
            directory.mirror.enqueue(clear)

    def _delete_shares(self, staging: str) -> None:
        """Deletes the workers' shares of a save beside its staging directory."""
        parts = staging + layout.PARTS_SUFFIX
        retention.try_delete_staging(self.directory.files, parts)

    def _keep_parts_of(self, workers: Collection[int]) -> list[int]:
        """Deletes the shards (folders with a worker's own values) of workers that have
        not written all their files.

        Args:
            workers: indices of the workers that have written their files.

        Returns:
            The workers of `workers` whose shards exist on the chief's disk. A warning
            names the workers whose shards are missing.

        Raises:
            SaveError: a State needs every worker's files, and some are missing.
        """
        directory, cluster = self.directory, self.directory.cluster
        complete = {layout.worker_name(worker): worker for worker in workers}
        names = file_reading.names(self.staging)
        for name in names:
            if name.startswith(layout.WORKER) and name not in complete:
                retention.delete_staging(
                    directory.files, os.path.join(self.staging, name)
                )
        present = list(workers)
        if directory.random_state is not None:  # every worker has saved a State
            present = [each for name, each in complete.items() if name in names]
        if lost := sorted(set(workers).difference(present)):
            _log.warning(
                "workers %s wrote their parts of this save, but worker 0 does not find "
                "these parts in %s, so the commit lacks these parts. Mount the same "
                "storage on all workers",
                lost,
                self.staging,
            )
        missing = sorted({*range(cluster.num_workers)}.difference(present))
        if missing and self._needs_every_worker and not cluster.saves_all:
            raise errors.SaveError(
                f"Step {self.step} cannot be committed: workers {missing} have not "
                "written their parts, and this commit needs the part of every worker "
                "(arrays are divided among all workers, or on_bad_step= was given). "
                "Restart all workers; they resume from the last commit."
            )
        return present

    def _commit(
        self, because: str, workers: Sequence[int], parent: Parent | None
    ) -> Entry:
        """Commits the staged files, then deletes old commits.

        Args:
            because: reason of the save, see `Manifest`.
            workers: indices of the workers whose shards are in the staging directory.
            parent: the commit to which the manifest refers as the commit before; None:
                the newest commit of the directory.

        Returns:
            The commit.
        """
        directory, policy = self.directory, self.directory.retention
        found = catalog.scan(directory.path)
        commits = [each for each in found if each.is_committed]
        directory.check_others(commits)
        intact = [each for each in commits if each.token not in directory.corrupt]
        step, metrics = self._metadata.get("metrics", (None, {}))
        metrics = metrics if step == self.step else {}
        # An unreadable commit may have a number above the highest readable number. So
        # skip one number for each unreadable commit.
        unread = sum(each.sequence is None for each in found)
        taken = catalog.highest_sequence(found) + unread
        taken = max(taken, directory.highest_sequence)
        mirror = directory.mirror
        if mirror is not None:
            taken = max(taken, mirror.highest_sequence)
        draft = Manifest(
            step=self.step,
            sequence=taken + 1,
            world_size=directory.cluster.num_workers,
            workers=tuple(sorted(set(workers))),
            files=(),
            because=because,
            versions=committing.versions(),
            parent=parent or newest(commits),
            metadata={
                "restart": self._metadata["restart"],
                "attempt": self.attempt,
                "process": this_process(),
                **retention.record(
                    policy,
                    intact,
                    self.step,
                    directory.clock.wall(),
                    metrics,
                ),
            },
        )
        is_flat = self.prefix is not None
        publish = flat_commit.publish if is_flat else committing.publish
        files = directory.files
        made = publish(files, directory.clock, directory.path, self, draft)
        directory.highest_sequence = made.sequence or 0
        directory.remember_head()
        with committing.tidying(directory.path):
            if is_flat:
                if directory.lease is not None:
                    # Check now: the manager deletes files without checking the lease.
                    directory.lease.check()
                directory.contents.committed()
                flat_commit.sweep(files, os.path.dirname(made.path))
                # Keep only the newest of the commits that were imported from a mirror;
                # the manager deletes its own checkpoints.
                newest_only = retention.RetentionPolicy(max_to_keep=1)
                for entry in retention.plan(found, newest_only)[1]:
                    retention.delete(files, entry)
            else:
                committing.finish(
                    files,
                    directory.path,
                    [made, *found],
                    policy,
                    directory.corrupt,
                    lambda each: mirror is not None and mirror.is_pinned(each),
                )
                if name := policy.best_by and policy.best_by[0]:
                    known = retention.metrics_of(draft)
                    manifests = (each.manifest for each in (made, *commits))
                    is_due = known or draft.sequence >= _MANY
                    if is_due and not retention.is_seen(name, manifests):
                        _warn_of_metric(directory.path, name, ", ".join(sorted(known)))
        return made


@functools.cache  # the cache limits the warning to one call
def _warn_of_metric(path: str, metric: str, known: str) -> None:
    _log.warning(
        "no commit in %s has a finite value of the metric %r of best_by=, so no commit "
        "stays as the best. The newest commit has the metrics: %s. A commit of a fit "
        "has the logs of an epoch if it is made at the end of the epoch "
        '(save_freq="epoch"); a commit of a handler has those of save(metrics=...)',
        path,
        metric,
        known or "none",
    )


class AsyncSave:
    """A thread that writes and commits an asynchronous save; starts at once.

    The object has no reference to the captured values, so that their memory is freed
    when the save is over.

    Args:
        name: name of the save; equal on all workers, and never used again.
        cancel_token: token of the save, by which `give_up` cancels the commit.
        complete: function that writes and commits the captured values; called on the
            new thread.
        on_error: function called with the error of a failed save, on the new thread;
            not called after `give_up`.
    """

    def __init__(
        self,
        name: str,
        cancel_token: CancellationToken,
        complete: Callable[[], object],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self._permit = cancel_token
        run = functools.partial(self._run, complete, on_error)
        self._thread = ManagedThread("tfpreempt-save", run)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the save is over; called on any thread.

        Args:
            seconds: timeout of the wait; None: no timeout.

        Returns:
            Whether the save is over.
        """
        return self._thread.join(seconds)

    def give_up(self) -> bool:
        """Cancels the commit. If the commit has begun, waits for its end.

        Returns:
            Whether the commit was cancelled.
        """
        if self._permit.cancel():
            return True
        self._thread.join()
        return False

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` has cancelled the commit."""
        return self._permit.is_cancelled

    def _run(
        self, complete: Callable[[], object], on_error: Callable[[Exception], None]
    ) -> None:
        try:
            complete()
        except Exception as error:  # noqa: BLE001 - training continues
            if not self.is_given_up:
                on_error(error)
