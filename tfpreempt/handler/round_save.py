"""This worker's part in the save of a round: stage, and on the chief the marker."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tfpreempt.checkpoint.payload import Staged
from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.events import CommitKind, Key, NoticeKind
from tfpreempt.core.clock import Clock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Fault
from tfpreempt.errors import SaveError
from tfpreempt.handler.member import Member
from tfpreempt.handler.members import Members
from tfpreempt.handler.saving import CollectiveSaves

log = logging.getLogger(__name__)

Stage = Callable[[Member, str], Staged]
"""Writes a member's part of the save of a name."""


def stage_plain(member: Member, name: str) -> Staged:
    """Writes it without anything from the user."""
    return member.stage(name)


class RoundSave:
    """One round's save; main thread.

    Args:
        cluster: who the workers are.
        members: the open ones.
        coordinator: this worker's.
        collective: knows which members' newest save is a commit of this step already.
        clock: measures.
    """

    def __init__(
        self,
        cluster: Cluster,
        members: Members,
        coordinator: Coordinator,
        collective: CollectiveSaves,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._members = members
        self._coordinator = coordinator
        self._collective = collective
        self._clock = clock
        self._began = clock.monotonic()
        self._staged: list[tuple[Member, Staged]] = []

    def stage(self, stage: Stage) -> bool:
        """Writes this worker's part; whether it could."""
        name = f"round-{self._coordinator.state.round}"
        self._began = self._clock.monotonic()
        due = [member for member in self._members if member.has_moved]
        if not due:
            limit = max(0.0, self._coordinator.deadlines.left)
            stands = self._collective.stands
            due = [each for each in self._members if not stands(each, limit)]
        try:
            self._staged = [(member, stage(member, name)) for member in due]
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
        c, staged = self._coordinator, self._staged
        because = "preemption"
        if c.state.notice is NoticeKind.PERIODIC:
            because = "periodic"
            if len(workers) < self._cluster.world:
                return self._drop(workers)
        try:
            commits = [m.commit(part, because, workers) for m, part in staged]
        except Exception as error:  # noqa: BLE001 - told to all workers; all leave
            self._failed(error)
            return CommitKind.NONE
        seconds = self._clock.monotonic() - self._began
        done = [commit for commit in commits if commit is not None]
        extra: keys.Extra = dict(c.commit_extra) if not staged else {}
        if done:
            extra = {"step": done[0].step, "path": done[0].path}
        if staged:
            extra["save_seconds"] = c.deadlines.save_seconds = seconds
        if staged and not done:
            extra["note"] = "save_fn returned no path: what it saved is not verified"
        c.attach(Key.COMMIT, extra)
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
        missing = sorted(set(range(self._cluster.world)) - set(workers))
        error = SaveError(
            f"no part of the periodic save came from worker(s) {missing}; it is "
            "dropped, the last commit stands. Look at the logs of those workers."
        )
        self._members.fault("periodic save", error)
        return CommitKind.NONE

    def _failed(self, error: Exception) -> None:
        log.error("tfpreempt: the checkpoint could not be saved", exc_info=error)
        reason = f"worker {self._cluster.worker}: {type(error).__name__}: {error}"
        self._coordinator.lost_because = reason
        self._members.record(Fault(where="save", error=reason))
        self._coordinator.attach(Key.COMMIT, {"reason": reason})
        self._coordinator.attach(Key.DONE, {"reason": reason})
