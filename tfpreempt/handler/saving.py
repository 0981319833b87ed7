"""Saves that need no agreement: every worker comes to them at the same place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt.checkpoint.payload import Staged
from tfpreempt.coordination import keys
from tfpreempt.coordination.events import Key
from tfpreempt.coordination.gathering import Gathering
from tfpreempt.coordination.runtime import Runtime, publish
from tfpreempt.core.clock import Clock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit
from tfpreempt.errors import SaveError
from tfpreempt.handler.member import Member


class CollectiveSaves:
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
        self._fit = 1  # how often training came to its end here, plus one
        self._final: set[int] = set()  # workers that are through (on the chief)
        self._listens = False
        self._gathering: Gathering | None = None
        self._newest: dict[str, tuple[str, int]] = {}  # by token: its name and step

    def finishing(self) -> None:
        """This worker is through: the chief's saves do not wait for it any more."""
        if not self._cluster.is_chief:
            name = f"{self._prefix}/final-{self._fit}/{self._cluster.worker}"
            self._runtime.insert(name, keys.encode(True), lambda held: None)
        self._fit += 1
        self._final = set()
        self._listens = False

    def save(
        self,
        member: Member,
        name: str,
        because: str,
        timeout: float,
        stage: Callable[[Member, str], Staged],
    ) -> Commit | None:
        """All workers save now; every worker calls this at the same place.

        Args:
            member: saves.
            name: of this save; equal on all workers, and never used again.
            because: written into the manifest.
            timeout: seconds that the chief waits for the others' parts.
            stage: writes this worker's part.

        Returns:
            The commit, on the chief; None elsewhere, where it may not be complete yet.

        Raises:
            SaveError: (chief) a worker's part did not come in time.
            CheckpointError: this worker's part could not be written.
        """
        self._newest[member.commits.token] = name, member.step
        done = False
        if self._cluster.is_chief:
            try:
                staged = stage(member, name)
                commit = self._lead(member, staged, name, because, timeout)
                done = commit is not None
            finally:
                self._tell(member, name, done)
            return commit
        try:
            stage(member, name)
            done = True
        finally:
            key = f"{self._prefix}/{name}/{self._cluster.worker}"
            wait = min(timeout, 5.0)  # the process may end right after this
            publish(self._runtime, key, keys.encode(done), wait)
        return None

    def _tell(self, member: Member, name: str, done: bool) -> None:
        """What came of a save, which a notice at the same step asks."""
        if not done:
            del self._newest[member.commits.token]
        if self._cluster.world > 1:
            key = f"{self._prefix}/{name}/commit"
            self._runtime.insert(key, keys.encode(done), lambda held: None)

    def stands(self, member: Member, timeout: float) -> bool:
        """Whether the newest save of this handler is a commit of the step it is at.

        Equal on all workers: the chief has the word, the others wait for it.

        Args:
            member: the handler.
            timeout: seconds to wait for the chief, which may not be through with it.
        """
        name, step = self._newest.get(member.commits.token, ("", None))
        if step != member.step or self._cluster.is_chief:
            return step == member.step
        told: list[bool] = []
        is_told = threading.Event()

        def then(_: int, text: str) -> None:
            told.append(keys.decode(Key.DONE, text)[0])
            is_told.set()

        self._runtime.get_each([f"{self._prefix}/{name}/commit"], then)
        is_told.wait(timeout)
        return told == [True]

    def _lead(
        self, member: Member, staged: Staged, name: str, because: str, timeout: float
    ) -> Commit | None:
        absent = set(self._gather_dones(name, timeout))
        missing = sorted(absent - self._final)
        if missing and because != "finished":
            member.commits.discard(staged)
            raise SaveError(
                f"no sign within {timeout:g} s from worker(s) {missing} that their "
                f"part of the {because} save is written; this save is dropped, the "
                "last commit stands. Look at the logs of those workers."
            )
        present = sorted(set(range(self._cluster.world)) - absent)
        return member.commit(staged, because, present)

    def _gather_dones(self, name: str, timeout: float) -> list[int]:
        """Waits for the others' parts; returns whose never came."""
        others = range(1, self._cluster.world)
        if not others:
            return []
        self._listen(others)
        absent: set[int] = set()

        def then(worker: int, value: Any, extra: keys.Extra) -> None:
            if value is not True:
                absent.add(worker)

        gathering = Gathering(
            self._runtime,
            Key.DONE,
            {j: f"{self._prefix}/{name}/{j}" for j in others},
            by=self._cluster.worker,
            then=then,
        )
        self._gathering = gathering
        gathering.start()
        gathering.give_up(frozenset(self._final), "its training is over")
        late = gathering.wait(timeout)
        gathering.give_up_missing(f"no part within {timeout:g} s")
        return sorted(absent | late)

    def _listen(self, others: Sequence[int]) -> None:
        """On the chief: hears, from now on, who is through."""
        if self._listens:
            return
        self._listens = True
        final = self._final  # of this fit; the next one has a set of its own

        def then(index: int, text: str) -> None:
            final.add(others[index])
            if self._gathering is not None:
                self._gathering.give_up(frozenset(final), "its training is over")

        names = [f"{self._prefix}/final-{self._fit}/{j}" for j in others]
        self._runtime.get_each(names, then)


def repeat(
    runtime: Runtime,
    clock: Clock,
    seconds: float,
    member: Member,
    is_open: Callable[[Member], bool],
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
