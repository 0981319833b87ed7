"""One process's part in the agreement, shared by all handlers in it.

Boundaries are counted for the process, not for a handler, because the process is what is
preempted: at the agreed boundary every open handler saves. The session owns the hub, the
coordinator and the way out; a handler owns its checkpoint and its notice sources.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tfpreempt.clock import Clock, SystemClock
from tfpreempt.cluster import Cluster
from tfpreempt.coordination import events as ev
from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.events import CommitKind, Key, NoticeKind
from tfpreempt.coordination.rendezvous import bounded
from tfpreempt.coordination.runtime import Threads
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.errors import (
    SaveError,
    StoreGoneError,
    UsageError,
)
from tfpreempt.events import Commit, Event, Exit, Fault, Outcome

log = logging.getLogger(__name__)


class Participant(Protocol):
    """What a session needs of a handler. All on the main thread unless said otherwise."""

    @property
    def step(self) -> int:
        """The step that a save would carry; any thread."""

    def stage(self, name: str) -> Any:
        """Writes this worker's part of the save of that name."""

    def commit(
        self, staged: Any, because: str, workers: Sequence[int]
    ) -> Commit | None:
        """Makes it durable (chief)."""

    def discard(self, staged: Any) -> None:
        """Throws a staged part away (chief)."""

    def needs_peers(self) -> bool:
        """Whether `stage` needs the other workers."""

    def record(self, event: Event) -> None:
        """Writes to the journal; any thread."""

    def leave(self, committed: bool) -> None:
        """Ends the process, by SystemExit, or returns; any thread."""

    def quiet(self) -> None:
        """Stops listening for notices; the process is about to end."""

    def close(self, limit: float | None = None) -> None:
        """The last boundary."""


