"""The session and the exit, without TensorFlow: a store in memory, a fake handler."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.fakes.process import new_process
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.checkpoint.state.contents import StagedSave
from tfpreempt.checkpoint.state.state import REGISTRY, State
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.store_executor import StoreExecutor
from tfpreempt.core import frameworks
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import LOCAL, Cluster, read_cluster
from tfpreempt.core.compat import add_note
from tfpreempt.core.events import Commit, Event, Exit, Notice, Outcome
from tfpreempt.core.heartbeat import WorkerPhase
from tfpreempt.errors import (
    CollectiveReadError,
    ConfigurationError,
    SaveError,
    UnsupportedClusterError,
    UsageError,
)
from tfpreempt.handler import current_session, session, training_end
from tfpreempt.handler import exit as exiting
from tfpreempt.handler.exit import defer_sigint, notify_peers
from tfpreempt.handler.run import Run

pytestmark = pytest.mark.timeout(30)

LIMIT = 10.0


class FakeMirror:
    """A mirror that uploads nothing."""

    status = MirrorStatus(uri="gs://nowhere")

    def __init__(self, run: FakeRun) -> None:
        self._run = run

    def shorten_waits(self) -> None:
        """Has nothing to copy."""

    def resume(self) -> None:
        """Has nothing to copy."""

    def hand_in_journal(self, seconds: float) -> None:
        """There is none."""

    def finish(self, seconds: float) -> bool:
        return self._run.finish_mirror()


class FakeSave(StagedSave):
    """A save that writes nothing."""

    def __init__(
        self, run: Any, name: str, cancel_token: CancellationToken | None = None
    ) -> None:
        super().__init__(
            step=run.step,
            attempt=name,
            staging=name,
            started_at=0.0,
            cancel_token=cancel_token,
        )
        self._run = run

    def discard(self) -> None:
        self._run.calls.append("discard")


class FakeRun:
    """A run that saves nothing, and records its calls."""

    has_moved = True
    amid = ""
    step = 0
    is_closed = False
    is_armed = True
    steps_made = 0
    snapshots: Any = None
    left_at: int | None = None
    before_save = staticmethod(lambda: None)
    base = 0
    cluster = LOCAL

    @property
    def has_moved_or_changed(self) -> bool:
        return self.has_moved

    def __init__(self, token: str = "token") -> None:
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.is_mirrored = True
        self.is_released = False
        self.start = SimpleNamespace(token=token, tier="disk")
        self.watcher = SimpleNamespace(is_started=True, start=lambda: None)

    @property
    def config(self) -> Any:  # made when it is asked for: a run that is dropped is gone
        return self

    @property
    def directory(self) -> Any:
        return SimpleNamespace(
            path="/nowhere",
            clock=SystemClock(),
            cluster=self.cluster,
            mirror=FakeMirror(self),
            needs_peers=lambda: False,
            wait_for_mirror=lambda timeout: self.is_mirrored,
        )

    def start_mirror(self) -> None:
        """There is none."""

    def finish_mirror(self) -> bool:
        self.calls.append("finish mirror")
        return self.is_mirrored

    def release(self) -> None:
        self.is_released = True

    def stage(self, name: str) -> FakeSave:
        if self.error is not None:
            raise self.error
        self.calls.append(f"stage {name}")
        return FakeSave(self, name)

    def commit(self, save: StagedSave, because: str, workers: Sequence[int]) -> Commit:
        self.calls.append(f"commit {because} {list(workers)}")
        return Commit(
            step=self.step,
            path="/nowhere",
            sequence=1,
            world_size=1,
            save_seconds=0.0,
            bytes=0,
            because=because,
        )

    def record(self, event: Event) -> None:
        self.events.append(event)

    record_exit: Callable[..., None] = Run.record_exit

    def _exit_code_for(self, committed: bool, mirrored: bool = True) -> int | None:
        return None

    def _exit(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        self.calls.append(f"leave {committed} {mirrored}")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[session.Session]:
    """The session of a process that was just started; forgotten afterwards."""
    monkeypatch.setattr(current_session, "on_interpreter_end", lambda call: None)
    with new_process():
        made = current_session.find_session(None, 5.0)
        yield made
        made.resume_after_exit()


def notify(current: session.Session, grace: float | None = None) -> None:
    """A notice arrives; returns when training would see it."""
    up = threading.Event()
    step_flag = current.step_flag
    notice = Notice(
        source="test",
        worker=current.cluster.worker,
        grace_seconds=grace,
        received_at=SystemClock().monotonic(),
    )
    current.coordinator.notice(notice)
    for _ in range(int(LIMIT / 0.001)):
        if step_flag.flag:
            return
        up.wait(0.001)
    raise AssertionError("the flag was never raised")


def boundary(current: session.Session) -> None:
    """Acts like `run()` before a step."""
    current.step_flag.started += 1
    if current.step_flag.flag:
        current.wait_at_boundary()


def test_one_session_a_process(current: session.Session) -> None:
    """All handlers share the session; the shortest timeout holds; one cluster only."""
    assert current_session.find_session(None, 3.0) is current
    assert current.coordinator.deadlines.peer_timeout == 3.0
    other = Resolver({"worker": ["a", "b"]}, ("worker", 1))
    with pytest.raises(UsageError, match="a process can belong to one cluster"):
        current_session.find_session(other, 3.0)


def test_a_notice_is_served_and_the_next_one_too(current: session.Session) -> None:
    """FACTS 2.7: rounds follow each other if the exit function returns."""
    run = FakeRun()
    current.open(run)
    for _ in range(3):
        boundary(current)
        notify(current)
        boundary(current)
        boundary(current)
    saved = [call for call in run.calls if not call.startswith("stage")]
    served = ["commit preemption [0]", "finish mirror", "leave True True"]
    assert saved == served * 3
    outcomes = [e.outcome.value for e in run.events if isinstance(e, Exit)]
    assert outcomes == ["committed"] * 3


def test_a_failed_save_is_logged(current: session.Session) -> None:
    """The fault and the exit are recorded, and the process exits."""
    run = FakeRun()
    run.error = OSError("the disk has gone")
    current.open(run)
    notify(current)
    boundary(current)
    assert run.calls == ["finish mirror", "leave False True"]
    kinds = [type(event).__name__ for event in run.events]
    assert "Fault" in kinds
    [left] = [event for event in run.events if isinstance(event, Exit)]
    assert left.outcome.value == "lost"
    assert "the disk has gone" in left.detail


def test_no_boundary_before_the_deadline(current: session.Session) -> None:
    """D.1: another thread ends the process; no boundary is needed."""
    run = FakeRun()
    there = threading.Event()
    run._exit = lambda *args: there.set()  # type: ignore[method-assign]
    current.open(run)
    boundary(current)
    notify(current, grace=0.3)
    assert there.wait(LIMIT)
    [left] = [event for event in run.events if isinstance(event, Exit)]
    assert "no step ended" in left.detail


@pytest.mark.slow  # waits in real time
def test_a_wait_for_other_workers_has_its_own_phase() -> None:
    """The supervisor must not take the wait for a phase without a time limit.

    The other workers may hang.
    """
    cluster = Cluster(worker=0, jobs=(("worker", 2),))
    waiting = session.Session(cluster, InMemoryStore(), "0", 5.0, [])
    run = FakeRun()
    waiting.open(run)
    boundary(waiting)
    stages = [waiting.activity.heartbeat().stage]

    def look() -> None:
        while WorkerPhase.WAITS not in stages:
            stages.append(waiting.activity.heartbeat().stage)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    assert not training_end.pass_last_boundary(waiting, 0.5)
    watcher.join(LIMIT)
    assert stages[0] is WorkerPhase.FIRST
    assert stages[-1] is WorkerPhase.WAITS


class Saving(FakeRun):
    """A run with synchronous periodic saves, which reports when a save begins."""

    saves_async = False

    def __init__(self) -> None:
        super().__init__()
        self.is_saving = threading.Event()

    def stage(self, name: str) -> FakeSave:
        self.is_saving.set()
        return super().stage(name)


def test_a_full_disk_is_an_error_also_in_the_round_of_a_bad_step(
    current: session.Session,
) -> None:
    run = FakeRun()
    run.error = SaveError("the disk is full")
    current.open(run)
    current.coordinator.notes.vetoes.append({"reason": "the loss is nan"})
    with pytest.raises(SaveError, match="the disk is full"):
        current.save(run)


def test_no_worker_waits_for_one_that_waits_for_it_in_a_periodic_save() -> None:
    """A notice comes while the chief waits for the part of a slower worker.

    If that worker stopped at the boundary of this save, both would wait for each other.
    """
    store, runs = InMemoryStore(), [Saving(), Saving()]
    workers = [
        session.Session(Cluster(worker=i, jobs=(("worker", 2),)), store, "0", 2.0, [])
        for i in range(2)
    ]
    for worker, run in zip(workers, runs, strict=True):
        worker.open(run)
        boundary(worker)

    def save_and_step(index: int) -> None:
        boundary(workers[index])
        workers[index].save_at_boundary(runs[index])
        boundary(workers[index])

    chief = threading.Thread(target=save_and_step, args=[0], daemon=True)
    chief.start()
    assert runs[0].is_saving.wait(LIMIT)
    notify(workers[1])
    for _ in range(int(LIMIT / 0.001)):
        if workers[1].coordinator.state.decision is not None:
            break
        threading.Event().wait(0.001)
    save_and_step(1)
    chief.join(LIMIT)
    commits = [call for call in runs[0].calls if call.startswith("commit")]
    assert commits == ["commit periodic [0, 1]", "commit preemption [0, 1]"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the errors that are reported to the peers."""
    sent: list[str] = []
    service = SimpleNamespace(report_error=lambda message, code: sent.append(message))
    monkeypatch.setattr(frameworks, "adapter", lambda *question: service)
    return sent


