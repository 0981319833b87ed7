"""The way out of the process: by a commit, a loss, an error, a deadline, or the end."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable

from tfpreempt.coordination import events as ev
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.rendezvous import bounded
from tfpreempt.coordination.runtime import Runtime, publish
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Exit, Outcome
from tfpreempt.errors import UsageError, WaitTimeoutError
from tfpreempt.handler.interrupts import held_back
from tfpreempt.handler.member import Member
from tfpreempt.handler.members import Members
from tfpreempt.handler.process_end import (
    LastExit,
    exit_hard,
    flush_streams,
    keep_streams,
    skip_last_collections,
)
from tfpreempt.handler.remote_cluster import notice_was_served
from tfpreempt.notice._signal_registry import REGISTRY

log = logging.getLogger(__name__)


class ExitPath:
    """Ends this worker's part; one for each process.

    Args:
        cluster: who the workers are.
        members: the open handlers, oldest first.
        left: seconds that a notice leaves for what comes after the commit.
        linger: seconds that it leaves the program for its own way out.
        is_noticed: whether there is a notice that was not served yet.
    """

    def __init__(
        self,
        cluster: Cluster,
        members: Members,
        left: Callable[[], float],
        linger: Callable[[], float],
        is_noticed: Callable[[], bool],
    ) -> None:
        self.left = False  # SystemExit is on its way
        self.detached = False  # raised; peers were told
        self._cluster = cluster
        self._members = members
        self._last_steps: weakref.WeakKeyDictionary[Member, int]
        self._last_steps = weakref.WeakKeyDictionary()
        self._left = left
        self._linger = linger
        self._last_exit: LastExit | None = None
        self._is_noticed = is_noticed
        self._process = os.getpid()

    @held_back(lambda: True)  # a copy may be under way
    def leave(self, outcome: Outcome, reason: str) -> None:
        """Leaves by the oldest handler's exit function; returns if that does."""
        members = list(self._members)
        if outcome is Outcome.FINISHED or not members:
            return
        keep_streams()
        committed = outcome is Outcome.COMMITTED
        if not committed:
            log.error(
                "tfpreempt: this preemption committed nothing; the last commit stands. "
                "Reason: %s",
                reason or "unknown",
            )
        else:
            log.warning(
                "tfpreempt: step %d is committed; leaving to be started again",
                members[0].step,
            )
        self.left = True
        self._last_steps.update({member: member.step for member in members})
        notice_was_served()
        REGISTRY.leave()
        atexit.register(skip_last_collections)
        try:
            mirrored = self.finish_mirrors(members)
            self._record(members, outcome, reason)
            if threading.current_thread() is threading.main_thread():
                members[0].leave(committed, mirrored)
            else:  # SystemExit would end this thread alone, and the program with 0
                exit_hard(lambda: members[0].leave(committed, mirrored))
        except SystemExit as exit:
            self._last_exit = LastExit(exit, self._linger())
            raise
        except BaseException:  # of an exit function that restarts in this process
            REGISTRY.stay()
            raise
        atexit.unregister(skip_last_collections)
        self.come_back()  # the exit function returned: training goes on

    def finish_mirrors(self, members: list[Member]) -> bool:
        """Gives the newest commits' copies what time is left; whether all are whole."""
        unfinished = [
            each for each in members if not each.finish_copy(max(0.0, self._left()))
        ]
        return not unfinished

    def finish_copy(self, member: Member, timeout: float | None) -> None:
        """Training is over: waits for the copy of its last commit.

        A notice that comes meanwhile shortens the wait. If the copy is not whole then,
        the process is to be started again, so that it gets whole.

        Args:
            member: the handler.
            timeout: seconds; None: while it gets on.
        """
        if member.commits.wait_for_mirror(timeout):
            return
        is_noticed = self._is_noticed()
        left = max(0.0, self._left()) if is_noticed else 0.0
        if not member.finish_copy(left) and is_noticed:  # which says what is missing
            self.leave(Outcome.COMMITTED, "training is over, its copy is not whole")

    def come_back(self) -> None:
        """The process is not on its way out any more."""
        self.left = False
        if self._last_exit is not None:
            self._last_exit.cancel()
        REGISTRY.stay()

    def has_left(self, member: Member) -> bool:
        """Whether its exit was served, and it has not trained on since.

        SystemExit was caught, or the exit function came back: another handler may go
        on from its commit.
        """
        return self._last_steps.get(member) == member.step

    def overrun(self, why: str) -> None:
        """No boundary comes in time: ends the process from this thread."""
        members = list(self._members)
        if self._is_over or not members:
            return
        keep_streams()
        log.error(
            "tfpreempt: %s; the process ends now and the last commit stands. If steps "
            "or evaluations take this long, call save_checkpoint_if_preempted() within "
            "them.",
            why,
        )
        try:  # storage that hangs is what may have kept the boundary from coming
            bounded(lambda: self._record(members, Outcome.LOST, why), 0.5, "recording")
        except WaitTimeoutError as error:
            log.error("tfpreempt: %s", error)
        self.left = True
        exit_hard(lambda: members[0].leave(False))
        self.left = False

    def fail(
        self, coordinator: Coordinator, error: BaseException, peer_is_gone: bool
    ) -> None:
        """Main raises; peers are told. Returns if the error is to be raised.

        Args:
            coordinator: this worker's.
            error: what the step raised.
            peer_is_gone: whether it looks like the loss of another worker, which after
                a notice is not an error but the expected end.
        """
        coordinator.lost_because = coordinator.lost_because or (
            f"worker {self._cluster.worker}: {type(error).__name__}: {error}"
        )
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

    def report(
        self,
        runtime: Runtime,
        key: str,
        error: BaseException,
        send: Callable[[str, int | None], None],
    ) -> None:
        """Makes the peers' collectives fail with this error, and names the first one.

        Args:
            runtime: access to the store.
            key: insert-once: the first failure of this incarnation.
            error: what is about to be raised here; gets a note if a peer failed first.
            send: tells the cluster a message and TensorFlow's error code, if any.
        """
        mine = f"{type(error).__name__}: {error}"
        record = {"worker": self._cluster.worker, "error": mine[:2000]}
        first = publish(runtime, key, json.dumps(record), wait=2.0)
        if first is None:
            return  # the store does not answer, and reporting would hold the GIL
        if (told := json.loads(first)) != record:
            error.add_note(f"worker {told['worker']} failed first: {told['error']}")
        code = getattr(error, "error_code", None)
        message = getattr(error, "message", None) if code is not None else None
        message = message or f"worker {self._cluster.worker} raised {mine}"
        try:
            bounded(lambda: send(message, code), 5.0, "reporting an error")
        except Exception as failure:  # noqa: BLE001 - the error itself is raised anyway
            log.info("tfpreempt: peers could not be told of the error: %s", failure)

    def check(self) -> None:
        """Refuses to go on after an error that peers were told of.

        Raises:
            UsageError: there was one.
        """
        if self.detached:
            raise UsageError(
                "an error was raised in run() on this worker and reported to all "
                "workers; the cluster cannot go on. Let the process end with the "
                "error, and start all workers again."
            )

    def at_exit(
        self,
        raised: Callable[[BaseException], None],
        close: Callable[[Member, float], None],
        limit: float,
    ) -> None:
        """The interpreter ends while members are open: that is the last boundary.

        Args:
            raised: tells the peers of an error.
            close: makes the last boundary of a member.
            limit: seconds to wait for workers that still train.
        """
        members = list(self._members)
        if self._is_forked:
            return
        flush_streams()
        if self.left or not members:
            return
        error = getattr(sys, "last_value", None)
        if error is not None and not self.detached:
            raised(error)
        if error is not None or self.detached:
            self.finish_mirrors(members)
            return

        def close_all() -> None:
            is_saved = True
            for member in members:
                try:
                    close(member, limit)
                except Exception as error:
                    log.error("tfpreempt: the end is not saved", exc_info=error)
                    is_saved = False
            if not is_saved:
                sys.exit(1)

        exit_hard(close_all)

    @property
    def _is_over(self) -> bool:
        """Nothing is left to do here; a forked child has no part in it at all."""
        return self.left or self.detached or self._is_forked

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _record(self, members: list[Member], outcome: Outcome, why: str) -> None:
        for member in members:
            member.record(
                Exit(outcome=outcome, code=None, step=member.step, detail=why)
            )
