"""Owner of a notice that comes while a handler begins or ends to listen."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

import pytest

import tfpreempt
from tests.fakes.process import new_process
from tests.handler.program import Button, Program, is_told, wait_until
from tfpreempt import TerminationConfig
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Notice
from tfpreempt.handler import current_session

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]

LONG = 600.0  # seconds of grace that no test waits for


class Bell(Button):
    """A notice source of the protected program."""

    def ring(self) -> None:
        """Triggers a notice; returns when the early-notice handler has it."""
        self._tell("rung")


class Ways:
    """Counts the exits of the early-notice handler; none of them ends this process.

    Attributes:
        taken: number of exits.
        bell: notice source of the config.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.bell = Bell()

    def leave(self) -> None:
        self.taken += 1

    def config(self, grace: float | None = None) -> TerminationConfig:
        return TerminationConfig(
            exit_fn=self.leave,
            signals=(),
            sources=[lambda: self.bell],
            grace_period=grace,
        )


@pytest.fixture
def out() -> Iterator[Ways]:
    """Provides the exits, and closes the early-notice handler at the end."""
    yield Ways()
    if current_session._protection is not None:
        current_session._protection.close()


class LastSave(tfpreempt.State):
    """A State whose save calls a function after the loop."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__("last-save")
        self._call = call
        self.is_over = False

    def save(self, fileobj: IO[bytes]) -> None:
        if self.is_over:
            self._call()

    def load(self, fileobj: IO[bytes]) -> None:
        """Does nothing."""


def train(program: Program, grace: float | None, call: Callable[[], None]) -> None:
    """Runs a loop, and calls `call` during the final commit."""
    state = LastSave(call)
    try:
        with program.handler(config={"grace_period": grace}) as handler:
            handler.run(program.step)
            handler.run(program.step)
            state.is_over = True
    finally:
        state.unregister()


# --- the end -------------------------------------------------------------------------


def test_a_notice_in_the_last_commit_is_protections_after_it(
    program: Program, out: Ways
) -> None:
    """The handler has no further boundary, so no other code would exit."""
    tfpreempt.handle_early_notices(out.config())
    train(program, None, program.button.press)
    assert out.taken == 1
    assert program.exits == 0
    assert [r["step"] for r in program.events("commit")] == [2]


def test_with_a_known_grace_the_program_may_end_by_itself(
    program: Program, out: Ways
) -> None:
    """The time that has passed since the notice is taken off."""
    tfpreempt.handle_early_notices(out.config())

    def press() -> None:
        program.button.press()
        time.sleep(1.0)

    train(program, 3.0, press)
    began = time.monotonic()
    assert out.taken == 0
    wait_until(lambda: out.taken)
    assert time.monotonic() - began < 2.8
    assert out.taken == 1


def test_a_grace_that_outlasts_the_training_is_not_forgotten(
    program: Program, out: Ways, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit was made at once, and training ended before the machine did."""
    tfpreempt.handle_early_notices(out.config())
    with program.handler(config={"grace_period": LONG}) as handler:
        handler.run(program.step)
        program.button.press()
        handler.run(program.step)
        handler.run(program.step)
    assert "without a handler, the process exits in 59" in caplog.text
    assert (out.taken, program.exits) == (0, 0)


def test_a_known_deadline_holds_after_the_last_handler_without_protection(
    program: Program,
) -> None:
    def press() -> None:
        program.button.press()
        assert program.exits == 0

    train(program, 1.0, press)
    wait_until(lambda: program.exits)
    assert [each["step"] for each in program.events("commit")] == [2]


def test_a_known_deadline_holds_after_a_final_save_that_fails(program: Program) -> None:
    def fail() -> None:
        program.button.press()
        raise TypeError("cannot pickle")

    with pytest.raises(TypeError, match="cannot pickle"):
        train(program, 1.0, fail)
    wait_until(lambda: program.exits)


def test_the_next_handler_serves_a_notice_in_the_last_commit(program: Program) -> None:
    """Without early notices, too."""
    train(program, None, program.button.press)
    with program.handler() as handler:
        handler.run(program.step)
    assert program.exits == 1


def test_a_handled_notice_is_not_pending(program: Program, out: Ways) -> None:
    tfpreempt.handle_early_notices(out.config())
    with program.handler() as handler:
        handler.run(program.step)
        program.button.press()
        out.bell.ring()
        handler.run(program.step)
    assert (program.exits, out.taken) == (1, 0)