def be_one_of(current: session.Session, world: int) -> Cluster:
    """The session of a process alone becomes that of a chief of so many workers."""
    cluster = Cluster(worker=0, jobs=(("worker", world),))
    current.cluster = current.saves.cluster = cluster
    return cluster


@pytest.mark.parametrize("world", [1, 2])
def test_a_worker_outside_of_a_collective_read_stops_training(
    current: session.Session, told: list[str], world: int
) -> None:
    """The others were in a collective of the save, and met its next step there."""
    run = Saving()
    run.error = CollectiveReadError("no memory")
    current.open(run)
    boundary(current)
    be_one_of(current, world)
    goes_on = contextlib.nullcontext()
    with goes_on if world == 1 else pytest.raises(CollectiveReadError):
        current.save_at_boundary(run)
    assert [text for text in told if "no memory" in text] == told
    assert len(told) == world - 1


@pytest.mark.parametrize("of", ["save()", "a round"])
def test_a_worker_stops_training_even_if_the_error_is_caught(
    current: session.Session, told: list[str], of: str
) -> None:
    run = Saving()
    run.error = CollectiveReadError("no memory")
    current.open(run)
    boundary(current)
    if of == "a round":
        current.coordinator.periodic()
        for _ in range(int(LIMIT / 0.001)):
            if current.coordinator.state.decision is not None:
                break
            threading.Event().wait(0.001)
    run.cluster = be_one_of(current, 2)
    settings = dataclasses.replace(current.coordinator.settings, num_workers=2)
    current.coordinator.settings = settings
    with pytest.raises(CollectiveReadError):
        current.save(run) if of == "save()" else boundary(current)
    assert len(told) == 1
    with pytest.raises(UsageError, match="reported to all"):
        current.ready(run, "run()")


