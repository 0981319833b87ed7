"""Finds and restores a checkpoint on one worker, here or out of an object store."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable

from tfpreempt import errors
from tfpreempt.checkpoint import layout, retention
from tfpreempt.checkpoint import restore as restoring
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.checkpoint.payload import Contents
from tfpreempt.checkpoint.remote import fetch
from tfpreempt.checkpoint.state import check_state_file, read_state
from tfpreempt.core import events
from tfpreempt.storage.files import Files, files_for
from tfpreempt.storage.interface import ObjectStore

_log = logging.getLogger(__name__)


class CheckpointLoader:
    """One worker's view of a checkpoint directory.

    Args:
        contents: what is restored.
        directory: the checkpoint directory, the chief's for all workers.
        max_to_keep: own commits to keep; None keeps all.
        needs_prefix: whether a commit of named States alone is nothing to restore.
        files: the file operations.

    Attributes:
        damaged: tokens of the commits that `newest` passed over.
    """

    def __init__(
        self,
        contents: Contents,
        directory: str,
        *,
        max_to_keep: int | None = 2,
        needs_prefix: bool = False,
        files: Files | None = None,
    ) -> None:
        retention.check_max_to_keep(max_to_keep)
        self.contents = contents
        self.directory = directory
        self.max_to_keep = max_to_keep
        self.files = files or files_for(directory)
        self.damaged: set[str] = set()
        self._needs_prefix = needs_prefix

    def newest(self, *on_skip: Callable[[str], None]) -> Entry | None:
        """The newest that verifies; on the chief. See `restore.newest_verified`."""
        return restoring.newest_verified(
            self.directory,
            *on_skip,
            needs_prefix=self._needs_prefix,
            check=self._check_readable,
            on_damaged=lambda candidate: self.damaged.add(candidate.token),
        )

    def fetch_newer(
        self,
        store: ObjectStore,
        local: Entry | None,
        on_skip: Callable[[str], None],
    ) -> bool:
        """Brings a newer commit from an object store; see `fetch.newest_first`."""
        return fetch.newest_first(
            self.files,
            store,
            local,
            self.directory,
            on_skip,
            max_to_keep=self.max_to_keep,
            needs_prefix=self._needs_prefix,
        )

    def fetch(self, store: ObjectStore, token: str) -> Entry | None:
        """The commit that the chief chose, on a disk of this worker's own.

        Args:
            store: has it, if it is not here, or not whole.
            token: says which.

        Returns:
            The commit; None if the store does not have it either.
        """
        found = self.find(token)
        try:
            if found is not None:
                restoring.verify(found)
                return found
        except errors.CheckpointDamagedError as error:
            _log.warning("tfpreempt: %s; it is fetched again", error)
        commit = fetch.find(store, token)
        if commit is None:
            return None
        keep = self.max_to_keep  # nobody else deletes any on this disk
        fetch.bring(self.files, commit, self.directory, max_to_keep=keep)
        return self.find(token)

    def find(self, token: str) -> Entry | None:
        """The checkpoint that the chief chose and verified, as this worker sees it."""
        return restoring.find_by_token(self.directory, token)

    def restore(
        self, candidate: Entry, *, named_states: bool = True
    ) -> events.Restored:
        """Restores everything but the random generators; on every worker, main thread.

        Args:
            candidate: the same on all workers, verified by the chief.
            named_states: False where `load_named_states` was called before.

        Returns:
            What was restored; step 0 where a foreign writer didn't say.

        Raises:
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
        """
        payload, cluster = self.contents.payload, self.contents.cluster
        if candidate.prefix is not None:
            payload.restore(candidate.prefix, with_data=self._has_my_data(candidate))
        if candidate.manifest is not None:
            restoring.warn_about_world(candidate, cluster.worker, cluster.world)
            if shard := self._shard(candidate):
                for state in payload.states:
                    read_state(shard, state)
            if named_states:
                self.load_named_states(candidate)
        payload.restored(candidate)
        return events.Restored(
            path=candidate.path,
            step=candidate.step or 0,
            sequence=candidate.sequence or 0,
            world_size=candidate.manifest.world_size if candidate.manifest else 0,
        )

    def load_random_state(self, candidate: Entry) -> bool:
        """Restores this worker's random generators; at the first `run()`, main thread.

        Returns:
            Whether the checkpoint had them for this worker.
        """
        state, shard = self.contents.random_state, self._shard(candidate)
        return state is not None and shard is not None and read_state(shard, state)

    def random_bytes(self) -> bytes:
        """This worker's random generators as a save would hold them."""
        buffer = io.BytesIO()
        if self.contents.random_state is not None:
            self.contents.random_state.save(buffer)
        return buffer.getvalue()

    def checkpoint(self, candidate: Entry) -> Checkpoint:
        """A handle for users."""
        return Checkpoint(candidate.path, prefix=candidate.prefix, step=candidate.step)

    def load_named_states(self, candidate: Entry) -> None:
        """Loads the registered States; on every worker, main thread."""
        shared = os.path.join(candidate.shards, layout.STATES)
        shard = self._shard(candidate)
        for state in self.contents.registry.in_order():
            folder = shard if state.per_worker else shared
            if folder is not None and not read_state(folder, state):
                _log.warning(
                    "tfpreempt: %s has no State %r", candidate.path, state.name
                )

    def _check_readable(self, candidate: Entry) -> None:
        """Tries, for all workers, what `restore` will read; assigns nothing.

        Raises:
            CheckpointDamagedError: something of it cannot be read.
        """
        if candidate.prefix is not None:
            self.contents.payload.check(candidate.prefix)
        manifest = candidate.manifest
        states = {each.name: each for each in self.contents.registry.in_order()}
        for entry in manifest.files if manifest is not None else ():
            path = candidate.file(entry.name)
            folder, name = os.path.split(path)
            if os.path.dirname(folder) == candidate.shards:
                check_state_file(path, states.get(name.removesuffix(".state")))

    def _has_my_data(self, candidate: Entry) -> bool:
        """Whether TensorFlow's own files have this worker's iterators (the chief's)."""
        manifest, cluster = candidate.manifest, self.contents.cluster
        return manifest is None or (
            cluster.is_chief and manifest.world_size == cluster.world
        )

    def _shard(self, candidate: Entry) -> str | None:
        """The directory with what this worker saved; None if it saved nothing."""
        manifest, cluster = candidate.manifest, self.contents.cluster
        if (
            manifest is None
            or manifest.world_size != cluster.world
            or cluster.worker not in manifest.workers
        ):
            return None
        return os.path.join(candidate.shards, layout.worker_name(cluster.worker))