def test_a_notice_that_the_handler_was_closed_before_is_protections(
    program: Program, out: Ways
) -> None:
    """Both may poll the same file, and the early-notice handler polled first."""
    tfpreempt.handle_early_notices(out.config())
    with program.handler() as handler:
        handler.run(program.step)
        out.bell.ring()
        assert out.taken == 0
    assert out.taken == 1
    handler.close()
    assert out.taken == 1


def test_closed_protection_sets_off_no_alarm(program: Program, out: Ways) -> None:
    with program.handler() as handler:
        handler.run(program.step)
    with tfpreempt.handle_early_notices(out.config(grace=0.2)):
        out.bell.ring()
    threading.Event().wait(0.4)
    assert out.taken == 0


# --- the beginning -------------------------------------------------------------------


def test_a_handler_that_begins_to_listen_gets_the_notice(
    program: Program, out: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check for a listening handler and the storage of the notice."""
    opened = []

    def seconds_to_wait(_: Notice) -> float:
        opened.append(program.handler())
        return LONG

    monkeypatch.setattr(current_session, "_seconds_to_wait", seconds_to_wait)
    tfpreempt.handle_early_notices(out.config())
    out.bell.ring()
    wait_until(is_told)
    opened[0].run(program.step)
    assert program.exits == 1


def end_a_handler_of_two_workers(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler has trained in this process, as worker 1 of a cluster of two."""
    with program.handler() as handler:
        handler.run(program.step)
    workers = Cluster(worker=1, jobs=(("worker", 2),))
    monkeypatch.setattr(current_session.current(), "cluster", workers)


def test_a_second_handler_of_a_cluster_is_waited_for(
    program: Program, out: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers also create theirs, and would wait for this worker."""
    end_a_handler_of_two_workers(program, monkeypatch)
    config = out.config()
    tfpreempt.handle_early_notices(config)
    with current_session.handling_notices_during_setup(config):
        out.bell.ring()
    assert out.taken == 0
    out.bell.ring()  # no further handler is created
    assert out.taken == 1


def start(config: TerminationConfig, bell: Bell | None, error: BaseException) -> None:
    """A start that fails, perhaps under a notice."""
    with current_session.handling_notices_during_setup(config):
        if bell is not None:
            bell.ring()
        raise error


@pytest.mark.parametrize("grace", [None, LONG])
def test_a_start_that_fails_under_a_notice_leaves(
    program: Program,
    out: Ways,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    grace: float | None,
) -> None:
    """This is not a failure: the notice was kept for a handler that never exists."""
    end_a_handler_of_two_workers(program, monkeypatch)
    config = out.config(grace)
    tfpreempt.handle_early_notices(config)

    def fail(is_told: bool) -> None:
        with pytest.raises(OSError, match="no disk"):
            start(config, out.bell if is_told else None, OSError("no disk"))

    fail(is_told=False)
    assert out.taken == 0
    fail(is_told=True)
    assert out.taken == 1
    assert "OSError: no disk" in caplog.text
    fail(is_told=False)  # the exit function returned, and the notice is served
    assert out.taken == 1


def test_ctrl_c_in_a_start_is_the_users_under_a_notice_too(
    program: Program, out: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_a_handler_of_two_workers(program, monkeypatch)
    config = out.config()
    tfpreempt.handle_early_notices(config)
    with pytest.raises(KeyboardInterrupt):
        start(config, out.bell, KeyboardInterrupt())
    assert out.taken == 0


def test_a_start_hears_the_signals_of_its_own_config_too(
    program: Program, out: Ways
) -> None:
    """The early-notice handler has another config without these signals."""
    tfpreempt.handle_early_notices(out.config())
    own = Ways()
    config = TerminationConfig(exit_fn=own.leave, signals=("USR1",))
    before = signal.getsignal(signal.SIGUSR1)
    with current_session.handling_notices_during_setup(config):
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: own.taken)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert (own.taken, out.taken) == (1, 0)


def test_a_signal_watched_twice_is_handled_once(program: Program, out: Ways) -> None:
    config = TerminationConfig(exit_fn=out.leave, signals=("USR1",))
    tfpreempt.handle_early_notices(config)
    with current_session.handling_notices_during_setup(config):
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: out.taken)
        time.sleep(0.05)
    assert out.taken == 1


def test_another_process_has_no_notices_of_this_one(
    program: Program, out: Ways
) -> None:
    with program.handler() as handler:
        handler.run(program.step)
    tfpreempt.handle_early_notices(out.config(LONG))
    out.bell.ring()
    with (
        new_process(),
        Program(program.directory / "other").handler() as other,
    ):
        other.run(lambda: None)
        assert not is_told()
