"""Finds and restores a checkpoint on one worker, here or out of an object store."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Callable

from tfpreempt import errors
from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint import restore as restoring
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.payload import Payload
from tfpreempt.checkpoint.remote import fetch
from tfpreempt.checkpoint.resized import check_rules, has_part_of, is_resized, read_own
from tfpreempt.checkpoint.state import (
    REGISTRY,
    State,
    StateRegistry,
    check_state_file,
    read_state,
)
from tfpreempt.core import events
from tfpreempt.core.cluster import Cluster
from tfpreempt.storage.files import Files
from tfpreempt.storage.interface import ObjectStore

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, kw_only=True)
class CheckpointLoader:
    """One worker's view of a checkpoint directory.

    Args:
        directory: the checkpoint directory, the chief's for all workers.
        cluster: who the workers are, and which one this is.
        files: the file operations.
        payload: what TensorFlow or a save_fn writes.
        random_state: this worker's random generators; None where they are not kept.
        registry: the named States that go along.
        max_to_keep: own commits to keep; None keeps all.
        needs_prefix: whether a commit of named States alone is nothing to restore.

    Attributes:
        damaged: tokens of the commits that `newest` passed over.
        highest_sequence: of a commit that `newest` looked at, or that a save made: it
            is known where the disk does not give the commit back for a moment.
    """

    directory: str
    cluster: Cluster
    files: Files
    payload: Payload = dataclasses.field(default_factory=Payload)
    random_state: State | None = None
    registry: StateRegistry = REGISTRY
    max_to_keep: int | None = 2
    needs_prefix: bool = False
    damaged: set[str] = dataclasses.field(default_factory=set, init=False)
    highest_sequence: int = dataclasses.field(default=0, init=False)

    def newest(self, *on_skip: Callable[[str], None]) -> Entry | None:
        """The newest that verifies; on the chief. See `restore.newest_verified`."""
        return restoring.newest_verified(
            self.directory, *on_skip, needs_prefix=self.needs_prefix, check=self.check
        )

    def fetch_newer(
        self,
        store: ObjectStore,
        local: Entry | None,
        on_skip: Callable[[str], None],
        on_lost: Callable[[str], None],
    ) -> bool:
        """Brings a newer commit from an object store; see `fetch.newest_first`."""
        return fetch.newest_first(
            self.files,
            store,
            local,
            self.directory,
            on_skip,
            on_lost,
            max_to_keep=self.max_to_keep,
            needs_prefix=self.needs_prefix,
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
        found = restoring.find_candidates(self.directory, lambda problem: None)
        return next((each for each in found if each.token == token), None)

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
            CheckpointDamagedError: of one without a manifest, which shows some damage
                only now.
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
                Or another number of workers wrote it, and a State has no rule for that.
            ConfigurationError: the workers of now cannot share the data equally.
        """
        cluster, manifest = self.cluster, candidate.manifest
        resized = is_resized(candidate, cluster)
        if resized:
            check_rules(candidate, self.registry.in_order(), cluster)
            self.payload.check_shares()
        if candidate.prefix is not None:
            # TensorFlow's own files have the positions of the chief's iterators.
            is_mine = manifest is None or (cluster.is_chief and not resized)
            try:
                self.payload.restore(candidate.prefix, with_data=is_mine)
            except errors.CheckpointDamagedError as error:
                raise errors.CheckpointDamagedError(
                    f"{str(error).rstrip('.')}. Put the files back from a copy; or, to "
                    f"go on from an older checkpoint, move {candidate.path!r} away"
                ) from error
        if manifest is not None:
            for state in self.payload.states:
                read_own(candidate, state, cluster)
            restoring.warn_about_workers(candidate, cluster)
            if named_states:
                self.load_named_states(candidate)
        self.payload.restored(candidate)
        return events.Restored(
            path=candidate.path,
            step=candidate.step or 0,
            sequence=candidate.sequence or 0,
            world_size=manifest.world_size if manifest else 0,
        )

    def load_random_state(self, candidate: Entry) -> bool:
        """Restores this worker's random generators; at the first `run()`, main thread.

        Returns:
            Whether the checkpoint had them for this worker.
        """
        state, is_ours = self.random_state, candidate.manifest is not None
        return (
            state is not None and is_ours and read_own(candidate, state, self.cluster)
        )

    def random_bytes(self) -> bytes:
        """This worker's random generators as a save would hold them."""
        buffer = io.BytesIO()
        if self.random_state is not None:
            self.random_state.save(buffer)
        return buffer.getvalue()

    def load_named_states(self, candidate: Entry) -> None:
        """Loads the registered States; on every worker, main thread."""
        shared = os.path.join(candidate.shards, layout.STATES)
        cluster = self.cluster
        has_own = has_part_of(candidate, cluster)
        for state in self.registry.in_order():
            if not state.per_worker:
                is_there = read_state(shared, state)
            elif has_own:
                is_there = read_own(candidate, state, cluster)
            else:
                continue  # a warning says so
            if not is_there:
                _log.warning(
                    "tfpreempt: %s has no State %r; it stays as the program made it",
                    candidate.path,
                    state.name,
                )

    def check(self, candidate: Entry) -> None:
        """Verifies it, and tries, for all workers, what `restore` will read.

        Nothing is assigned; what is damaged is remembered.

        Raises:
            CheckpointDamagedError: something of it cannot be read.
        """
        self.highest_sequence = max(self.highest_sequence, candidate.sequence or 0)
        try:
            restoring.verify(candidate)
            if candidate.prefix is not None:
                self.payload.check(candidate.prefix)
            manifest = candidate.manifest
            states = {
                state.name + layout.STATE_SUFFIX: state
                for state in self.registry.in_order()
            }
            for entry in manifest.files if manifest is not None else ():
                path = candidate.file(entry.name)
                folder, name = os.path.split(path)
                if os.path.dirname(folder) == candidate.shards:
                    check_state_file(path, states.get(name))
        except errors.CheckpointDamagedError:
            self.damaged.add(candidate.token)
            raise
