"""One process's part in the agreement, shared by all handlers in it.

Boundaries are counted for the process, not for a handler, because the process is what
is preempted: at the agreed boundary every open handler saves. The session owns the hub,
the coordinator and the way out; a handler its checkpoint and its notice sources.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfpreempt.checkpoint.layout import is_same
from tfpreempt.coordination import events as ev
from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import PREEMPTION, Coordinator
from tfpreempt.coordination.events import CommitKind, Key, NoticeKind
from tfpreempt.coordination.runtime import Threads
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit, Event, Fault, Outcome
from tfpreempt.errors import CheckpointError, SaveError, StoreGoneError, UsageError
from tfpreempt.handler.exit import Departure
from tfpreempt.handler.interrupts import held_back
from tfpreempt.handler.participant import Participant
from tfpreempt.handler.process_end import exit_hard, keep_streams, on_interpreter_end
from tfpreempt.handler.reading import is_of_data
from tfpreempt.handler.saving import JointSaves, repeat
from tfpreempt.notice.children import killed_children

log = logging.getLogger(__name__)

OPENS_WITHIN = 1.0
"""Seconds from a notice until its round is open; it takes milliseconds."""

HEARD_WITHIN = 0.05
"""Seconds from a signal until its source has told of it; it takes milliseconds."""

DIES_WITHIN = 0.05
"""Seconds in which a signal to a group has ended those who do not handle it."""


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
        self._saves = 0
        self._kept: dict[Participant, object] = {}  # their handlers, until closed
        self._handlers_made = 0
        self._started: tuple[float, int] | None = None
        self.departure = Departure(
            cluster,
            self.members,
            left=lambda: self.coordinator.deadlines.left,
            linger=lambda: self.coordinator.deadlines.linger,
            is_noticed=lambda: self.coordinator.deadlines.at is not None,
        )
        self._runtime = Threads(store, self.clock, self._store_gone)
        self._joint = JointSaves(cluster, incarnation, self._runtime)
        settings = ev.Settings(cluster.worker, cluster.world, cluster.world > 1)
        self.coordinator = Coordinator(
            settings,
            incarnation,
            self._runtime,
            self.clock,
            save_timeout=save_timeout,
            step_seconds=self._step_seconds,
            record=self.record,
            on_overrun=self.departure.overrun,
        )
        self.gate = self.coordinator.gate
        self.coordinator.start()
        on_interpreter_end(self._at_exit)

    # --- handlers --------------------------------------------------------------------

    def next_prefix(self) -> str:
        """Namespace for the start of the next handler; equal on all workers."""
        self._handlers_made += 1
        return f"tfpreempt/{self.incarnation}/start/{self._handlers_made}"

    def join(self, member: Participant) -> None:
        """A handler opens."""
        self.come_back()
        for other in self.members():
            if self._is_over(other) and is_same(other.directory, member.directory):
                other.give_way()
        self._members.append(weakref.ref(member))

    def in_use(self) -> list[str]:
        """Directories of open handlers; no other handler can have them."""
        return [each.directory for each in self.members() if not self._is_over(each)]

    def _is_over(self, member: Participant) -> bool:
        """Whether nobody trains on with it: it has left, or the last step failed."""
        has_failed = self.gate.failed == self.gate.started
        return has_failed or self.departure.has_left(member)

    def keep(self, member: Participant, handler: object) -> None:
        """Training has begun: a handler that nobody holds any more, in a program that
        never closes it, still gets its last boundary."""
        self._kept[member] = handler

    def part(self, member: Participant) -> None:
        """A handler is closed."""
        self._kept.pop(member, None)
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
        self.come_back()
        with self._undisturbed():
            while self.gate.flag:
                self.gate.started -= 1
                verdict = self._settle()
                self.gate.started += 1
                if verdict is ev.Proceed:
                    return

    def finish(self, limit: float | None) -> bool:
        """The last boundary: until all workers are through, or a notice is served.

        Args:
            limit: seconds after which the wait for the others is given up; None waits
                as long as they live.

        Returns:
            Whether all are through; False: given up, and the others were told.
        """
        keep_streams()
        self.come_back()
        self._joint.finishing()
        verdict: type[ev.Verdict] | None = ev.Resume
        with self._undisturbed():
            while verdict is ev.Resume:
                verdict = self._settle(last=True, limit=limit)
        if verdict is None:
            self._give_up("left early")
        return verdict is not None

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Ctrl-C does not break off what the notice that is up has begun."""
        with held_back(lambda: self.gate.flag):
            try:
                yield
            except KeyboardInterrupt:
                self._give_up("was interrupted")
                raise

    def _give_up(self, why: str) -> None:
        """This worker takes part no more, and the others are told."""
        self.coordinator.lost_because = f"worker {self.cluster.worker} {why}"
        self.departure.detached = True
        self.coordinator.feed(ev.Detached())

    def come_back(self) -> None:
        """SystemExit was caught (a notebook does): training goes on, as if the exit
        function had returned."""
        if self.departure.left:
            self.departure.come_back()
            self._kept.clear()  # what came before the exit is over
            if self.coordinator.state.main is ev.Main.ENDED:  # not where a peer went
                self.coordinator.feed(ev.NextRound())

    def _settle(
        self,
        last: bool = False,
        limit: float | None = None,
        *,
        steps_follow: bool = True,
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
                    return None
                case ev.Save(_, _, repeat):
                    parts = [] if repeat else self._stage()
                    staged = parts or []
                    c.feed(ev.Saved(parts is not None))
                case ev.WriteMarker(workers):
                    kind = self._mark(staged, workers, steps_follow)
                    c.feed(ev.Committed(kind))
                case ev.Leave(outcome):
                    note = str(c.commit_extra.get("note", ""))
                    self.departure.leave(outcome, c.lost_because or note)
                    c.feed(ev.NextRound(served=outcome is not Outcome.FINISHED))
                    return ev.Leave
                case verdict:
                    return type(verdict)

    def _stage(self) -> list[tuple[Participant, Any]] | None:
        """This worker's part of a round's save; None if it could not be written."""
        name = f"round-{self.coordinator.state.round}"
        self._save_started = self.clock.monotonic()
        members = self.members()
        due = [member for member in members if member.has_moved]
        if not due:
            limit = max(0.0, self.coordinator.deadlines.left)
            due = [each for each in members if not self._joint.stands(each, limit)]
        try:
            return [(member, member.stage(name)) for member in due]
        except Exception as error:  # noqa: BLE001 - told to all workers; all leave
            self._save_failed(error)
            return None

    def _mark(
        self,
        staged: list[tuple[Participant, Any]],
        workers: tuple[int, ...],
        steps_follow: bool,
    ) -> CommitKind:
        because = "preemption"
        if self.coordinator.state.notice is NoticeKind.PERIODIC:
            because = "periodic"
            if len(workers) < self.cluster.world:
                return self._drop(staged, workers)
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
            extra["save_seconds"] = self.coordinator.deadlines.save_seconds = seconds
        if staged and not done:
            extra["note"] = "save_fn returned no path: what it saved is not verified"
        self.coordinator.attach(Key.COMMIT, extra)
        kind = self.coordinator.commit_kind(steps_follow=steps_follow)
        if kind is CommitKind.TRAIN_ON and because == "preemption" and done:
            log.warning(
                "tfpreempt: step %d is committed; training goes on while the grace "
                "lasts",
                done[0].step,
            )
        return kind

    def _drop(
        self, staged: list[tuple[Participant, Any]], workers: tuple[int, ...]
    ) -> CommitKind:
        """Nobody has to leave, so the last commit, which is whole, is worth more than a
        newer one without somebody's generators and data position."""
        for member, part in staged:
            member.discard(part)
        missing = sorted(set(range(self.cluster.world)) - set(workers))
        error = SaveError(
            f"no part of the periodic save came from worker(s) {missing}; it is "
            "dropped, the last commit stands. Look at the logs of those workers."
        )
        self.departure.fault("periodic save", error)
        return CommitKind.NONE

    def _save_failed(self, error: Exception) -> None:
        log.error("tfpreempt: the checkpoint could not be saved", exc_info=error)
        reason = f"worker {self.cluster.worker}: {type(error).__name__}: {error}"
        self.coordinator.lost_because = reason
        self.record(Fault(where="save", error=reason))
        self.coordinator.attach(Key.COMMIT, {"reason": reason})
        self.coordinator.attach(Key.DONE, {"reason": reason})

    # --- without a notice ------------------------------------------------------------

    def save_together(self, member: Participant, because: str) -> Commit | None:
        """All workers save now; every worker calls this at the same place.

        Raises:
            CheckpointError: see `JointSaves.save`.
        """
        number = self.coordinator.state.round  # equal at the end of uneven workers too
        if because != "finished":
            self._saves += 1
            number = self._saves
        # Two handlers may end in one round: a mark for one is none for the other.
        name = f"{because}-{number}-{member.token}"
        with held_back(lambda: True):
            self.coordinator.is_saving = True
            try:
                commit = self._joint.save(member, name, because, self.save_timeout)
            finally:
                self.coordinator.is_saving = False
            if commit is not None:
                self.coordinator.deadlines.save_seconds = commit.save_seconds
            return commit

    def try_to_save(self, member: Participant) -> None:
        """A periodic save. A failure is logged and recorded, and training goes on."""
        try:
            self.save_together(member, "periodic")
        except CheckpointError as error:
            self.departure.fault("periodic save", error)

    def save_each(self, seconds: float, member: Participant) -> None:
        """On the chief: asks all for a commit every so many seconds."""

        def ask() -> None:
            if self.gate.started > 0:
                self.coordinator.periodic()

        repeat(
            self._runtime,
            self.clock,
            seconds,
            member,
            lambda member: member in self.members(),
            ask,
        )

    @property
    def is_whole(self) -> bool:
        """Whether no interval may be half done, while main is outside of `run()`."""
        return self.gate.started not in (self.gate.failed, self.gate.bare)

    def is_noticed(self, within: float = 0.0) -> bool:
        """Whether a preemption is to be served; main thread.

        Args:
            within: seconds in which it may still be heard of. Of one that was heard of
                other threads tell soon.
        """
        start, never = self.clock.monotonic(), threading.Event()
        while self.coordinator.state.notice not in PREEMPTION:
            since = self.coordinator.deadlines.since_notice
            is_opening = since is not None and since < OPENS_WITHIN
            if not is_opening and self.clock.monotonic() - start >= within:
                return False
            never.wait(0.01)
        return bool(self.members())

    def serve(self, error: Exception, is_whole: bool) -> bool:
        """Serves the notice that an error came under, if there is one.

        No interval can follow, so a state that is whole is committed here, if no other
        worker is to begin one. Data that fail in the middle of a step are as good as
        a lost worker.

        Args:
            error: of a step, or from outside of steps.
            is_whole: whether the state is that of a boundary.

        Returns:
            Whether it was served, and the exit function came back.
        """
        killed, is_alone = killed_children(), self.cluster.world == 1
        if killed:
            error.add_note(f"children of this process were killed: {', '.join(killed)}")
        is_reading = bool(killed) or is_of_data(error)
        within = OPENS_WITHIN if killed else HEARD_WITHIN if is_reading else 0.0
        if not (is_whole or (is_alone and is_reading)) or not self.is_noticed(within):
            return False
        log.error("tfpreempt: taken for a consequence of the notice", exc_info=error)
        verdict = None
        if is_whole:
            with self._undisturbed():
                verdict = self._settle(last=is_alone, steps_follow=False)
        if verdict is not ev.Leave:
            self.raised(error, peer_is_gone=True)
        return True

    def name_killed_children(self) -> None:
        """A notice has come, perhaps by a signal to others too; any thread."""

        def look() -> None:
            if killed := ", ".join(killed_children()):
                log.warning(
                    "tfpreempt: children of this process were killed: %s. If they "
                    "read data, the step that waits for these hangs or fails. Have the "
                    "signal sent to the main process alone (docs/platforms.md)",
                    killed,
                )
                self.record(Fault(where="children", error=f"killed: {killed}"))

        self._runtime.at(self.clock.monotonic() + DIES_WITHIN, look)

    def raised(
        self,
        error: BaseException,
        peer_is_gone: bool = False,
        send: Callable[[str, int | None], None] | None = None,
    ) -> None:
        """Tells the peers of an error that main is about to raise; see `Departure`."""
        self.departure.fail(self.coordinator, error, peer_is_gone)
        if send is not None:
            key = f"tfpreempt/{self.incarnation}/failure"
            self.departure.report(self._runtime, key, error, send)

    def _at_exit(self) -> None:
        self.departure.at_exit(self._died, self.save_timeout)

    def _died(self, error: BaseException) -> None:
        """The program ends by an error that passed no handler."""
        is_whole = self.is_whole and not any(m.is_amid for m in self.members())
        if isinstance(error, Exception):
            exit_hard(lambda: self.serve(error, is_whole))
        self.raised(error)

    def _store_gone(self, error: StoreGoneError) -> None:
        self.coordinator.store_gone(error)

    def set_save_timeout(self, seconds: float) -> None:
        """The newest handler's word holds."""
        self.save_timeout = seconds
        self.coordinator.deadlines.save_timeout = seconds

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
        _current.set_save_timeout(save_timeout)
        return _current


def _swap(new: Session | None) -> Session | None:
    """Puts a session in the place of this process's, which is returned."""
    global _current
    with _lock:
        before, _current = _current, new
    return before


@contextlib.contextmanager
def new_process() -> Iterator[None]:
    """For tests: inside, no handler was made in this process yet.

    Handlers that are still open at the end take part no more, without a last commit.
    What was before goes on where it was.
    """
    before = _swap(None)
    try:
        yield
    finally:
        if (made := _swap(before)) is not None:
            for member in made.members():
                made.part(member)


def is_told() -> bool:
    """Whether this process was told of a notice that its next boundary serves."""
    return _current is not None and _current.gate.flag


def open_handlers() -> list[Participant]:
    """The open handlers of this process, oldest first."""
    return [] if _current is None else _current.members()


def current_cluster() -> Cluster | None:
    """The cluster that this process takes part in; None without a handler so far."""
    return None if _current is None else _current.cluster
