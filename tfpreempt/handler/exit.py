"""The way out of the process: by a commit, a loss, an error, a deadline, or the end."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import logging
import os
import threading
from collections.abc import Callable

from tfpreempt.coordination import events as ev
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.runtime import Runtime, answer
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Fault, Outcome
from tfpreempt.core.python import add_note
from tfpreempt.core.threads import OutOfTimeError, call_within
from tfpreempt.handler.interrupts import held_back
from tfpreempt.handler.lost_peers import describe_loss
from tfpreempt.handler.process_end import (
    LastExit,
    WatchedExit,
    exit_hard,
    keep_streams,
    skip_last_collections,
)
from tfpreempt.handler.remote_cluster import notice_was_served
from tfpreempt.handler.run import HANDS_IN, Members, Run
from tfpreempt.notice._signal_registry import REGISTRY

log = logging.getLogger(__name__)

LINGER = 30.0
"""Seconds from SystemExit to the program's end where no deadline was told."""

SHORTEST = 0.5
"""Seconds for that in any case; and for the journal, on storage that may hang."""

_LONGEST = 300
"""Characters of an error in the journal; the program's log has all of it."""


@dataclasses.dataclass(eq=False)
class ExitPath:
    """Ends this worker's part; one for each process.

    Args:
        cluster: who the workers are.
        members: the open handlers, oldest first.
        coordinator: this worker's.
        finish_save: waits for the save that is under way beside the main thread, for
            so many seconds at most; it commits nothing after that.

    Attributes:
        left: whether SystemExit is on its way.
        detached: whether main has raised, and the peers were told.
        is_over: whether the others have ended well, and would not come back.
        process: its number; a child that was forked has no part in its end.
    """

    cluster: Cluster
    members: Members
    coordinator: Coordinator
    finish_save: Callable[[float], None]
    left: bool = False
    detached: bool = False
    is_over: bool = False
    process: int = dataclasses.field(default_factory=os.getpid)
    _last_exit: LastExit | None = None

    @held_back(lambda: True)  # a copy may be under way
    def leave(self, outcome: Outcome, reason: str) -> None:
        """Leaves by the oldest handler's exit function; returns if that does."""
        members = list(self.members)
        if outcome is Outcome.FINISHED or not members:
            return
        keep_streams()
        committed = outcome is Outcome.COMMITTED
        if not committed:
            log.error(
                "tfpreempt: leaving, committed nothing at step %d; the last commit "
                "stands, and what was trained since is trained again. Reason: %s",
                members[0].step,
                reason or "unknown",
            )
        else:
            log.warning(
                "tfpreempt: step %d is committed; leaving to be started again",
                members[0].step,
            )
        self.left = True
        for member in members:
            member.left_at = member.step
        notice_was_served()
        REGISTRY.leave()
        atexit.register(skip_last_collections)
        try:
            self.finish_save(self.coordinator.deadlines.left)
            mirrored = self.finish_mirrors(members)
            self._put_away(members, outcome, reason)
            end = functools.partial(
                members[0].config.leave, committed, self.cluster, mirrored=mirrored
            )
            if threading.current_thread() is threading.main_thread():
                end()
            else:  # SystemExit would end this thread alone, and the program with 0
                exit_hard(end)
        except SystemExit as exit:
            deadlines = self.coordinator.deadlines
            left = LINGER if deadlines.told is None else max(SHORTEST, deadlines.left)
            is_answered = self.cluster.world == 1 or not self.coordinator.lost_because
            if type(exit) is SystemExit:
                exit = WatchedExit(exit.code)
            self._last_exit = LastExit(exit, left, can_reach_all=is_answered)
            raise exit
        except BaseException:  # of an exit function that restarts in this process
            REGISTRY.stay()
            raise
        atexit.unregister(skip_last_collections)
        self.come_back()  # the exit function returned: training goes on
        for member in members:
            if member.directory.mirror is not None:
                member.directory.mirror.resume()

    def finish_mirrors(self, members: list[Run], limit: float | None = None) -> bool:
        """Waits for the copies of the newest commits.

        Args:
            members: whose.
            limit: seconds for each; None: what the notice leaves.

        Returns:
            Whether all are whole.
        """
        are_whole = True
        for member in members:
            mirror = member.directory.mirror
            if mirror is None:
                continue
            left = self.coordinator.deadlines.left if limit is None else limit
            if mirror.finish(left):
                continue
            are_whole = False
            status = mirror.status
            why = f": {status.fault}" if status.fault else ""
            late = f"the copy of step {status.newest} in {status.uri} was not whole"
            member.record(Fault(where="mirror", error=f"{late} in time{why}"))
        return are_whole

    def finish_copy(self, member: Run, timeout: float | None) -> None:
        """Training is over: waits for the copy of its last commit.

        A notice that comes meanwhile shortens the wait. If the copy is not whole then,
        the process is to be started again, so that it gets whole.

        Args:
            member: the handler.
            timeout: seconds; None: while it gets on.
        """
        if member.directory.wait_for_mirror(timeout):
            return
        is_noticed = self.coordinator.deadlines.at is not None
        limit = None if is_noticed else 0.0
        if not self.finish_mirrors([member], limit) and is_noticed:
            self.leave(Outcome.COMMITTED, "training is over, its copy is not whole")

    def come_back(self) -> None:
        """The process is not on its way out any more."""
        self.left = False
        if self._last_exit is not None:
            self._last_exit.stop_event.set()
        REGISTRY.stay()

    def overrun(self, why: str) -> None:
        """No boundary comes in time: ends the process from this thread."""
        members = list(self.members)
        is_forked = os.getpid() != self.process
        is_out = self.left or self.detached or self.is_over
        if is_out or is_forked or not members:
            return
        keep_streams()
        log.error(
            "tfpreempt: %s; the process ends now. The last commit stands, and what was "
            "trained since is trained again. If steps or evaluations take this long, "
            "call save_checkpoint_if_preempted() within them.",
            why,
        )
        self._put_away(members, Outcome.LOST, why)
        self.left = True
        exit_hard(lambda: members[0].config.leave(False, self.cluster))
        self.left = False

    def _put_away(self, members: list[Run], outcome: Outcome, why: str) -> None:
        """Records the exit, and lets go of leases: the next start need not wait.

        Storage that hangs is what may have kept a boundary, or a commit, from coming.
        """
        deadlines = self.coordinator.deadlines
        limit = max(SHORTEST, deadlines.left)
        if deadlines.told is not None:
            left = deadlines.told - self.coordinator.clock.monotonic()
            limit = min(limit, max(0.05, left / 2))

        def put_away() -> None:
            for member in members:
                member.record_exit(outcome, why)
                member.release()

        try:
            call_within(limit, put_away)
        except OutOfTimeError:
            log.error(
                "tfpreempt: the journal lacks this: its disk did not answer in %.2f s",
                limit,
            )
            return
        for member in members:
            if member.directory.mirror is not None:
                limit = min(HANDS_IN, deadlines.left / 2)
                member.directory.mirror.hand_in_journal(limit)

    def fail(self, error: BaseException, peer_is_gone: bool = False) -> None:
        """Main raises; peers are told. Returns if the error is to be raised.

        Args:
            error: what the step raised.
            peer_is_gone: whether it looks like the loss of another worker, which after
                a notice is not an error but the expected end.
        """
        coordinator, lost = self.coordinator, ""
        if peer_is_gone:
            where = "".join(f" {member.step + 1}" for member in list(self.members)[:1])
            lost = describe_loss(error, self.cluster, f"step{where}")
        mine = f"worker {self.cluster.worker}: {type(error).__name__}: {error}"
        coordinator.lost_because = coordinator.lost_because or lost or mine
        if not peer_is_gone:
            self.detached = True
            coordinator.feed(ev.Detached())
            return
        coordinator.feed(ev.StepFailed())
        match coordinator.wait():
            case ev.Leave(outcome):
                self.leave(outcome, coordinator.lost_because)
                coordinator.feed(ev.NextRound())
            case _:
                self.detached = True
                if coordinator.deadlines.may_go:  # trained on after a commit
                    self.leave(Outcome.LOST, coordinator.lost_because)
                if (why := coordinator.lost_because) != mine:
                    add_note(error, f"tfpreempt: the last commit stands: {why}")