def test_all_open_handlers_are_saved(current: session.Session) -> None:
    """FACTS 2.6: a handler that was closed or dropped is not asked; the others are."""
    first, second, closed = FakeRun(), FakeRun(), FakeRun()
    for run in (first, second, closed):
        current.open(run)
    current.open(FakeRun())  # dropped at once
    current.unregister(closed)
    assert list(current.runs) == [first, second]
    notify(current)
    boundary(current)
    assert [len(run.calls) for run in (first, second, closed)] == [4, 3, 0]
    assert first.calls[-1] == "leave True True"


def test_an_incomplete_upload_is_passed_to_the_exit(
    current: session.Session,
) -> None:
    """One incomplete upload of two is enough."""
    first, second = FakeRun(), FakeRun()
    second.is_mirrored = False
    for run in (first, second):
        current.open(run)
    notify(current)
    boundary(current)
    assert first.calls[-1] == "leave True False"


def test_a_program_saves_no_states_while_a_fit_runs(current: session.Session) -> None:
    run = FakeRun()
    run.amid = "model.fit"
    current.open(run)
    with pytest.raises(UsageError, match=r"model\.fit"):
        current.save(run)
    assert run.calls == []


# --- Ctrl-C --------------------------------------------------------------------------


class Pressed(FakeRun):
    """A handler during whose save Ctrl-C is pressed once or twice."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def stage(self, name: str) -> FakeSave:
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)
        return super().stage(name)


def leave(committed: bool, cluster: Cluster, *, mirrored: bool = True) -> None:
    sys.exit(143)


def test_ctrl_c_in_the_save_of_a_preemption_changes_nothing(
    current: session.Session,
) -> None:
    """The commit uses the grace period, and the process exits anyway."""
    run, before = Pressed(1), signal.getsignal(signal.SIGINT)
    run._exit = leave  # type: ignore[method-assign]
    current.open(run)
    notify(current)
    with pytest.raises(SystemExit) as left:
        boundary(current)
    assert left.value.code == 143
    assert "commit preemption [0]" in run.calls
    current.resume_after_exit()
    assert signal.getsignal(signal.SIGINT) is before


@contextlib.contextmanager
def ctrl_c_in_a_finally() -> Iterator[None]:
    try:
        yield
    finally:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_on_the_way_out_does_not_change_its_code(
    current: session.Session,
) -> None:
    run = FakeRun()
    run._exit = leave  # type: ignore[method-assign]
    current.open(run)
    notify(current)
    with pytest.raises(SystemExit) as left, ctrl_c_in_a_finally():
        boundary(current)
    assert left.value.code == 143
    current.resume_after_exit()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_loss_leaves_as_deaf_to_ctrl_c(
    current: session.Session,
) -> None:
    """The exit starts where the error was raised, not at a boundary."""
    run = FakeRun()
    run._exit = leave  # type: ignore[method-assign]
    current.open(run)
    with pytest.raises(SystemExit), ctrl_c_in_a_finally():
        current.exit.leave(Outcome.LOST, "a peer is gone")


def test_ctrl_c_takes_effect_if_the_exit_function_returns(
    current: session.Session,
) -> None:
    class Stays(FakeRun):
        def finish_mirror(self) -> bool:
            signal.raise_signal(signal.SIGINT)
            return True

    run = Stays()
    current.open(run)
    with pytest.raises(KeyboardInterrupt):
        current.exit.leave(Outcome.COMMITTED, "")
    assert run.calls == ["leave True True"]


def test_a_second_ctrl_c_gives_the_save_up(current: session.Session) -> None:
    run, before = Pressed(2), signal.getsignal(signal.SIGINT)
    current.open(run)
    notify(current)
    with pytest.raises(KeyboardInterrupt, match="the last commit is still valid"):
        boundary(current)
    assert run.calls == []
    assert current.exit.detached
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("share", [0.0, 5.0])
def test_the_time_for_a_share_is_known_before_the_wait_for_peers(
    current: session.Session, share: float
) -> None:
    class Sharing(FakeRun):
        def stage(self, name: str) -> FakeSave:
            save = super().stage(name)
            save.share_seconds = share
            return save

    run = Sharing()
    current.open(run)
    current.coordinator.deadlines.share_seconds = 77.0
    current.coordinator.deadlines.num_workers = 2  # so that there is another's share
    boundary(current)
    notify(current)
    boundary(current)
    assert "stage round-1" in run.calls
    deadlines = current.coordinator.deadlines
    assert deadlines.share_seconds == share
    assert deadlines.save_seconds is not None
    assert deadlines.save_seconds >= share


def test_ctrl_c_in_a_save_is_honoured_after_it(
    current: session.Session, caplog: pytest.LogCaptureFixture
) -> None:
    """The message about Ctrl-C is logged during the save."""

    class Told(Pressed):
        def stage(self, name: str) -> FakeSave:
            staged = super().stage(name)
            while "press Ctrl-C again to abort the save" not in caplog.text:
                threading.Event().wait(0.001)
            return staged

    run = Told(1)
    current.open(run)
    with pytest.raises(KeyboardInterrupt):
        current.saves.save(run, "save")
    assert "commit save [0]" in run.calls


def test_a_programs_own_ctrl_c_is_called_after_the_save(
    current: session.Session,
) -> None:
    seen: list[list[str]] = []
    run = Pressed(1)
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(list(run.calls)))
    try:
        current.open(run)
        current.saves.save(run, "save")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [run.calls]


def test_ctrl_c_in_a_wait_without_end_is_honoured_at_once() -> None:
    """A finished worker waits for workers that may train for days."""
    with pytest.raises(KeyboardInterrupt), defer_sigint(lambda: False):
        signal.raise_signal(signal.SIGINT)


# --- the way out ---------------------------------------------------------------------


def test_handlers_that_end_in_one_round_do_not_share_a_mark(
    current: session.Session,
) -> None:
    handlers = [FakeRun("one"), FakeRun("two"), FakeRun("three")]
    for handler in handlers:
        current.open(handler)
        current.saves.save(handler, "finished")
    names = [handler.calls[0] for handler in handlers]
    assert len(set(names)) == 3, names


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize(("code", "status"), [(7, 7), (None, 0), ("words", 1)])
def test_an_exit_from_another_thread_ends_the_process(
    code: int | str | None, status: int
) -> None:
    """`exit_hard` exits with the code of SystemExit, and flushes the output."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.stdout = io.TextIOWrapper(os.fdopen(tell, "wb"), write_through=False)
        print("said before the end", end="")
        exiting.exit_hard(lambda: sys.exit(code))
        os._exit(99)
    os.close(tell)
    with os.fdopen(told) as output:
        assert output.read() == "said before the end"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status


