"""Saves a step in two phases, whatever form the checkpoint has.

On every worker `stage` captures its part, on the main thread, and writes it, there or
on another one; `commit` runs on the chief, once all are done.
What TensorFlow has to do with it sits behind `Payload` (writer.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, directory_identity, flat, layout, retention
from tfpreempt.checkpoint import commit as committing
from tfpreempt.checkpoint.catalog import Condition, Entry, Kind
from tfpreempt.checkpoint.directory_identity import DirectoryIdentity
from tfpreempt.checkpoint.head import Head, committed, newest, this_process
from tfpreempt.checkpoint.lease import Lease
from tfpreempt.checkpoint.loader import CheckpointLoader
from tfpreempt.checkpoint.manifest import Manifest, Parent
from tfpreempt.checkpoint.payload import Permit, Staged
from tfpreempt.checkpoint.state import sync_states, try_states, write_states
from tfpreempt.core import events
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.restarts import num_restarts
from tfpreempt.storage import failure, paths, reading

_log = logging.getLogger(__name__)

_LEFT_BEHIND = "tfpreempt: %s could not be removed; it only takes up room: %s"
_AWAITED = 8  # saves that are over, whose late shares are looked for
_heads: dict[tuple[str, str], Head] = {}  # where this process committed, by directory


class Copies(Protocol):
    """The copy of the directory in an object store; see `remote/`."""

    @property
    def highest_sequence(self) -> int:
        """The highest sequence that is taken there."""
        ...

    def is_pinned(self, path: str) -> bool:
        """Whether a local commit is being copied, and must not be deleted."""
        ...


@dataclasses.dataclass(eq=False)
class CheckpointSaver:
    """Saves checkpoints; build it with `writer.make_saver`.

    Args:
        loader: says what is saved, and where; finds and restores. What it finds damaged
            does not count as kept.
        copies: the copy of the directory; None without one.
        clock: for measured times.
        lease: of the directory, as `loader.files` has it; None where it has none.

    Attributes:
        directory: the checkpoint directory, the chief's for all workers.
    """

    loader: CheckpointLoader
    copies: Copies | None = None
    clock: Clock = dataclasses.field(default_factory=SystemClock)
    lease: Lease | None = None

    def __post_init__(self) -> None:
        keep = self.loader.max_to_keep
        if keep is not None and (type(keep) is not int or keep < 1):
            raise errors.ConfigurationError(
                f"max_to_keep must be None (keep all) or 1 or more; got {keep!r}."
            )
        self.directory = self.loader.directory
        self._payload = self.loader.payload
        self._is_chief = self.loader.cluster.is_chief
        self._files = self.loader.files
        with failure.translated("look at the checkpoints", self.directory):
            self._identity = DirectoryIdentity(self.directory)
        # Of the flat saves that are not over, by staging directory.
        self._intents: dict[str, flat.Intent] = {}
        # The newest saves that are over, and of which other workers may write shares.
        self._awaited: collections.deque[str] = collections.deque(maxlen=_AWAITED)
        self._restart = num_restarts()  # read now: a save must not fail on it

    # --- saving ----------------------------------------------------------------------

    def start(self, *, is_sole: bool = True) -> None:
        """Removes saves that never committed; before the first save of this process.

        A failure is logged: leftovers cost space, never correctness.

        Args:
            is_sole: see `retention.clean`.
        """
        try:
            for path in retention.clean(
                self._files, self.directory, self.clock, is_sole=is_sole
            ):
                _log.info("Removed %s, left by a save that never committed", path)
        except OSError as error:
            _log.warning(
                "tfpreempt: what unfinished saves left in %s could not be removed; it "
                "only takes up room: %s",
                self.directory,
                error,
            )
        try:
            flat.settle(self._files, self.directory)
            directory_identity.write_token(self._files, self.directory)
            self._identity = DirectoryIdentity(self.directory)
        except OSError as error:
            _log.warning(
                "tfpreempt: the checkpoint directory %s could not be prepared; the "
                "next save tries again: %s",
                self.directory,
                error,
            )

    def check_others(self, found: Iterable[Entry]) -> None:
        """Refuses to go on where another run committed while this one let go.

        Args:
            found: what is in the directory now.

        Raises:
            LeaseLostError: it did; this process's steps are not to be mixed with its.
        """
        if self.lease is not None:
            self.lease.head.follow(committed(found), self.lease)

    def check_nothing_came(self) -> None:
        """Refuses to begin where another run committed after this process had done so.

        Between two handlers of one program nobody holds the lease of the directory.
        What the program keeps outside of its checkpoints is of a step that is not the
        other run's. Main thread of the chief.

        Raises:
            DirectoryInUseError: it did.
            SaveError: the disk.
        """
        head = _heads.get(self._key)
        if head is None:
            return
        with failure.translated("read the last commit", self.directory):
            found = catalog.scan(self.directory)
        if head.has_moved(committed(found)):
            raise errors.DirectoryInUseError(
                f"another program has committed in {self.directory!r} since this "
                "process closed its handler there; to go on from that in this process "
                "would mix two runs. Start this program again (in a notebook: restart "
                "the kernel) once that one has ended, or give it a directory of its own"
            )

    @property
    def _key(self) -> tuple[str, str]:
        return this_process(), os.path.realpath(self.directory)

    def needs_peers(self) -> bool:
        """Whether `stage` needs all workers at once; main thread."""
        return self.loader.cluster.world > 1 and self._payload.needs_peers()

    @property
    def can_be_async(self) -> bool:
        """Whether a save can be asynchronous."""
        return self._payload.can_be_async

    def try_states(self) -> None:
        """Warns of named States that this worker could not save; main thread."""
        states, is_chief = self.loader.registry.in_order(), self._is_chief
        try_states(each for each in states if each.per_worker or is_chief)

    def stage(self, step: int, attempt: str, *args: Any, **kwargs: Any) -> Staged:
        """Writes this worker's part of a save; on every worker, main thread.

        Args:
            step: see `capture`.
            attempt: see `capture`.
            *args: see `capture`.
            **kwargs: see `capture`.

        Raises:
            SaveError: the disk; says what to do.
        """
        return self.write(self.capture(step, attempt, None, *args, **kwargs))

    def capture(
        self,
        step: int,
        attempt: str,
        permit: Permit | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Staged:
        """Takes this worker's part of a save as it is now.

        On every worker, main thread. What is small is written already, and not synced;
        so are the States.

        Args:
            step: the step that is saved, equal on all workers.
            attempt: equal on all workers of this save and unique to it.
            permit: of an asynchronous save. With None nothing is copied, and nothing
                may change before `write` was called.
            *args: for CheckpointManager.save, or the save_fn.
            **kwargs: for CheckpointManager.save, or the save_fn.

        Raises:
            SaveError: the disk; says what to do.
        """
        directory = layout.staging_directory(self.directory, attempt)
        save = Staged(
            step=step,
            attempt=attempt,
            directory=directory,
            started_at=self.clock.monotonic(),
            number=step,
            permit=permit,
        )
        with self._saving(save):
            prepare = functools.partial(self._prepare, directory)
            try:
                save = self._payload.write(save, prepare, *args, **kwargs)
            finally:  # the others wait for this worker there, also where it failed
                sync_states(self.loader.registry.in_order())
            self._write_states(directory)
        took = self.clock.monotonic() - save.started_at
        return dataclasses.replace(save, capture_seconds=took)

    def write(self, captured: Staged) -> Staged:
        """Writes what was captured: from here on it is durable. Any thread.

        Args:
            captured: what `capture` returned.

        Raises:
            SaveError: the disk; says what to do.
        """
        began = self.clock.monotonic()
        with self._saving(captured):
            staged = self._payload.write_tensors(captured)
            if not self._is_chief:
                self._sync_own(staged.directory)
        if staged.is_dealt:
            took = self.clock.monotonic() - began
            staged = dataclasses.replace(staged, share_seconds=took)
        return staged

    @contextlib.contextmanager
    def _saving(self, save: Staged) -> Iterator[None]:
        with (
            self._undone_on_failure(save),
            failure.translated(f"save step {save.step}", self.directory),
        ):
            yield

    def take_part(self) -> None:
        """Does what others need of this worker in a save, where it saves nothing."""
        try:
            self._payload.take_part()
        finally:
            sync_states(self.loader.registry.in_order())

    def free_copies(self) -> None:
        """Keeps no memory for the next asynchronous save; any thread."""
        self._payload.free_copies()

    def held_bytes(self) -> int:
        """About how much there is to save; main thread."""
        return self._payload.held_bytes()

    def commit(
        self,
        staged: Staged,
        because: str,
        workers: Sequence[int],
        parent: Parent | None = None,
    ) -> events.Commit | None:
        """Makes a staged save the newest commit; on the chief.

        Args:
            staged: what this worker's `stage` returned.
            because: "preemption", "periodic" or "save".
            workers: indices of the workers that are known to have staged; shards of
                others are left out.
            parent: for a snapshot, the newest commit of the checkpoint directory.

        Returns:
            The commit; None if a save_fn left nothing to commit.

        Raises:
            SaveError: nothing was committed, and nothing older was touched.
        """
        if not self._is_chief:
            worker = self.loader.cluster.worker
            raise errors.UsageError(
                f"Worker {worker} cannot commit; only worker 0 can."
            )
        if staged.is_empty:
            _log.warning(
                "Nothing to commit at step %d: save_fn returned None (return the path "
                "that it wrote), or the manager's checkpoint_interval said no.",
                staged.step,
            )
            self.discard(staged)
            return None
        with (
            self._undone_on_failure(staged),
            failure.translated(f"commit step {staged.step}", self.directory),
        ):
            if self.lease is not None:
                self.lease.check()  # another owner has removed what was staged
            self._identity.check()
            if staged.permit is not None:
                staged.permit.check()
            present = self._keep_shards(staged.directory, workers)
            if staged.is_dealt:
                staged = self._payload.complete(staged, workers)
            made = self._publish(staged, because, present, parent)
        is_whole = len(set(workers)) == self.loader.cluster.world
        self._intents.pop(staged.directory, None)
        self._end_save(staged.directory, is_over=is_whole)
        return made

    def discard(self, staged: Staged) -> None:
        """Removes a staged save that will not be committed. Never raises."""
        self._undo(staged)

    @contextlib.contextmanager
    def _undone_on_failure(self, save: Staged) -> Iterator[None]:
        """A save that failed must not fill the disk, nor pass for somebody else's."""
        try:
            yield
        except Exception:
            if self._is_chief:
                self._undo(save)
            with contextlib.suppress(OSError):
                self._identity.check()  # if it raises, that is why
            raise

    def _undo(self, save: Staged) -> None:
        try:
            retention.delete_staging(self._files, save.directory)
            self._end_save(save.directory, is_over=False)
            intent = self._intents.pop(save.directory, None)
            if intent is None and save.prefix is not None:
                intent = flat.intent_of(save.attempt, save.prefix)
            if intent is not None and self._identity.is_same():
                flat.abandon(self._files, intent)
        except (OSError, errors.CheckpointError) as error:
            _log.warning(_LEFT_BEHIND, save.directory, error)

    def _end_save(self, staged: str, *, is_over: bool) -> None:
        """Removes what is left of a save, whether it was committed or not.

        Args:
            staged: staging directory of the save.
            is_over: whether no worker writes a share of the save any more.
        """
        self._delete_parts(staged)
        cluster = self.loader.cluster
        if cluster.world > 1 and not (
            is_over or cluster.saves_all or paths.is_url(staged)
        ):
            self._awaited.append(staged)

    def _delete_parts(self, staged: str) -> None:
        """Deletes the shares that workers wrote of a save that is over."""
        try:
            retention.delete_staging(self._files, staged + layout.PARTS_SUFFIX)
            retention.remove_empty_staging(self._files, self.directory)
        except (OSError, errors.CheckpointError) as error:
            _log.warning(_LEFT_BEHIND, staged + layout.PARTS_SUFFIX, error)

    def _prepare(self, directory: str, prefix: str | None = None) -> None:
        self._identity.check()
        if self._is_chief:
            for over in self._awaited:
                if over != directory:
                    self._delete_parts(over)
            self._files.make_dirs(directory)
        if prefix is not None:
            intent = flat.intent_of(os.path.basename(directory), prefix)
            self._intents[directory] = intent  # a write that fails leaves a part of it
            flat.declare(self._files, intent)

    def _write_states(self, directory: str) -> None:
        states = self.loader.registry.in_order()
        self._identity.check()
        if self._is_chief:
            replicated = [state for state in states if not state.per_worker]
            folder = os.path.join(directory, layout.STATES)
            write_states(folder, replicated, self.directory)
        own = [*self._payload.states]
        if self.loader.random_state is not None:
            own.append(self.loader.random_state)
        own += [state for state in states if state.per_worker]
        worker = layout.worker_name(self.loader.cluster.worker)
        folder = os.path.join(directory, worker)
        write_states(folder, own, self.directory)

    def _sync_own(self, directory: str) -> None:
        """The chief can't sync what another machine still has in its cache."""
        worker = layout.worker_name(self.loader.cluster.worker)
        folder = os.path.join(directory, worker)
        names = reading.names(folder)
        for name in names:
            self._files.sync_file(os.path.join(folder, name))
        if names:
            self._files.sync_dir(folder)

    def _publish(
        self,
        staged: Staged,
        because: str,
        workers: Sequence[int],
        parent: Parent | None,
    ) -> events.Commit:
        """Commits what is staged, in its form; then deletes what is not kept."""
        found = catalog.scan(self.directory)
        self.check_others(found)
        # What cannot be read for a moment ranks above the others, if it is newer.
        unread = sum(each.sequence is None for each in found)
        taken = catalog.highest_sequence(found) + unread
        taken = max(taken, self.loader.highest_sequence)
        if self.copies is not None:
            taken = max(taken, self.copies.highest_sequence)
        draft = Manifest(
            step=staged.step,
            sequence=taken + 1,
            world_size=self.loader.cluster.world,
            workers=tuple(sorted(set(workers))),
            files=(),
            because=because,
            versions=committing.versions(),
            parent=parent or newest(committed(found)),
            metadata={
                "restart": self._restart,
                "attempt": staged.attempt,
                "process": this_process(),
            },
        )
        is_flat = staged.prefix is not None
        publish = flat.publish if is_flat else committing.publish
        path, manifest = publish(self._files, self.clock, self.directory, staged, draft)
        self.loader.highest_sequence = manifest.sequence
        if self.lease is not None:
            _heads[self._key] = self.lease.head
        with committing.tidying(self.directory):
            if is_flat:
                if self.lease is not None:
                    self.lease.check()  # what the manager deletes goes by no fence
                self._payload.committed()
                flat.sweep(self._files, os.path.dirname(path))
                for entry in retention.plan(found, 1)[1]:  # our own form: fetched once
                    retention.delete(self._files, entry)
            else:
                new = Entry(  # as `scan` would find it; nothing has to be read back
                    store=catalog.reader(self.directory),
                    name=os.path.basename(path),
                    kind=Kind.OWN,
                    condition=Condition.COMMITTED,
                    manifest=manifest,
                )
                copies = self.copies
                committing.finish(
                    self._files,
                    self.directory,
                    [new, *found],
                    self.loader.max_to_keep,
                    self.loader.damaged,
                    lambda each: copies is not None and copies.is_pinned(each),
                )
        save_seconds = self.clock.monotonic() - staged.started_at
        return events.Commit(
            step=manifest.step,
            path=path,
            sequence=manifest.sequence,
            world_size=manifest.world_size,
            save_seconds=save_seconds,
            bytes=manifest.bytes,
            because=manifest.because,
            blocked_seconds=staged.capture_seconds if staged.is_async else save_seconds,
        )

    def _keep_shards(self, directory: str, workers: Sequence[int]) -> list[int]:
        """Drops the shards of other workers; returns whose shards are there."""
        complete = {layout.worker_name(worker): worker for worker in workers}
        names = reading.names(directory)
        for name in names:
            if name.startswith(layout.WORKER) and name not in complete:
                retention.delete_staging(self._files, os.path.join(directory, name))
        if self.loader.random_state is None:
            return list(workers)  # then a worker may have had nothing to save
        missing = sorted(complete[name] for name in complete.keys() - set(names))
        if missing:
            _log.warning(
                "tfpreempt: workers %s wrote their parts of this save, and worker 0 "
                "does not see them in %s, so the commit is without them. Mount one "
                "storage for all workers",
                missing,
                directory,
            )
        return [worker for worker in workers if worker not in missing]

    # --- deleting --------------------------------------------------------------------

    def commit_of(self, place: str) -> Entry | None:
        """The commit in this directory that a path, or a remote folder's URI, means.

        Raises:
            CheckpointDamagedError: it cannot be read as one.
            SaveError: the disk.
        """
        name = place.rstrip("/").rpartition("/")[2]
        with failure.translated("look at the checkpoints", self.directory):
            found = catalog.scan(self.directory)
        for entry in found:
            is_twin = name == catalog.folder_name(entry.step or 0, entry.token)
            is_meant = is_twin or os.path.abspath(place) == os.path.abspath(entry.path)
            if entry.is_committed and is_meant:
                return entry
            if entry.condition is Condition.DAMAGED and is_meant:
                raise errors.CheckpointDamagedError(
                    f"{entry.path!r} cannot be read, so nothing was deleted: "
                    f"{entry.problems[0].rstrip('.')}; check the directory and the "
                    "disk, or remove it by hand"
                )
        return None

    def may_hold(self, place: str) -> bool:
        """Whether a path is one of a commit in this directory, be it there or not."""
        holder, _, name = place.rstrip("/").rpartition("/")
        return holder == self.directory and layout.COMMIT.fullmatch(name) is not None

    def delete(self, entry: Entry) -> None:
        """Deletes one of our own commits; on the chief.

        Raises:
            SaveError: the disk.
        """
        with failure.translated(f"delete {entry.path!r}", self.directory):
            self._identity.check()
            retention.delete(self._files, entry)