class Session:
    """The agreement as the main thread sees it.

    Args:
        cluster: who the workers are.
        store: shared by the workers of this incarnation.
        incarnation: namespace of the keys.
        save_timeout: seconds that waiting may take where no deadline is known.
        clock: for deadlines and measurements.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: KeyValueStore,
        incarnation: str,
        save_timeout: float,
        clock: Clock | None = None,
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.incarnation = incarnation
        self.save_timeout = save_timeout
        self.clock: Clock = clock or SystemClock()
        self._members: list[weakref.ref[Participant]] = []
        self._handlers_made = 0
        self._saves = 0
        self._started: tuple[float, int] | None = None
        self.left = False  # on its way out of the process
        self.detached = False  # raised; peers were told
        settings = ev.Settings(cluster.worker, cluster.world, cluster.world > 1)
        self.coordinator = Coordinator(
            settings,
            incarnation,
            Threads(store, self.clock, self._store_gone),
            self.clock,
            save_timeout=save_timeout,
            record=self.record,
            on_overrun=self._overrun,
        )
        self.coordinator.step_seconds = self._step_seconds
        self.gate = self.coordinator.gate
        self.coordinator.start()
        atexit.register(self._at_exit)

    # --- handlers --------------------------------------------------------------------

    def next_prefix(self) -> str:
        """Namespace for the start of the next handler; equal on all workers."""
        self._handlers_made += 1
        return f"tfpreempt/{self.incarnation}/start/{self._handlers_made}"

    def join(self, member: Participant) -> None:
        """A handler opens."""
        self._members.append(weakref.ref(member))

    def part(self, member: Participant) -> None:
        """A handler is closed."""
        self._members = [ref for ref in self._members if ref() not in (None, member)]

    def members(self) -> list[Participant]:
        """The open handlers, oldest first."""
        return [member for ref in self._members if (member := ref()) is not None]

    def record(self, event: Event) -> None:
        """Writes an event to every open handler's journal; any thread."""
        for member in self.members():
            member.record(event)

    # --- boundaries ------------------------------------------------------------------

    def look(self) -> None:
        """The slow path of a boundary: the next interval is counted, the flag is up.

        Returns when that interval may start; ends the process if it must.
        """
        while self.gate.flag:
            self.gate.started -= 1
            verdict = self._settle()
            self.gate.started += 1
            if verdict is ev.Proceed:
                return

    def finish(self, limit: float | None) -> None:
        """The last boundary: waits until all workers are through, or a notice is served.

        Args:
            limit: seconds after which the wait for the others is given up; None waits
                as long as they live.
        """
        while self._settle(last=True, limit=limit) is not ev.Leave:
            pass

    def _settle(
        self, last: bool = False, limit: float | None = None
    ) -> type[ev.Verdict] | None:
        """Stands at a boundary until the verdict on it; returns the verdict's type."""
        c = self.coordinator
        c.set_saves_alone(not any(member.needs_peers() for member in self.members()))
        staged: list[tuple[Participant, Any]] = []
        c.feed(ev.Boundary(self.gate.started, last))
        while True:
            match c.wait(limit):
                case None:
                    log.warning(
                        "tfpreempt: other workers still train after %s s; this one "
                        "leaves without waiting any longer",
                        limit,
                    )
                    return ev.Leave
                case ev.Save(_, _, repeat):
                    parts = [] if repeat else self._stage()
                    staged = parts or []
                    c.feed(ev.Saved(parts is not None))
                case ev.WriteMarker(workers):
                    kind = self._mark(staged, workers)
                    c.feed(ev.Committed(kind))
                case ev.Leave(outcome):
                    self._leave(outcome)
                    c.feed(ev.NextRound(served=outcome is not Outcome.FINISHED))
                    return ev.Leave
                case verdict:
                    return type(verdict)

    def _stage(self) -> list[tuple[Participant, Any]] | None:
        """This worker's part of a round's save; None if it could not be written."""
        name = f"r{self.coordinator.state.round}"
        self._save_started = self.clock.monotonic()
        try:
            return [(member, member.stage(name)) for member in self.members()]
        except Exception as error:  # noqa: BLE001 - told to all workers; all leave
            self._save_failed(error)
            return None

    def _mark(
        self, staged: list[tuple[Participant, Any]], workers: tuple[int, ...]
    ) -> CommitKind:
        because = "preemption"
        if self.coordinator.state.notice is NoticeKind.PERIODIC:
            because = "periodic"
        try:
            commits = [m.commit(part, because, workers) for m, part in staged]
        except Exception as error:  # noqa: BLE001 - told to all workers; all leave
            self._save_failed(error)
            return CommitKind.NONE
        seconds = self.clock.monotonic() - self._save_started
        done = [commit for commit in commits if commit is not None]
        extra: keys.Extra = dict(self.coordinator.commit_extra) if not staged else {}
        if done:
            extra = {"step": done[0].step, "path": done[0].path}
        if staged:
            extra["save_seconds"] = self.coordinator.save_seconds = seconds
        self.coordinator.attach(Key.COMMIT, extra)
        return self.coordinator.commit_kind()

    def _save_failed(self, error: Exception) -> None:
        log.error("tfpreempt: the checkpoint could not be saved", exc_info=error)
        reason = f"worker {self.cluster.worker}: {type(error).__name__}: {error}"
        self.coordinator.lost_because = reason
        self.record(Fault(where="save", error=reason))
        self.coordinator.attach(Key.COMMIT, {"reason": reason})
        self.coordinator.attach(Key.DONE, {"reason": reason})

    # --- periodic saves --------------------------------------------------------------

    def save_together(
        self, members: Sequence[Participant], because: str
    ) -> list[Commit]:
        """All workers save now; every worker calls this at the same place.

        Returns:
            The commits, on the chief; empty elsewhere.

        Raises:
            SaveError: (chief) a worker's part did not come in time.
            CheckpointError: this worker's part could not be written.
        """
        self._saves += 1
        staged = [(member, member.stage(f"s{self._saves}")) for member in members]
        if self.cluster.world > 1:
            prefix = f"tfpreempt/{self.incarnation}/save/{self._saves}"
            if not self.cluster.is_chief:
                self.coordinator.tell(f"{prefix}/{self.cluster.worker}")
                return []
            others = range(1, self.cluster.world)
            missing = self.coordinator.hear(
                {j: f"{prefix}/{j}" for j in others}, self.save_timeout
            )
            if missing:
                for member, part in staged:
                    member.discard(part)
                raise SaveError(
                    f"no sign within {self.save_timeout:g} s from worker(s) "
                    f"{sorted(missing)} that their part of the {because} save is "
                    "written; this save is dropped, the last commit stands"
                )
        workers = range(self.cluster.world)
        commits = [member.commit(part, because, workers) for member, part in staged]
        return [commit for commit in commits if commit is not None]

    def save_each(self, seconds: float, member: Participant) -> None:
        """On the chief: asks for a commit whenever the newest one is this old."""
        mine = weakref.ref(member)

        def alarm() -> None:
            if mine() in self.members():
                if self.gate.started > 0:
                    self.coordinator.periodic()
                self.save_each(seconds, member)

        self.coordinator.alarm(self.clock.monotonic() + seconds, alarm)

    # --- errors ----------------------------------------------------------------------

    def step_failed(self, error: BaseException, peer_is_gone: bool) -> None:
        """Main raises; peers are told. Returns if the error is to be raised.

        Args:
            error: what the step raised.
            peer_is_gone: whether it looks like the loss of another worker, which under
                a notice is not an error but the expected end.
        """
        c = self.coordinator
        c.lost_because = c.lost_because or (
            f"worker {self.cluster.worker}: {type(error).__name__}: {error}"
        )
        if not peer_is_gone:
            self.detached = True
            c.feed(ev.Detached())
            return
        c.feed(ev.StepFailed())
        match c.wait():
            case ev.Leave(outcome):
                self._leave(outcome)
                c.feed(ev.NextRound())
            case _:
                self.detached = True

    def report(
        self, error: BaseException, send: Callable[[str, int | None], None]
    ) -> None:
        """Makes the peers' collectives fail with this error, and names the first one.

        Args:
            error: what is about to be raised here; gets a note if a peer failed first.
            send: tells the cluster a message and TensorFlow's error code, if any.
        """
        mine = f"{type(error).__name__}: {error}"
        record = {"worker": self.cluster.worker, "error": mine[:2000]}
        first = self.coordinator.publish(
            f"tfpreempt/{self.incarnation}/failure", json.dumps(record), wait=2.0
        )
        if (
            first is not None
            and (told := json.loads(first))["worker"] != record["worker"]
        ):
            error.add_note(f"worker {told['worker']} failed first: {told['error']}")
        code = getattr(error, "error_code", None)
        message = getattr(error, "message", None) if code is not None else None
        message = message or f"worker {self.cluster.worker} raised {mine}"
        try:
            bounded(
                lambda: send(message, code), 5.0, "reporting an error to the cluster"
            )
        except Exception as failure:  # noqa: BLE001 - the error itself is raised anyway
            log.info("tfpreempt: peers could not be told of the error: %s", failure)

    def report_fault(self, where: str, error: Exception) -> None:
        """Training survives this; it is logged and written to the journal."""
        log.error("tfpreempt: %s failed: %s", where, error)
        self.record(Fault(where=where, error=str(error)))

    # --- the way out -----------------------------------------------------------------

    def _leave(self, outcome: Outcome) -> None:
        """Ends the process by the oldest handler's exit; FINISHED returns."""
        members = self.members()
        if outcome is Outcome.FINISHED or not members:
            return
        committed = outcome is Outcome.COMMITTED
        detail = "" if committed else self.coordinator.lost_because
        if not committed:
            log.error(
                "tfpreempt: this preemption committed nothing; the last commit stands. "
                "Reason: %s",
                detail or "unknown",
            )
        for member in members:
            member.record(
                Exit(outcome=outcome, code=None, step=member.step, detail=detail)
            )
        self.left = True
        members[0].leave(committed)
        self.left = False  # the exit function returned: training goes on

    def _overrun(self) -> None:
        """No boundary came before the deadline: ends the process from the alarm thread."""
        members = self.members()
        if self.left or not members:
            return
        log.error(
            "tfpreempt: no boundary was reached before the deadline; the process ends "
            "now and the last commit stands. If steps or evaluations take this long, "
            "call save_checkpoint_if_preempted() within them."
        )
        for member in members:
            member.record(
                Exit(
                    outcome=Outcome.LOST,
                    code=None,
                    step=member.step,
                    detail="no boundary was reached before the deadline",
                )
            )
        self.left = True
        exit_hard(lambda: members[0].leave(False))
        self.left = False

    def _at_exit(self) -> None:
        """The interpreter ends while handlers are open: the last boundary."""
        if self.left:
            return
        members = self.members()
        if not members:
            return
        error = getattr(sys, "last_value", None)
        if error is not None or self.gate.busy:
            self.step_failed(error or SystemExit(), peer_is_gone=False)
            return
        exit_hard(lambda: self._close_all(members))

    def _close_all(self, members: Sequence[Participant]) -> None:
        for member in members:
            member.close(self.save_timeout)

    def _store_gone(self, error: StoreGoneError) -> None:
        self.coordinator.store_gone(error)

    # --- measurements ----------------------------------------------------------------

    def begin_measuring(self) -> None:
        """Called at a boundary after the first, which traced the step function."""
        self._started = (self.clock.monotonic(), self.gate.started)

    def _step_seconds(self) -> float:
        """Mean seconds of an interval so far; 0 while there was none."""
        if self._started is None:
            return 0.0
        since, first = self._started
        intervals = max(1, self.gate.started - first)
        return (self.clock.monotonic() - since) / intervals


def exit_hard(leave: Callable[[], Any]) -> None:
    """Runs what may raise SystemExit where that would not end the process."""
    try:
        leave()
    except SystemExit as exit:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # a closed stream has nothing left to say
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        os._exit(code)


_current: Session | None = None
_lock = threading.Lock()


def session_for(
    cluster: Cluster, make_store: Callable[[], KeyValueStore], save_timeout: float
) -> Session:
    """The session of this process, made at the first call.

    Raises:
        UsageError: this process belongs to another cluster already.
    """
    global _current
    with _lock:
        if _current is None:
            incarnation = os.environ.get("TFPREEMPT_INCARNATION") or "0"
            _current = Session(cluster, make_store(), incarnation, save_timeout)
        if _current.cluster != cluster:
            raise UsageError(
                f"this process already takes part in {_current.cluster}, and a second "
                f"handler names {cluster}; one process can belong to one cluster only"
            )
        _current.save_timeout = min(_current.save_timeout, save_timeout)
        return _current