@pytest.mark.slow  # starts a process
def test_an_end_that_is_not_saved_is_no_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the end of the interpreter has to close the handler."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(current_session, "on_interpreter_end", ends.append)
    pid = os.fork()
    if pid == 0:
        with new_process():
            run = FakeRun()
            run.error = SaveError("the disk is full")
            current_session.find_session(None, 5.0).open(run)
            ends[0]()
        os._exit(97)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


class Words(State):
    """Lives for as long as its function."""

    def save(self, fileobj: IO[bytes]) -> None:
        """Has nothing to keep."""

    def load(self, fileobj: IO[bytes]) -> None:
        """Nor to take up."""


def test_a_state_missing_at_the_end_of_the_interpreter_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last commit is without it, where the handler was never closed."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(current_session, "on_interpreter_end", ends.append)
    monkeypatch.setattr(training_end, "exit_hard", lambda leave: leave())
    with new_process():
        run = FakeRun()
        current_session.find_session(None, 5.0).open(run)
        words = Words("words of a function")
        assert "words of a function" not in REGISTRY.gone()
        del words
        run.error = SaveError("not what this is about")
        with pytest.raises(SystemExit):
            ends[0]()
    # Other tests of the process may have deleted States too.
    named = r"the State .*'words of a function'.* was deleted with the function"
    assert re.search(named, caplog.text)