def describe(error: BaseException) -> str:
    """An error in one line, for the journal."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    line = f"{kind}: {text}" if text else kind
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def tell_peers(
    worker: int,
    runtime: Runtime,
    key: str,
    error: BaseException,
    send: Callable[[str, int | None], None],
) -> None:
    """Makes the peers' collectives fail with this error, and names the first one.

    Args:
        worker: who this is.
        runtime: access to the store.
        key: insert-once: the first failure of this incarnation.
        error: what is about to be raised here; gets a note if a peer failed first.
        send: tells the cluster a message and TensorFlow's error code, if any.
    """
    mine = f"{type(error).__name__}: {error}"
    record = {"worker": worker, "error": mine[:2000]}
    tell = functools.partial(runtime.insert, key, json.dumps(record))
    first = answer(tell, 2.0)
    if first is None:
        return  # the store does not answer, and reporting would hold the GIL
    if (told := json.loads(first)) != record:
        add_note(error, f"worker {told['worker']} failed first: {told['error']}")
    code = getattr(error, "error_code", None)
    message = getattr(error, "message", None) if code is not None else None
    message = message or f"worker {worker} raised {mine}"
    try:
        call_within(5.0, lambda: send(message, code))
    except Exception as failure:  # noqa: BLE001 - the error itself is raised anyway
        log.info("tfpreempt: peers could not be told of the error: %s", failure)
