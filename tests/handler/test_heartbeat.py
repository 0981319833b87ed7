"""Heartbeats of a process whose supervisor watches for hangs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.fakes.process import new_process
from tests.handler.program import Button, Program, wait_until
from tests.handler.test_mirror import Stuck
from tfpreempt.core.heartbeat import (
    STACKS_SIGNAL,
    VARIABLE,
    Heartbeat,
    HeartbeatFile,
    WorkerPhase,
)
from tfpreempt.handler import current_session
from tfpreempt.notice.source import OnNotice
from tfpreempt.states.api import State

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


def sign() -> Heartbeat:
    here = current_session.current()
    assert here is not None
    return here.activity.heartbeat()


class Noting(State):
    """Records the phases of the process during its save."""

    def __init__(self) -> None:
        super().__init__("noting")
        self.seen: set[WorkerPhase] = set()

    def save(self, fileobj: IO[bytes]) -> None:
        self.seen.add(sign().stage)

    def load(self, fileobj: IO[bytes]) -> None:
        pass


def test_steps_have_a_timeout_and_tracing_has_a_longer_timeout(
    program: Program,
) -> None:
    with program.handler() as handler:
        assert sign().stage is WorkerPhase.APART
        inside = [handler.run(sign) for _ in range(4)]
        assert [each.stage for each in inside] == [WorkerPhase.FIRST] * 2 + [
            WorkerPhase.STEPS
        ] * 2
        assert [each.boundaries for each in inside] == [1, 2, 3, 4]
        assert [each.step for each in inside] == [0, 1, 2, 3]
        assert sign().stage is WorkerPhase.STEPS  # data are read here, in many loops
    assert sign().stage is WorkerPhase.APART


def test_steps_count_over_all_restarts(program: Program) -> None:
    for first in (0, 3):
        with new_process(), program.handler() as handler:
            assert handler.run(sign).step == first
            handler.run(program.step)
            handler.run(program.step)


def test_saves_and_paused_detection_have_no_timeout(program: Program) -> None:
    noting = Noting()
    with program.handler(save_freq=4) as handler:
        for _ in range(3):
            handler.run(program.step)
        handler.save()
        with handler.pause_hang_detection():
            assert sign().stage is WorkerPhase.APART
        assert sign().stage is WorkerPhase.STEPS
        handler.run(program.step)
        handler.run(program.step)
        program.button.press()
        handler.run(program.step)
        assert handler.run(sign).stage is WorkerPhase.STEPS
    assert WorkerPhase.APART in noting.seen
    assert WorkerPhase.STEPS not in noting.seen


@contextlib.contextmanager
def opened_once_apart(opened: threading.Event) -> Iterator[None]:
    """Context manager: sets the event when the main thread may take any time."""

    def work() -> None:
        try:
            wait_until(lambda: sign().stage is WorkerPhase.APART)
            seen.append(True)
        finally:
            opened.set()

    seen: list[bool] = []
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()
    assert seen


def test_the_wait_for_the_upload_has_no_hang_timeout(program: Program) -> None:
    store = Stuck()
    with program.handler(mirror_dir=store) as handler:
        for _ in range(3):
            handler.run(program.step)
        handler.save()
        assert sign().stage is WorkerPhase.STEPS
        with opened_once_apart(store.opened):
            assert handler.wait_for_mirror()
        assert sign().stage is WorkerPhase.STEPS


def test_the_end_of_one_of_two_handlers_has_no_hang_timeout(
    program: Program, tmp_path: Path
) -> None:
    store, other = Stuck(), Program(tmp_path / "other")
    with other.handler() as beside:
        handler = program.handler(mirror_dir=store)
        for _ in range(3):
            beside.run(other.step)
            handler.run(program.step)
        handler.save()
        with opened_once_apart(store.opened):
            handler.close()


def test_main_is_watched_while_another_thread_waits_for_the_copy(
    program: Program,
) -> None:
    store = Stuck()
    with program.handler(mirror_dir=store) as handler:
        for _ in range(3):
            handler.run(program.step)
        handler.save()
        tries: list[bool] = []

        def work() -> None:
            while not store.opened.is_set():
                tries.append(handler.wait_for_mirror(0.01))

        thread = threading.Thread(target=work)
        thread.start()
        seen = set()
        while len(tries) < 5:
            seen.add(sign().stage)
        store.opened.set()
        thread.join()
    assert seen == {WorkerPhase.STEPS}


def test_the_creation_of_another_handler_has_no_hang_timeout(
    program: Program, tmp_path: Path
) -> None:
    seen = []

    class Starting(Button):
        def start(self, on_notice: OnNotice) -> None:
            seen.append(sign().stage)
            super().start(on_notice)

    with program.handler() as handler:
        for _ in range(3):
            handler.run(program.step)
        config = {"sources": [Starting]}
        with Program(tmp_path / "other").handler(config=config):
            assert seen == [WorkerPhase.APART]
            assert sign().stage is WorkerPhase.STEPS


def test_the_first_steps_are_counted_per_handler(
    program: Program, tmp_path: Path
) -> None:
    with program.handler() as idle, idle.watch_preemption_scope():
        other = Program(tmp_path / "other")
        with other.handler() as handler:
            stages = [handler.run(sign).stage for _ in range(4)]
    assert stages == [WorkerPhase.FIRST] * 2 + [WorkerPhase.STEPS] * 2


def test_a_boundary_ahead_of_the_first_step_is_not_its_end(program: Program) -> None:
    stages = []
    with program.handler() as handler:
        for _ in range(4):
            handler.save_checkpoint_if_preempted()
            stages.append(sign().stage)
            program.step()
    assert stages == [WorkerPhase.FIRST] * 2 + [WorkerPhase.STEPS] * 2


def test_a_program_without_counted_steps_may_trace_in_each_scope(
    program: Program,
) -> None:
    stages = []
    with program.handler() as handler:
        for _ in range(4):
            with handler.watch_preemption_scope():
                stages.append(sign().stage)
    assert stages == [WorkerPhase.APART] + [WorkerPhase.FIRST] * 3


def test_the_second_handler_of_a_process_has_first_steps_again(
    program: Program,
) -> None:
    for _ in range(2):
        with program.handler() as handler:
            stages = [handler.run(sign).stage for _ in range(3)]
        assert stages == [WorkerPhase.FIRST, WorkerPhase.FIRST, WorkerPhase.STEPS]
        assert sign().stage is WorkerPhase.APART


def test_an_evaluation_with_checks_gives_signs(program: Program) -> None:
    with program.handler() as handler:
        handler.run(program.step)
        handler.run(program.step)
        before = sign()
        handler.check_preemption()
        after = sign()
    assert (after.boundaries - before.boundaries, after.step - before.step) == (1, 0)


def test_a_process_after_a_failed_step_still_has_a_timeout(program: Program) -> None:
    """If the process hangs during its exit, only the supervisor ends the process."""

    def fail() -> None:
        raise ValueError("a bad batch")

    with contextlib.suppress(ValueError), program.handler() as handler:
        handler.run(program.step)
        handler.run(program.step)
        try:
            handler.run(fail)
        finally:
            assert sign().stage is WorkerPhase.STEPS


def test_the_supervisor_reads_it_and_gets_the_stacks(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = HeartbeatFile()
    for name, value in file.to_environment().items():
        monkeypatch.setenv(name, value)
    assert file.read() is None
    with program.handler() as handler:
        assert VARIABLE not in os.environ  # a child is another process
        wait_until(lambda: file.read() is not None)
        for _ in range(3):
            handler.run(program.step)
        wait_until(lambda: (file.read() or (0, None))[1] == sign())

        is_there = threading.Event()

        def wait_for_data() -> None:
            is_there.wait()

        def step() -> None:
            # The newest thread is written first, and a hundred at most: other tests
            # of this process may have left that many.
            threading.Thread(target=wait_for_data, daemon=True).start()
            os.kill(os.getpid(), STACKS_SIGNAL)
            wait_until(lambda: "wait_for_data" in file.stacks())
            is_there.set()

        handler.run(step)
        assert sign().pid == os.getpid()
    file.clear()
    wait_until(lambda: (file.read() or (0, None))[1] == sign())
    assert file.stacks() == ""
    file.close()


def test_a_missing_heartbeat_file_is_logged(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = HeartbeatFile()
    [(name, value)] = file.to_environment().items()
    file.close()
    monkeypatch.setenv(name, value)
    with program.handler():
        pass
    assert "--hang-timeout does not watch this machine" in caplog.text