@pytest.mark.slow  # starts a process
def test_an_error_at_the_end_is_sent_while_threads_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(current_session, "on_interpreter_end", ends.append)
    pid = os.fork()
    if pid == 0:
        with new_process():
            run = FakeRun()
            current_session.find_session(None, 5.0).open(run)
            sys.last_value = ValueError("of the program")
            ends[0]()
        error = "ValueError: of the program"
        told = Exit(outcome=Outcome.FAILED, code=None, step=0, detail=error)
        os._exit(0 if run.is_closed and told in run.events else 97)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_code_of_a_watched_exit_can_be_changed() -> None:
    """A program may catch any SystemExit, and raise it again with another code."""
    watched = exiting.WatchedExit()
    assert watched.code is None
    watched.code = 7
    assert (watched.code, watched.args) == (7, (7,))


def forked(program: Callable[[], None]) -> int:
    """Returns the exit code of a function in a forked process; 99 at its end."""
    pid = os.fork()
    if pid == 0:
        try:
            program()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow  # starts a process
def test_a_forked_child_sends_nothing_at_its_end(current: session.Session) -> None:
    """An error in the child is not an error of the training, which continues."""
    run = FakeRun()
    current.open(run)

    def program() -> None:
        training_end.close_failed(current, run, "ValueError")
        os._exit(0 if run.is_closed and not run.events else 97)

    assert forked(program) == 0
    assert not run.is_closed


