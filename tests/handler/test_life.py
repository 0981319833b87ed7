"""What a process tells of itself where its supervisor watches for hangs."""

from __future__ import annotations

import contextlib
import os
from typing import IO

import pytest

from tests.handler.program import Program, wait_until
from tfpreempt.core.life import STACKS_SIGNAL, VARIABLE, LifeFile, Sign, Stage
from tfpreempt.handler import session
from tfpreempt.states.registered import State

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


def sign() -> Sign:
    here = session.current()
    assert here is not None
    return here.sign()


class Noting(State):
    """Notes what the process tells while it is saved."""

    def __init__(self) -> None:
        super().__init__("noting")
        self.seen: set[Stage] = set()

    def save(self, fileobj: IO[bytes]) -> None:
        self.seen.add(sign().stage)

    def load(self, fileobj: IO[bytes]) -> None:
        pass


def test_steps_are_watched_and_what_they_may_trace_gets_longer(
    program: Program,
) -> None:
    with program.handler() as handler:
        assert sign().stage is Stage.APART
        inside = [handler.run(sign) for _ in range(4)]
        assert [each.stage for each in inside] == [Stage.FIRST] * 2 + [Stage.STEPS] * 2
        assert [each.boundaries for each in inside] == [1, 2, 3, 4]
        assert [each.step for each in inside] == [0, 1, 2, 3]
        assert sign().stage is Stage.STEPS  # data are read here, in many loops
    assert sign().stage is Stage.APART


def test_steps_count_over_all_restarts(program: Program) -> None:
    for first in (0, 3):
        with session.new_process(), program.handler() as handler:
            assert handler.run(sign).step == first
            handler.run(program.step)
            handler.run(program.step)


def test_what_may_take_as_long_as_it_takes(program: Program) -> None:
    noting = Noting()
    with program.handler(save_every=4) as handler:
        for _ in range(3):
            handler.run(program.step)
        handler.save()
        with handler.without_hang_timeout():
            assert sign().stage is Stage.APART
        assert sign().stage is Stage.STEPS
        handler.run(program.step)
        handler.run(program.step)
        program.button.press()
        handler.run(program.step)
        assert handler.run(sign).stage is Stage.STEPS
    assert Stage.APART in noting.seen
    assert Stage.STEPS not in noting.seen


def test_the_second_handler_of_a_process_has_first_steps_again(
    program: Program,
) -> None:
    for _ in range(2):
        with program.handler() as handler:
            stages = [handler.run(sign).stage for _ in range(3)]
        assert stages == [Stage.FIRST, Stage.FIRST, Stage.STEPS]
        assert sign().stage is Stage.APART


def test_an_evaluation_with_checks_gives_signs(program: Program) -> None:
    with program.handler() as handler:
        handler.run(program.step)
        handler.run(program.step)
        before = sign()
        handler.check()
        after = sign()
    assert (after.boundaries - before.boundaries, after.step - before.step) == (1, 0)


def test_a_process_whose_step_failed_is_still_watched(program: Program) -> None:
    """Where it hangs on its way out, nobody else ends it."""

    def fail() -> None:
        raise ValueError("a bad batch")

    with contextlib.suppress(ValueError), program.handler() as handler:
        handler.run(program.step)
        handler.run(program.step)
        try:
            handler.run(fail)
        finally:
            assert sign().stage is Stage.STEPS


def test_the_supervisor_reads_it_and_gets_the_stacks(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LifeFile()
    for name, value in file.to_environment().items():
        monkeypatch.setenv(name, value)
    assert file.read() is None
    with program.handler() as handler:
        assert VARIABLE not in os.environ  # a child is another process
        wait_until(lambda: file.read() is not None)
        for _ in range(3):
            handler.run(program.step)
        wait_until(lambda: (file.read() or (0, None))[1] == sign())

        def wait_for_data() -> None:
            os.kill(os.getpid(), STACKS_SIGNAL)
            wait_until(lambda: "wait_for_data" in file.stacks())

        handler.run(wait_for_data)
        assert sign().pid == os.getpid()
    file.clear()
    wait_until(lambda: (file.read() or (0, None))[1] == sign())
    assert file.stacks() == ""
    file.close()


def test_a_file_that_is_gone_is_told(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = LifeFile()
    [(name, value)] = file.to_environment().items()
    file.close()
    monkeypatch.setenv(name, value)
    with program.handler():
        pass
    assert "--hang-timeout watches none of this machine" in caplog.text
