"""Commits of named States without a handler, and without TensorFlow."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tfpreempt import errors
from tfpreempt.checkpoint import catalog
from tfpreempt.checkpoint.loader import CheckpointLoader
from tfpreempt.checkpoint.payload import Contents
from tfpreempt.checkpoint.saver import CheckpointSaver
from tfpreempt.checkpoint.state import REGISTRY, State, StateRegistry
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.states.copies import Copies
from tfpreempt.states.meeting import Meeting
from tfpreempt.states.values import StepCounter
from tfpreempt.storage import failure, paths
from tfpreempt.storage.files import Files, files_for

_SECONDS = 60.0  # that the slowest worker may come late


class StatesAlone:
    """Commits the registered States; main thread.

    Args:
        directory: the checkpoint directory, which exists, shared by all workers.
        cluster: who the workers are.
        registry: the States.
        copies: what has the commits copied; None where they are not.
        files: the file operations.
        clock: for deadlines and measured times.
        seconds: how long a wait for other workers may take.

    Attributes:
        pending: what the chief is about to commit (on the other workers).
    """

    def __init__(
        self,
        directory: str,
        cluster: Cluster,
        *,
        registry: StateRegistry = REGISTRY,
        copies: Copies | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
        seconds: float = _SECONDS,
    ) -> None:
        files, clock = files or files_for(directory), clock or SystemClock()
        self._directory = directory
        self._cluster = cluster
        self._registry = registry
        contents = Contents(cluster=cluster, registry=registry)
        loader = CheckpointLoader(contents, directory, files=files)
        self._saver = CheckpointSaver(loader, copies=copies, clock=clock)
        self._meeting = Meeting(
            directory, cluster, files=files, clock=clock, seconds=seconds
        )
        self._copies = copies
        self._is_started = False
        self.pending = ""
        self._calls = 0

    def save(self) -> str:
        """Commits the States; every worker calls it at the same place.

        Returns:
            The commit's directory on the chief; elsewhere the checkpoint directory.

        Raises:
            SaveError: nothing was committed, and nothing older was touched.
            ConfigurationError: workers cannot meet in such a directory.
            UsageError: there is no State.
        """
        states = self._registry.in_order()
        if not states:
            raise errors.UsageError(
                "save_all_states() was called and there is no registered State. A "
                "State lives as long as somebody holds it: keep a reference to it."
            )
        self._calls += 1
        if self._cluster.is_chief and not self._is_started:
            self._is_started = True
            self._saver.start()
        # The others' shards are all that anybody has to wait for.
        own = [state for state in states if state.per_worker]
        is_joint = self._cluster.world > 1 and bool(own)
        if is_joint and paths.is_url(self._directory):
            raise errors.ConfigurationError(_no_meeting(self._directory, own[0]))
        attempt = f"states-{uuid.uuid4().hex[:12]}"
        if is_joint:
            with failure.translated("meet the other workers", self._directory):
                attempt = f"states-{self._meeting.attend()}-{self._calls}"
        if self._cluster.is_chief:
            return self._lead(attempt, states, is_joint)
        self._follow(attempt, is_joint)
        return self._directory

    def _lead(self, attempt: str, states: Sequence[State], is_joint: bool) -> str:
        staged = self._saver.stage(self._step(states), attempt)
        if is_joint:
            try:
                with failure.translated("await the other workers", self._directory):
                    self._meeting.wait_done(attempt)
            except errors.SaveError:
                self._saver.discard(staged)
                raise
        commit = self._saver.commit(staged, "save", range(self._cluster.world))
        assert commit is not None  # there is no save_fn that could say so
        if self._copies is not None:
            self._copies.committed(commit.path)
        return commit.path

    def _follow(self, attempt: str, is_joint: bool) -> None:
        problem: str | None = "it was interrupted"
        try:
            staged = self._saver.stage(0, attempt)  # the chief says which step it is
            problem = None
            if is_joint:
                self.pending = staged.directory
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            problem = f"{type(error).__name__}: {error} {notes}".rstrip()
            raise
        finally:
            if is_joint:
                with failure.translated("tell the chief", self._directory):
                    self._meeting.tell_done(attempt, problem)

    def _step(self, states: Sequence[State]) -> int:
        counters = [state for state in states if isinstance(state, StepCounter)]
        if len(counters) == 1:
            return counters[0].value
        with failure.translated("read the last commit", self._directory):
            found = catalog.scan(self._directory)
        return 1 + next((e.step or 0 for e in found if e.is_committed), 0)


def _no_meeting(directory: str, state: State) -> str:
    return (
        f"{state!r} is saved by each worker, and without a handler workers meet by "
        f"files on a shared disk, which {directory!r} is not. Use a "
        "PreemptionCheckpointHandler(None, None, directory), whose workers need no "
        "disk to meet; or a local directory that all workers share; or States with "
        "per_worker=False."
    )