@pytest.mark.slow  # starts a process
def test_a_way_out_that_never_ends_is_ended() -> None:
    """The exit code is the intended code, although another error was raised."""

    def program() -> None:
        exit = exiting.WatchedExit(7)
        exiting.ExitWatchdog(exit, 0.05)
        try:
            raise exit
        finally:
            try:
                raise OSError("of a finally block")
            except OSError:
                threading.Event().wait(LIMIT)

    assert forked(program) == 7


@pytest.mark.slow  # starts a process
def test_an_exit_that_was_caught_ends_nothing() -> None:
    def program() -> None:
        before = threading.active_count()
        exit = exiting.WatchedExit(7)
        exiting.ExitWatchdog(exit, 0.05)
        with contextlib.suppress(SystemExit):
            raise exit
        while threading.active_count() > before:
            threading.Event().wait(0.001)

    assert forked(program) == 99


WAYS_OUT = {
    "try: raise exit\nexcept SystemExit: pass": 99,
    "with contextlib.suppress(SystemExit): raise exit": 99,
    "try: raise exit\nexcept SystemExit: raise": 7,
    "try: raise exit\nexcept OSError: pass": 7,
    "try: raise exit\nfinally: print()": 7,
    "with contextlib.nullcontext(): raise exit": 7,
}


@pytest.mark.slow  # a new interpreter for each
@pytest.mark.parametrize("is_function", [False, True])
def test_a_program_that_serves_after_a_caught_exit_is_not_ended(
    is_function: bool,
) -> None:
    """Main has ended, and Python waits for a thread: for good only if it is to.

    All programs run at once, because each program waits for a second.
    """
    started: dict[str, subprocess.Popen[str]] = {}
    for way in WAYS_OUT:
        main = way
        if is_function:
            main = f"def main():\n{textwrap.indent(way, '    ')}\nmain()"
        program = (
            "import contextlib, os, threading, time\n"
            "from tfpreempt.handler.exit import ExitWatchdog, WatchedExit\n"
            "exit = WatchedExit(7)\n"
            "ExitWatchdog(exit, 1.0)\n"
            "watching = threading.enumerate()[-1]\n"
            "def serve():\n"
            "    watching.join()\n"
            "    os._exit(99)\n"
            "threading.Thread(target=serve).start()\n"
            f"{main}\n"
        )
        command = [sys.executable, "-c", program]
        started[way] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        limit = 2 * LIMIT  # of all programs together
        texts = {way: p.communicate(timeout=limit)[1] for way, p in started.items()}
    finally:
        for each in started.values():
            each.kill()
            each.wait()
    codes = {way: each.returncode for way, each in started.items()}
    assert codes == WAYS_OUT, texts


