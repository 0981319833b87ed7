"""Saves that need no agreement: every worker comes to them at the same place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tfpreempt.clock import Clock
from tfpreempt.cluster import Cluster
from tfpreempt.coordination import keys
from tfpreempt.coordination.events import Key
from tfpreempt.coordination.gathering import Gathering
from tfpreempt.coordination.runtime import Runtime
from tfpreempt.errors import SaveError
from tfpreempt.events import Commit
from tfpreempt.participant import Participant


class JointSaves:
    """`save()`, every so many steps, and the last one; main thread.

    Args:
        cluster: who the workers are.
        incarnation: namespace of the keys.
        runtime: access to the store.
    """

    def __init__(self, cluster: Cluster, incarnation: str, runtime: Runtime) -> None:
        self._cluster = cluster
        self._prefix = f"tfpreempt/{incarnation}/save"
        self._runtime = runtime
        self._saves = 0

    def save(self, member: Participant, because: str, timeout: float) -> Commit | None:
        """All workers save now; every worker calls this at the same place.

        Args:
            member: the handler that saves.
            because: written into the manifest.
            timeout: seconds that the chief waits for the others' parts.

        Returns:
            The commit, on the chief; None elsewhere, where it may not be complete yet.

        Raises:
            SaveError: (chief) a worker's part did not come in time.
            CheckpointError: this worker's part could not be written.
        """
        self._saves += 1
        if self._cluster.is_chief:
            return self._lead(member, because, timeout)
        done = False
        try:
            member.stage(f"s{self._saves}")
            done = True
        finally:
            name = f"{self._prefix}/{self._saves}/{self._cluster.worker}"
            self._runtime.insert(name, keys.encode(done), lambda held: None)
        return None

    def _lead(self, member: Participant, because: str, timeout: float) -> Commit | None:
        staged = member.stage(f"s{self._saves}")
        missing = self._gather_dones(timeout)
        if missing:
            member.discard(staged)
            raise SaveError(
                f"no sign within {timeout:g} s from worker(s) {missing} that their "
                f"part of the {because} save is written; this save is dropped, the "
                "last commit stands. Look at the logs of those workers."
            )
        return member.commit(staged, because, range(self._cluster.world))

    def _gather_dones(self, timeout: float) -> list[int]:
        """Waits for the others' parts; returns whose never came."""
        others = range(1, self._cluster.world)
        if not others:
            return []
        absent: set[int] = set()

        def then(worker: int, value: Any, extra: keys.Extra) -> None:
            if value is not True:
                absent.add(worker)

        gathering = Gathering(
            self._runtime,
            Key.DONE,
            {j: f"{self._prefix}/{self._saves}/{j}" for j in others},
            by=self._cluster.worker,
            then=then,
        )
        gathering.start()
        late = gathering.wait(timeout)
        gathering.bury_missing(f"no part within {timeout:g} s")
        return sorted(absent | late)


def repeat(
    runtime: Runtime,
    clock: Clock,
    seconds: float,
    member: Participant,
    is_open: Callable[[Participant], bool],
    ask: Callable[[], None],
) -> None:
    """Asks for a commit every so many seconds, as long as the handler is open.

    Args:
        runtime: for the alarms; `ask` is called on their thread.
        clock: for the alarms.
        seconds: between two questions.
        member: the handler; held weakly.
        is_open: whether it still takes part.
        ask: starts a round.
    """
    mine = weakref.ref(member)

    def alarm() -> None:
        alive = mine()
        if alive is not None and is_open(alive):
            ask()
            repeat(runtime, clock, seconds, alive, is_open, ask)

    runtime.at(clock.monotonic() + seconds, alarm)
