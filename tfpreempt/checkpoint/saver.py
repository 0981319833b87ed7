"""Saves a step in two phases, whatever form the checkpoint has.

`stage` runs on every worker's main thread; `commit` on the chief, once all are done.
What TensorFlow has to do with it sits behind `Payload` (writer.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, claims, flat, home, layout, probe, retention
from tfpreempt.checkpoint import commit as committing
from tfpreempt.checkpoint.catalog import Committed
from tfpreempt.checkpoint.claims import Claim
from tfpreempt.checkpoint.home import Home
from tfpreempt.checkpoint.loader import CheckpointLoader
from tfpreempt.checkpoint.payload import Payload, Staged, Written, versions
from tfpreempt.checkpoint.remote import commits
from tfpreempt.checkpoint.state import (
    REGISTRY,
    State,
    StateRegistry,
    sync_states,
    try_states,
    write_states,
)
from tfpreempt.core import events
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.restarts import num_restarts
from tfpreempt.storage import failure, reading
from tfpreempt.storage.files import Files, files_for

_log = logging.getLogger(__name__)


class CheckpointSaver(CheckpointLoader):
    """Saves and restores checkpoints; build it with `writer.make_saver`.

    It restores too because what was found damaged then doesn't count as kept later.

    Args:
        payload: what TensorFlow or a save_fn writes; None for named States alone.
        directory: the checkpoint directory, the chief's for all workers.
        worker: index of this worker.
        world_size: number of workers.
        is_chief: whether this worker writes the payload and commits.
        max_to_keep: own commits to keep; None keeps all.
        needs_prefix: whether a commit of named States alone is nothing to restore.
        random_state: what `load_random_state` restores.
        registry: the named States that go along.
        files: the file operations.
        clock: for measured times.
    """

    def __init__(
        self,
        payload: Payload | None,
        directory: str,
        *,
        worker: int,
        world_size: int,
        is_chief: bool,
        max_to_keep: int | None = 2,
        needs_prefix: bool = False,
        random_state: State | None = None,
        registry: StateRegistry = REGISTRY,
        files: Files | None = None,
        clock: Clock | None = None,
    ) -> None:
        retention.check_max_to_keep(max_to_keep)
        super().__init__(
            payload,
            directory,
            worker=worker,
            world_size=world_size,
            is_chief=is_chief,
            max_to_keep=max_to_keep,
            needs_prefix=needs_prefix,
            random_state=random_state,
            registry=registry,
            files=files or files_for(directory),
        )
        self._clock = clock or SystemClock()
        self.above: Callable[[], int] = lambda: 0  # a sequence taken elsewhere
        self.is_pinned: Callable[[str], bool] = lambda path: False  # not to be deleted
        self._home = Home(directory)
        self._claim: Claim | None = None  # of the newest save, until it is over
        self._restart = num_restarts()  # read now: a save must not fail on it

    # --- saving ----------------------------------------------------------------------

    def start(self) -> None:
        """Removes what dead saves left; on the chief, once, before any save or restore.

        What a living process has staged is not touched: see `claims`.
        A failure is logged: leftovers cost space, never correctness.
        """
        try:
            removed = retention.clean(self._files, self.directory, self._clock)
            flat.settle(self._files, self.directory)
            probe.remove_stale_probes(self.directory, self._clock)
            home.sign(self._files, self.directory)
            self._home = Home(self.directory)
        except OSError as error:
            _log.warning("Cleaning up in %s failed: %s", self.directory, error)
        else:
            for path in removed:
                _log.info("Removed %s, left by a save that never committed", path)

    def needs_peers(self) -> bool:
        """Whether `stage` needs all workers at once; main thread."""
        return (
            self.world_size > 1
            and self._payload is not None
            and self._payload.needs_peers()
        )

    def try_states(self) -> None:
        """Warns of named States that this worker could not save; main thread."""
        states = self._registry.in_order()
        try_states(each for each in states if each.per_worker or self.is_chief)

    def stage(self, step: int, attempt: str, *args: Any, **kwargs: Any) -> Staged:
        """Writes this worker's part of a save; on every worker, main thread.

        Args:
            step: the step that is saved, equal on all workers.
            attempt: equal on all workers of this save and unique to it.
            *args: for CheckpointManager.save, or the save_fn.
            **kwargs: for CheckpointManager.save, or the save_fn.

        Raises:
            SaveError: the disk; says what to do.
        """
        started = self._clock.monotonic()
        directory = layout.staging_directory(self.directory, attempt)
        with (
            self._undone_on_failure(directory),
            failure.translated(f"save step {step}", self.directory),
        ):
            written = self._write_payload(directory, step, args, kwargs)
            shards = self._write_states(directory)
        return Staged(
            step=step,
            attempt=attempt,
            directory=directory,
            number=written.number,
            prefix=written.prefix,
            is_empty=written.is_empty,
            has_shard=shards > 0,
            started_at=started,
            stage_seconds=self._clock.monotonic() - started,
        )

    def commit(
        self, staged: Staged, because: str, workers: Sequence[int]
    ) -> events.Commit | None:
        """Makes a staged save the newest commit; on the chief.

        Args:
            staged: what this worker's `stage` returned.
            because: "preemption", "periodic" or "save".
            workers: indices of the workers that are known to have staged; shards of
                others are left out.

        Returns:
            The commit; None if a save_fn left nothing to commit.

        Raises:
            SaveError: nothing was committed, and nothing older was touched.
        """
        if not self.is_chief:
            raise errors.UsageError(
                f"Worker {self.worker} is not the chief; it cannot commit."
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
            self._undone_on_failure(staged.directory),
            failure.translated(f"commit step {staged.step}", self.directory),
        ):
            self._home.check()
            present = self._keep_shards(staged.directory, workers)
            commit = self._publish(staged, self._draft(staged, because, present))
        self._let_go(staged.directory)
        return commit

    def discard(self, staged: Staged) -> None:
        """Removes a staged save that will not be committed. Never raises."""
        self._undo(staged.directory)

    @contextlib.contextmanager
    def _undone_on_failure(self, staged: str) -> Iterator[None]:
        """A save that failed must not fill the disk, nor pass for somebody else's."""
        try:
            yield
        except Exception:
            if self.is_chief:
                self._undo(staged)
            self._home.check()  # if it raises, that is why
            raise

    def _undo(self, staged: str) -> None:
        try:
            retention.delete_staging(self._files, staged)
            self._let_go(staged)
            if self._home.is_same():
                flat.settle(self._files, self.directory)
        except OSError as error:
            _log.warning("Could not remove %s: %s", staged, error)

    def _begin(self, staged: str) -> None:
        """From here on no start takes what is staged for left over."""
        self._claim = claims.take(self._files, staged)

    def _let_go(self, staged: str) -> None:
        """The save is over, whether it was committed or not."""
        try:
            claims.forget(self._files, staged)
        except OSError as error:
            _log.warning("Could not remove the claim of %s: %s", staged, error)
        self._claim = None

    def _write_payload(
        self, directory: str, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Written:
        def prepare() -> None:
            self._home.check()
            if self.is_chief:
                self._begin(directory)
                self._files.make_dirs(directory)

        if self._payload is None:
            prepare()
            number = kwargs.get("checkpoint_number")
            return Written(number=step if number is None else int(number))

        def declare(prefix: str) -> None:
            flat.declare(self._files, prefix, directory)

        return self._payload.write(directory, step, prepare, declare, args, kwargs)

    def _write_states(self, directory: str) -> int:
        states = self._registry.in_order()
        sync_states(states)
        self._home.check()
        if self.is_chief:
            replicated = [state for state in states if not state.per_worker]
            write_states(os.path.join(directory, layout.STATES), replicated)
        folder = os.path.join(directory, layout.worker_name(self.worker))
        own = self._shard_states(states)
        if own and not self.is_chief:
            self._begin(directory)
        count = write_states(folder, own)
        if count and not self.is_chief:
            # The chief can't sync what another machine still has in its cache.
            for name in sorted(reading.names(folder)):
                self._files.sync_file(os.path.join(folder, name))
            self._files.sync_dir(folder)
        return count

    def _shard_states(self, registered: Sequence[State]) -> list[State]:
        own = [] if self._payload is None else list(self._payload.shard_states())
        if self._random_state is not None:
            own.append(self._random_state)
        return own + [state for state in registered if state.per_worker]

    def _draft(
        self, staged: Staged, because: str, workers: Sequence[int]
    ) -> committing.Draft:
        return committing.Draft(
            step=staged.step,
            world_size=self.world_size,
            workers=tuple(sorted(set(workers))),
            because=because,
            started_at=staged.started_at,
            above=self.above(),
            versions=versions(),
            metadata={"restart": self._restart, "attempt": staged.attempt},
        )

    def _publish(self, staged: Staged, draft: committing.Draft) -> events.Commit:
        if staged.prefix is None:
            path, manifest = committing.publish(
                self._files,
                self._clock,
                self.directory,
                staged.directory,
                staged.number,
                draft,
                self.max_to_keep,
                self._damaged,
                self.is_pinned,
            )
        else:
            path = staged.prefix
            manifest = flat.publish(
                self._files, self._clock, self.directory, path, staged.directory, draft
            )
            self._tidy(os.path.dirname(path))
        seconds = self._clock.monotonic() - staged.started_at
        return committing.event(manifest, path, seconds)

    def _tidy(self, directory: str) -> None:
        # The commit stands already, so what fails here is logged, not raised.
        try:
            if self._payload is not None:
                self._payload.committed()
            flat.sweep(self._files, directory)
            for path in retention.plan(self.directory, 1)[1]:  # fetched once
                retention.delete(self._files, path)
        except OSError as error:
            _log.warning("Tidying %s after a commit failed: %s", directory, error)

    def _keep_shards(self, directory: str, workers: Sequence[int]) -> list[int]:
        """Drops the shards of other workers; returns whose shards are there."""
        complete = {layout.worker_name(worker): worker for worker in workers}
        names = reading.names(directory) if reading.is_dir(directory) else []
        for name in names:
            if name.startswith("worker-") and name not in complete:
                retention.delete_staging(self._files, os.path.join(directory, name))
        if self._random_state is None:
            return list(workers)  # then a worker may have had nothing to save
        missing = sorted(complete[name] for name in complete.keys() - set(names))
        if missing:
            _log.warning(
                "The shards of workers %s are not in %s as the chief sees it, though "
                "they were written: is the directory shared?",
                missing,
                directory,
            )
        return [worker for worker in workers if worker not in missing]

    # --- deleting --------------------------------------------------------------------

    def commit_of(self, place: str) -> Committed | None:
        """The commit in this directory that a path, or a remote folder's URI, means."""
        named = commits.parse(place.rstrip("/").rpartition("/")[2])
        for entry in catalog.scan(self.directory)[0]:
            is_twin = named is not None and named.token == entry.token
            if is_twin or os.path.abspath(place) == os.path.abspath(entry.path):
                return entry
        return None

    def may_hold(self, place: str) -> bool:
        """Whether a path is one of a commit in this directory, be it there or not."""
        holder, _, name = place.rstrip("/").rpartition("/")
        return holder == self.directory and layout.is_commit_name(name)

    def delete(self, path: str) -> None:
        """Deletes one of our own commits; on the chief.

        Raises:
            SaveError: the disk.
        """
        with failure.translated(f"delete {path!r}", self.directory):
            self._home.check()
            kept, _ = retention.plan(self.directory, None)
            rest = [each for each in kept if each != path]
            committing.point(self._files, self.directory, rest, [path])
            retention.delete(self._files, path)