@pytest.mark.slow  # a new interpreter for each
@pytest.mark.parametrize(
    ("end", "printed"),
    [
        ("30.0", "finally\nhook\ntaken apart\n"),
        ("0.9", "finally\nhook\n"),
        ("30.0, can_reach_all=False", "finally\nhook\n"),
    ],
)
def test_python_finalizes_if_there_is_time(end: str, printed: str) -> None:
    """A thread cannot end it any more by then, so it does not begin shortly before.

    Nor where TensorFlow would wait for a worker that does not answer.
    """
    program = (
        "import atexit, os, sys\n"
        "from tfpreempt.handler.exit import ExitWatchdog, WatchedExit\n"
        "class Last:\n"
        "    def __del__(self, write=os.write):\n"
        "        write(1, b'taken apart\\n')\n"
        "sys.last = Last()\n"
        "atexit.register(lambda: print('hook'))\n"
        "exit = WatchedExit(7)\n"
        f"ExitWatchdog(exit, {end})\n"
        "try: raise exit\n"
        "finally: print('finally')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stdout) == (7, printed), done.stderr


class FullDisk(io.StringIO):
    """A stream whose disk is full."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class Stuck(io.StringIO):
    """A pipe without a reader."""

    def flush(self) -> None:
        threading.Event().wait()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_print_during_the_exit_finds_a_stream(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, closed if is_there else None)
    if not is_there:
        monkeypatch.delattr(sys, "stderr")
    exiting.keep_streams()
    for each in (sys.stdout, sys.stderr):
        print("the last word", file=each, flush=True)


def test_a_stream_of_the_program_without_an_attribute_closed_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a class that writes to the terminal and to a file."""

    class Tee:
        def write(self, text: str) -> None:
            """Writes to both."""

        def flush(self) -> None:
            """Flushes both."""

    tee = Tee()
    monkeypatch.setattr("sys.stderr", tee)
    exiting.keep_streams()
    assert sys.stderr is tee


@pytest.mark.parametrize("stream", [FullDisk(), Stuck()])
def test_a_stream_that_cannot_be_flushed_is_given_up_at_the_end_alone(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused terminal or a full disk may work again later."""
    monkeypatch.setattr(exiting, "FLUSH_LIMIT", 0.1)
    monkeypatch.setattr(sys, "stdout", stream)
    exiting.keep_streams()
    assert sys.stdout is stream
    exiting.flush_streams()
    print("the last word", flush=True)


@pytest.mark.slow  # starts a process
def test_an_error_on_the_way_out_of_another_thread_ends_the_program() -> None:
    """No code could catch the error there, and the deadline has passed."""

    def fail(committed: bool, cluster: Cluster) -> None:
        raise ValueError("of an exit function")

    def program() -> None:
        with new_process():
            current, run = current_session.find_session(None, 5.0), FakeRun()
            run._exit = fail  # type: ignore[assignment,method-assign]
            current.open(run)
            alarm = threading.Thread(target=current.exit.force_exit, args=("late",))
            alarm.start()
            alarm.join(LIMIT)

    assert forked(program) == 1


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("is_in_step", [True, False])
def test_a_journal_that_hangs_at_the_deadline_leaves_time_to_leave(
    is_in_step: bool,
) -> None:
    """The exit of a step begins when 10 % of the grace period is left; here 0.1 s."""

    def hang(outcome: Outcome, why: str = "", code: int | None = None) -> None:
        threading.Event().wait()

    def program() -> None:
        with new_process():
            current, run = current_session.find_session(None, 5.0), FakeRun()
            clock, deadlines = SystemClock(), current.coordinator.deadlines

            def leave(committed: bool, cluster: Cluster, **more: bool) -> None:
                assert deadlines.terminates_at is not None
                os._exit(clock.monotonic() >= deadlines.terminates_at)

            run.record_exit = hang  # type: ignore[assignment,method-assign]
            run._exit = leave  # type: ignore[assignment,method-assign]
            current.open(run)
            current.step_flag.started += 1
            notify(current, grace=1.0)
            if is_in_step:
                threading.Event().wait(LIMIT)
            while True:  # on after a first commit
                boundary(current)

    assert forked(program) == 0


def test_an_exit_function_that_returns_ends_nothing() -> None:
    """Training continues if the user's exit function returns."""
    exiting.exit_hard(lambda: None)


@pytest.mark.slow  # starts a process
def test_the_last_boundary_can_still_start_threads() -> None:
    """The hook at the end of the program runs before Python refuses threads."""
    program = (
        "import threading\n"
        "from tfpreempt.handler.exit import on_interpreter_end\n"
        "def end():\n"
        "    t = threading.Thread(target=print, args=('late',)); t.start(); t.join()\n"
        "on_interpreter_end(end)\n"
        "print('early')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.stdout.split(), done.stderr) == (["early", "late"], "")


def test_the_first_failure_is_named_by_all() -> None:
    """One error causes others in a cluster; each worker names the first error."""
    store = InMemoryStore()
    sent: list[tuple[str, int | None]] = []
    notes: list[list[str]] = []
    for worker, error in enumerate([ValueError("a bad batch"), OSError("no peer")]):
        executor = StoreExecutor(store, SystemClock(), lambda gone: None)

        def send(message: str, code: int | None) -> None:
            sent.append((message, code))

        notify_peers(worker, executor, "failure", error, send)
        notes.append(getattr(error, "__notes__", []))
    assert sent[0] == ("worker 0 raised ValueError: a bad batch", None)
    assert notes == [[], ["worker 0 failed first: ValueError: a bad batch"]]
    assert json.loads(store.get("failure"))["worker"] == 0


def test_the_first_failure_names_the_lost_worker() -> None:
    """The cause of the first error reaches the workers that do not know the cause."""
    store = InMemoryStore()
    errors = [RuntimeError("aborted"), RuntimeError("aborted too")]
    add_note(errors[0], "worker 2 closed the connection in step 5")
    for worker, error in enumerate(errors):
        executor = StoreExecutor(store, SystemClock(), lambda gone: None)
        notify_peers(worker, executor, "failure", error, lambda message, code: None)
    [note] = errors[1].__notes__
    assert note.startswith("worker 0 failed first: RuntimeError: aborted")
    assert "worker 2 closed the connection in step 5" in note


# --- who the workers are -------------------------------------------------------------


class Spec:
    """The part of a tf.train.ClusterSpec that tfpreempt uses."""

    def __init__(self, jobs: dict[str, Any]) -> None:
        self._jobs = jobs

    def as_dict(self) -> dict[str, Any]:
        return self._jobs


class Resolver:
    """The part of a cluster resolver that tfpreempt uses."""

    def __init__(self, jobs: dict[str, Any], task: tuple[str | None, int | None]):
        self.task_type, self.task_id = task
        self.cluster_spec: Callable[[], Spec] = lambda: Spec(jobs)


@pytest.mark.parametrize(
    ("jobs", "task", "expected"),
    [
        ({}, (None, None), (0, 1)),
        ({"worker": ["a", "b"]}, ("worker", 1), (1, 2)),
        ({"chief": ["a"], "worker": ["b", "c"]}, ("chief", 0), (0, 3)),
        ({"worker": ["b", "c"], "chief": ["a"]}, ("worker", 1), (2, 3)),
        ({"worker": ["a"], "evaluator": ["b"]}, ("worker", 0), (0, 1)),
    ],
)
def test_workers_are_numbered_chief_first(
    jobs: dict[str, Any], task: tuple[str, int], expected: tuple[int, int]
) -> None:
    """The chief is worker 0, for any order of the jobs in TF_CONFIG."""
    found = read_cluster(Resolver(jobs, task))
    assert (found.worker, found.num_workers) == expected


@pytest.mark.parametrize(
    ("workers", "is_said"), [(["a:1", "b:1"], True), (["a:1"], False)]
)
def test_workers_that_the_program_does_not_know_of_are_named(
    workers: list[str],
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The processes are started as workers, but the model uses no strategy."""
    task = {"type": "worker", "index": len(workers) - 1}
    told = {"cluster": {"worker": workers}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    with new_process():
        current_session.find_session(None, 5.0)
    assert ("worker 1 of 2, but the program has no cluster" in caplog.text) == is_said


def test_the_client_knows_its_remote_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}}')
    monkeypatch.setattr(current_session, "connection", lambda: "to the workers")
    with new_process():
        current_session.find_session(None, 5.0)
    assert caplog.text == ""


def test_a_tf_config_that_is_not_for_us_is_no_matter_of_one_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}')
    with new_process():
        current_session.find_session(None, 5.0)
    assert caplog.text == ""


@pytest.mark.parametrize("task", [("evaluator", 0), ("worker", 2), (None, None)])
def test_a_task_that_does_not_train(task: tuple[str | None, int | None]) -> None:
    """F: an evaluator, a task outside of the cluster."""
    with pytest.raises(ConfigurationError, match=str(task[0])):
        read_cluster(Resolver({"worker": ["a", "b"], "evaluator": ["c"]}, task))


def test_parameter_servers() -> None:
    """F: there is no common step; also a NotImplementedError."""
    with pytest.raises(UnsupportedClusterError) as raised:
        read_cluster(Resolver({"worker": ["a"], "ps": ["b"]}, ("worker", 0)))
    assert isinstance(raised.value, NotImplementedError)
