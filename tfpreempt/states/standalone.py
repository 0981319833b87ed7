"""`StandaloneStates`: commits named States without a handler, without TensorFlow."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.head import Head
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror.store_selection import RunStorage
from tfpreempt.checkpoint.restore.checkpoint_directory import (
    Directory,
    check_nothing_came,
)
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.checkpoint.restore.state_loader import StateLoader
from tfpreempt.checkpoint.state.state import REGISTRY, State, sync_states
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.handler import current_session
from tfpreempt.states.standalone_mirror import StandaloneMirror
from tfpreempt.states.values import StepCounter
from tfpreempt.storage import os_errors, paths
from tfpreempt.storage.files import Files, LocalFiles

_log = logging.getLogger(__name__)


class StandaloneStates:
    """Saves and loads named States in a directory; used on the main thread.

    Every worker calls `sync()` of the States, and the chief writes the commit. The
    chief does not wait for the other workers, so a commit cannot contain States with
    `per_worker=True`.

    Args:
        storage: the checkpoint directory, which the first save creates if missing; and
            the object store of the mirror, if any.
        cluster: the workers of the run.
    """

    def __init__(self, storage: RunStorage, cluster: Cluster) -> None:
        show_log_lines()
        self._named = storage.directory
        self._directory = directory = paths.absolute(self._named)
        self._cluster = cluster
        self._loader = StateLoader(directory, cluster)
        self._lease = Lease()  # only the chief acquires the lease
        self._copies: StandaloneMirror | None = None
        self._policy = storage.policy
        if storage.store is not None:
            self._copies = StandaloneMirror(
                storage.store,
                directory,
                cluster,
                self._loader.newest,
                self._files(),
                storage.scratch,
            )
        self._opened: Directory | None = None  # set by the first save
        # True after the first save of the registered States.
        self._has_directory = False
        self._has_held = False  # True after the first save, also of `save_state`
        self._is_warned = False

    def load(self, state: State) -> bool:
        """Loads the newest saved value of a State; see `load_state`.

        Args:
            state: State to load.

        Returns:
            Whether a saved value was found.

        Raises:
            CheckpointError: the State cannot be loaded; see `load_state`.
        """
        if self._copies is not None:
            self._copies.begin(self._take)
        if not self._lease.head.is_known:
            self._lease.head.follow(self._commits(), self._lease)
        elif not (self._cluster.is_chief or self._has_directory):
            self._warn_if_chief_committed()
        return self._loader.load(state)

    def save(self) -> str:
        """Commits the registered States.

        Called on every worker, at the same point of the program.

        Returns:
            On the chief the commit's directory; on the other workers the checkpoint
            directory.

        Raises:
            SaveError: the commit failed; earlier commits are intact.
            DirectoryLockedError: another program uses the directory.
            ConfigurationError: the directory cannot be used; or there are several
                workers, and a State with `per_worker=True`.
            UsageError: no State is registered.
        """
        states = REGISTRY.in_order()
        if not states:
            raise errors.UsageError(
                "save_all_states() found no registered State; expected at least one. A "
                "State is deleted with its last reference: create a State, and keep a "
                "reference to the State."
            )
        own = [each for each in states if each.per_worker and each.should_save()]
        if own and self._cluster.num_workers > 1:
            raise errors.ConfigurationError(
                f"{own[0]!r} has per_worker=True and is saved by each of the "
                f"{self._cluster.num_workers} workers; such a save needs a handler. "
                "Create a handler: PreemptionCheckpointHandler(resolver, None, "
                f"{self._directory!r}); or use States with per_worker=False."
            )
        if not self._has_directory:
            # Only before the first save: if the directory disappears later, a save must
            # fail, and not create a new directory.
            os_errors.check_directory(self._named)
            self._has_directory = True
        if not self._cluster.is_chief:
            sync_states(states)
            return self._directory

        def hold() -> None:
            self.hold()
            if self._opened is None:
                check_nothing_came(self._directory)

        mirror = None
        if self._copies is None:
            hold()
        else:
            self._copies.begin(hold)
            mirror = self._copies.mirror
        opened = self._opened
        if opened is None:
            self._opened = opened = Directory(
                path=self._directory,
                cluster=self._cluster,
                files=self._files(),
                retention=self._policy,
                lease=self._lease,
            )
            opened.start()
        # Use the current mirror: an open handler may have closed the mirror of the last
        # save, and `begin` has then made a new mirror.
        opened.mirror = mirror
        save = Save(opened, self._step(states), f"states-{uuid.uuid4().hex[:12]}")
        save.capture()
        save.write()
        commit = save.publish("save", range(self._cluster.num_workers))
        assert commit is not None  # None is possible with a save_fn only
        return commit.path

    def hold(self) -> Files:
        """Acquires the lease of the directory, on the chief, until the process ends.

        The other workers acquire no lease, and do not check for commits of other
        programs: a commit made after the load of the States comes from the workers' own
        chief.

        Returns:
            File operations on the directory, which fail once the lease is lost.

        Raises:
            DirectoryLockedError: another program uses the directory, or has committed
                in the directory since this program loaded its States.
            SaveError: the disk failed.
        """
        self._take()
        if self._cluster.is_chief and not self._has_held:
            self._check_nothing_came()
            self._has_held = True
        return self._files()

    def _take(self) -> None:
        if self._cluster.is_chief:
            self._lease.acquire(self._directory)

    def _check_nothing_came(self) -> None:
        """Raises an error if another program has committed since the first load.

        A load acquires no lease, so another program can commit between the first load
        and the first save.

        Raises:
            DirectoryLockedError: another program has committed.
        """
        if current_session.current():
            # Do not compare: the open handler checks for commits of other programs.
            self._lease.head = Head()
        if not self._lease.head.has_moved(self._commits()):
            return
        self._lease.release()
        raise errors.DirectoryLockedError(
            f"another program has committed in {self._directory!r} since this program "
            "loaded its States; a save would overwrite the steps of the other program. "
            "Start this program again after the other program has ended, or use "
            "another directory."
        )

    def _warn_if_chief_committed(self) -> None:
        """Logs a warning, once, if the chief committed between two loads of a worker.

        Called on a worker that has not saved yet. The States of the worker could come
        from two commits.
        """
        if not self._is_warned and self._lease.head.has_moved(self._commits()):
            self._is_warned = True
            _log.warning(
                "a newer commit was made in %s while worker %d loaded its States, so "
                "the States may come from two steps. Synchronize all workers between "
                "the last load_state() and the first save_all_states()",
                self._directory,
                self._cluster.worker,
            )

    def _commits(self) -> list[Entry]:
        with os_errors.translated("read the last commit", self._directory):
            found = catalog.scan(self._directory)
        return [each for each in found if each.is_committed]

    def _files(self) -> Files:
        return FencedFiles(LocalFiles(self._directory), self._lease)

    def _step(self, states: Sequence[State]) -> int:
        counters = [state for state in states if isinstance(state, StepCounter)]
        if len(counters) == 1:
            return counters[0].value
        return 1 + next((each.step or 0 for each in self._commits()), 0)
