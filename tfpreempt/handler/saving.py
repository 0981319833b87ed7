"""Saves of all workers: of a round, and at a place that every worker comes to.

Each is stage, all done, marker. In a round it is the agreement that says when; without
one the workers tell the chief by keys of their own that their parts are written.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpreempt.checkpoint.payload import Staged
from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.events import CommitKind, Key, NoticeKind
from tfpreempt.coordination.gathering import Gathering
from tfpreempt.coordination.runtime import Runtime, answer
from tfpreempt.core.clock import Clock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit, Fault
from tfpreempt.errors import SaveError
from tfpreempt.handler.member import Member, Members

log = logging.getLogger(__name__)

Stage = Callable[[str], Staged]
"""Writes a member's part of the save of a name."""

Stages = Mapping[Member, Stage]
"""That of the members to whose `stage` the program gives arguments."""

PLAIN: Stages = types.MappingProxyType({})
"""The program gives none."""


class CollectiveSaves:
    """Saves without agreement: `save()`, every so many steps, and the last one.

    Main thread.

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
        stage: Stage,
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
        if not self._cluster.is_chief:
            done = False
            try:
                stage(name)
                done = True
            finally:
                key = f"{self._prefix}/{name}/{self._cluster.worker}"
                tell = functools.partial(self._runtime.insert, key, keys.encode(done))
                answer(tell, min(timeout, 5.0))  # the process may end right after this
            return None
        commit = None
        try:
            staged = stage(name)
            absent = self._absent(name, timeout)
            missing = sorted(absent - self._final)
            if missing and because != "finished":
                member.commits.discard(staged)
                raise _without(missing, because, f" within {timeout:g} s")
            present = sorted(set(range(self._cluster.world)) - absent)
            commit = member.commit(staged, because, present)
        finally:  # a notice at the same step asks what came of it
            if commit is None:
                del self._newest[member.commits.token]
            if self._cluster.world > 1:
                key, done = f"{self._prefix}/{name}/commit", commit is not None
                self._runtime.insert(key, keys.encode(done), lambda held: None)
        return commit

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
        key = f"{self._prefix}/{name}/commit"
        told = answer(
            lambda then: self._runtime.get_each([key], lambda _, text: then(text)),
            timeout,
        )
        return told is not None and keys.decode(Key.DONE, told)[0] is True

    def _absent(self, name: str, timeout: float) -> set[int]:
        """Waits for the others' parts; returns whose never came."""
        others = range(1, self._cluster.world)
        if not others:
            return set()
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
        gathering.give_up(frozenset(self._final), "its training is over")
        late = gathering.wait(timeout)
        gathering.give_up(late, f"no part within {timeout:g} s")
        return absent | late

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


@dataclasses.dataclass(eq=False)
class RoundSave:
    """One round's save; main thread.

    Args:
        members: the open ones.
        coordinator: this worker's.
        collective: knows which members' newest save is a commit of this step already.
        clock: measures.
    """

    members: Members
    coordinator: Coordinator
    collective: CollectiveSaves
    clock: Clock
    _began: float = 0.0
    _staged: Sequence[tuple[Member, Staged]] = ()

    def stage(self, stages: Stages) -> bool:
        """Writes this worker's part; whether it could."""
        name = f"round-{self.coordinator.state.round}"
        self._began = self.clock.monotonic()
        due = [member for member in self.members if member.has_moved]
        if not due:
            limit, stands = self.coordinator.deadlines.left, self.collective.stands
            due = [each for each in self.members if not stands(each, limit)]
        try:
            self._staged = [(m, stages.get(m, m.stage)(name)) for m in due]
        except Exception as error:  # noqa: BLE001 - told to all workers; all leave
            self._failed(error)
            return False
        return True

    def mark(self, workers: tuple[int, ...], steps_follow: bool) -> CommitKind:
        """Makes what was staged durable; on the chief.

        Args:
            workers: whose parts are there.
            steps_follow: whether training can go on after it.

        Returns:
            What all do then.
        """
        c, staged = self.coordinator, self._staged
        because = "preemption"
        if c.state.notice is NoticeKind.PERIODIC:
            because = "periodic"
            if len(workers) < self.coordinator.settings.world:
                return self._drop(workers)
        try:
            commits = [m.commit(part, because, workers) for m, part in staged]
        except Exception as error:  # noqa: BLE001 - told to all workers; all leave
            self._failed(error)
            return CommitKind.NONE
        done = [commit for commit in commits if commit is not None]
        extra: keys.Extra = dict(c.commit_extra) if not staged else {}
        if done:
            extra = {"step": done[0].step, "path": done[0].path}
        if staged:
            c.deadlines.save_seconds = self.clock.monotonic() - self._began
            extra["save_seconds"] = c.deadlines.save_seconds
        if staged and not done:
            extra["note"] = "save_fn returned no path: what it saved is not verified"
        c.extra[Key.COMMIT] = extra
        kind = c.commit_kind(steps_follow=steps_follow)
        if kind is CommitKind.TRAIN_ON and because == "preemption" and done:
            log.warning(
                "tfpreempt: step %d is committed; training goes on while the grace "
                "lasts",
                done[0].step,
            )
        return kind

    def _drop(self, workers: tuple[int, ...]) -> CommitKind:
        """Nobody has to leave, so the last commit, which is whole, is worth more than a
        newer one without somebody's generators and data position."""
        for member, part in self._staged:
            member.commits.discard(part)
        missing = sorted(set(range(self.coordinator.settings.world)) - set(workers))
        self.members.fault("periodic save", _without(missing, "periodic"))
        return CommitKind.NONE

    def _failed(self, error: Exception) -> None:
        log.error("tfpreempt: the checkpoint could not be saved", exc_info=error)
        c = self.coordinator
        reason = f"worker {c.settings.worker}: {type(error).__name__}: {error}"
        c.lost_because = reason
        self.members.record(Fault(where="save", error=reason))
        c.extra[Key.COMMIT] = c.extra[Key.DONE] = {"reason": reason}


def _without(workers: Sequence[int], because: str, within: str = "") -> SaveError:
    return SaveError(
        f"no part of the {because} save came from worker(s) {list(workers)}{within}; "
        "it is dropped, the last commit stands. Look at the logs of those workers."
    )
