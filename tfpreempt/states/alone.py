"""Commits of named States without a handler, and without TensorFlow."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tfpreempt import errors
from tfpreempt.checkpoint import catalog
from tfpreempt.checkpoint.loader import CheckpointLoader
from tfpreempt.checkpoint.payload import Contents
from tfpreempt.checkpoint.saver import CheckpointSaver
from tfpreempt.checkpoint.state import REGISTRY, State, StateRegistry, sync_states
from tfpreempt.core.cluster import Cluster
from tfpreempt.states.copies import Copies
from tfpreempt.states.values import StepCounter
from tfpreempt.storage import failure
from tfpreempt.storage.files import Files, files_for


class StatesAlone:
    """Commits the registered States; main thread.

    All workers sync them, the chief writes them: nobody waits for anybody, so nothing
    that differs between workers can be in the commit.

    Args:
        directory: the checkpoint directory, which exists.
        cluster: who the workers are.
        registry: the States.
        copies: what has the commits copied; None where they are not.
        files: the file operations.
    """

    def __init__(
        self,
        directory: str,
        cluster: Cluster,
        *,
        registry: StateRegistry = REGISTRY,
        copies: Copies | None = None,
        files: Files | None = None,
    ) -> None:
        self._directory = directory
        self._cluster = cluster
        self._registry = registry
        contents = Contents(cluster=cluster, registry=registry)
        loader = CheckpointLoader(
            contents, directory, files=files or files_for(directory)
        )
        self._saver = CheckpointSaver(loader, copies=copies)
        self._copies = copies
        self._is_started = False

    def save(self) -> str:
        """Commits the States; every worker calls it at the same place.

        Returns:
            The commit's directory on the chief; elsewhere the checkpoint directory.

        Raises:
            SaveError: nothing was committed, and nothing older was touched.
            ConfigurationError: there are several workers, and a State of each.
            UsageError: there is no State.
        """
        states = self._registry.in_order()
        if not states:
            raise errors.UsageError(
                "save_all_states() was called and there is no registered State. A "
                "State lives as long as somebody holds it: keep a reference to it."
            )
        own = [state for state in states if state.per_worker]
        if own and self._cluster.world > 1:
            raise errors.ConfigurationError(
                f"{own[0]!r} is saved by each of the {self._cluster.world} workers, "
                "which come together by a handler only. Make one: "
                f"PreemptionCheckpointHandler(resolver, None, {self._directory!r}); "
                "or use States with per_worker=False."
            )
        if not self._cluster.is_chief:
            sync_states(states)
            return self._directory
        if not self._is_started:
            self._is_started = True
            self._saver.start()
        attempt = f"states-{uuid.uuid4().hex[:12]}"
        staged = self._saver.stage(self._step(states), attempt)
        commit = self._saver.commit(staged, "save", range(self._cluster.world))
        assert commit is not None  # there is no save_fn that could say so
        if self._copies is not None:
            self._copies.committed(commit.path)
        return commit.path

    def _step(self, states: Sequence[State]) -> int:
        counters = [state for state in states if isinstance(state, StepCounter)]
        if len(counters) == 1:
            return counters[0].value
        with failure.translated("read the last commit", self._directory):
            found = catalog.scan(self._directory)
        return 1 + next((e.step or 0 for e in found if e.is_committed), 0)
