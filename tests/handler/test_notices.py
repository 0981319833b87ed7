"""Notices and boundaries: `run()` and related calls, in one process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import tensorflow as tf

from tests.handler.program import Program, is_told, wait_until
from tfpreempt import State, errors
from tfpreempt.handler import current_session
from tfpreempt.handler.handler import PreemptionCheckpointHandler
from tfpreempt.platforms import detected
from tfpreempt.testing.metadata import FakeGce

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


# --- notices, boundaries -------------------------------------------------------------


def test_exit_fn_that_returns_and_a_second_notice(program: Program) -> None:
    """A.6: training continues after the commit; the next notice works too."""
    with program.handler() as handler:
        for calls in (3, 6):
            while handler.total_run_calls < calls:
                handler.run(program.step)
            program.button.press()
            handler.run(program.step)
    assert program.exits == 2
    assert [r["step"] for r in program.events("commit")] == [3, 6, 7]
    assert handler.total_run_calls == 7


@pytest.mark.parametrize("async_save", [False, True])
def test_a_notice_within_a_periodic_save_waits_for_no_step(
    program: Program, async_save: bool
) -> None:
    """The periodic commit serves the notice."""

    class Told(State):
        was_told = False

        def sync(self) -> None:
            """Exists so that there is no trial save."""

        def save(self, fileobj: IO[bytes]) -> None:
            if not self.was_told:
                self.was_told = True
                program.button.press()

        def load(self, fileobj: IO[bytes]) -> None:
            pass

    told, exits_before = Told("told"), []
    with program.handler(save_freq=2, async_save=async_save) as handler:
        for _ in range(3):
            handler.run(lambda: exits_before.append(program.exits))
    assert told.was_told
    assert exits_before == [0, 0, 1]
    assert [r["step"] for r in program.events("commit")] == [2, 3]


def test_the_platform_s_notices_are_added_to_tensorflow_s_own_config(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFPREEMPT_PLATFORM", raising=False)
    with FakeGce() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        at_once = tf.distribute.experimental.TerminationConfig(grace_period=0)
        handler = PreemptionCheckpointHandler(
            None, program.checkpoint, program.directory, at_once
        )
        handler.run(program.step)
        fake.set("instance/preempted", "TRUE")
        wait_until(is_told)
        with pytest.raises(SystemExit) as caught:
            handler.run(program.step)
    assert caught.value.code == 143
    assert [each["source"] for each in program.events("notice")] == ["gce:preempted"]
    assert [each["step"] for each in program.events("commit")] == [1]


def test_without_a_config_sigterm_is_watched_before_the_metadata_server_answers(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFPREEMPT_PLATFORM", raising=False)
    asked, answers = threading.Event(), threading.Event()

    def late(*arguments: Any) -> NoReturn:
        asked.set()
        answers.wait(30)
        raise errors.NoticeError("no answer")

    monkeypatch.setattr(detected, "find_cloud", late)
    with FakeGce() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        handler = PreemptionCheckpointHandler(
            None, program.checkpoint, program.directory, termination_config=None
        )
        handler.run(program.step)
        assert asked.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(is_told)
        with pytest.raises(SystemExit) as caught:
            handler.run(program.step)
        answers.set()
    assert caught.value.code == 143
    assert [each["source"] for each in program.events("notice")] == ["signal:SIGTERM"]
    assert [each["step"] for each in program.events("commit")] == [1]


def test_the_line_of_a_notice_names_the_next_boundary(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit of a notice in an evaluation is made by `check_preemption()`."""
    with program.handler() as handler:
        handler.run(program.step)
        program.button.press()
        handler.check_preemption()
        handler.run(lambda: (program.button.press(), wait_until(is_told)))
    told = [each for each in caplog.messages if each.startswith("preemption notice")]
    between, within = (each.partition("). Checkpointing ")[2] for each in told)
    assert between.startswith("at the next boundary: a step, a batch of a validation")
    assert within == "when the current step finishes"
    assert "pass termination_config=TerminationConfig(grace_period=...)" in told[0]


@pytest.mark.parametrize(("grace", "is_warned"), [(0.05, True), (30.0, False)])
def test_steps_longer_than_the_grace_period_cause_a_warning(
    program: Program, grace: float, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with program.handler(config={"grace_period": grace}) as handler:
        for _ in range(5):
            handler.run(time.sleep, 0.1)
    found = [each for each in caplog.messages if "a step takes " in each]
    assert len(found) == is_warned
    [commit] = program.events("commit")
    assert 0.1 <= commit["step_seconds"] < 10.0


def test_a_save_that_does_not_fit_after_a_step_causes_a_warning(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """The duration of the last save is known."""
    with program.handler(config={"grace_period": 10.0}) as handler:
        here = current_session.current()
        assert here is not None
        here.coordinator.deadlines.save_seconds = 5.0
        for _ in range(5):
            handler.run(time.sleep, 0.1)
    [found] = [each for each in caplog.messages if "a step takes" in each]
    assert "the save after the step 9.5 s with margins" in found
    assert "may terminate the process in the save" in found


def test_a_check_that_is_refused_is_no_boundary(program: Program) -> None:
    """The counts do not change, so they stay equal on all workers."""
    with program.handler() as handler:
        handler.run(program.step)
        here = current_session.current()
        assert here is not None
        other = program.handler(checkpoint_dir=program.directory / "other")
        other.close()
        before = here.step_flag.started
        with pytest.raises(errors.HandlerClosedError):
            other.check_preemption()
        assert here.step_flag.started == before


def test_a_check_is_a_boundary_that_counts_no_step(program: Program) -> None:
    handler = program.handler(config={"exit_fn": None})
    handler.check_preemption()
    handler.run(program.step)
    handler.check_preemption()
    assert handler.total_run_calls == 1
    with pytest.raises(errors.NestedRunError, match=r"check_preemption\(\)"):
        handler.run(handler.check_preemption)


def test_a_check_after_close_is_refused(program: Program) -> None:
    handler = program.handler()
    handler.close()
    with pytest.raises(errors.HandlerClosedError):
        handler.check_preemption()


def test_an_error_in_a_bare_step_commits_no_incomplete_step(
    program: Program,
) -> None:
    """In a loop without `run()`, the step continues after the check."""

    def half_a_step() -> NoReturn:
        with program.handler() as handler:
            handler.save_checkpoint_if_preempted()
            handler.check_preemption()
            program.button.press()
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        half_a_step()
    assert program.events("commit") == []


def test_the_default_exit_is_143(program: Program) -> None:
    """FACTS 2.15: 143, with the batch of the next step not yet taken."""
    taken = []
    handler = program.handler(config={"exit_fn": None})
    handler.run(taken.append, 1)
    program.button.press()
    with pytest.raises(SystemExit) as left:
        handler.run(taken.append, 2)
    assert left.value.code == 143
    assert taken == [1]
    assert program.events("exit")[0]["outcome"] == "committed"


def test_a_program_that_catches_the_exit_continues(program: Program) -> None:
    """FACTS 2.7: SystemExit is caught, as notebooks do; a second notice works."""
    handler = program.handler(config={"exit_fn": None})
    for step in (1, 2):
        handler.run(program.step)
        program.button.press()
        with pytest.raises(SystemExit):
            handler.run(program.step)
        assert [r["step"] for r in program.events("commit")][-1] == step
    handler.run(program.step)
    handler.close()
    assert [r["step"] for r in program.events("commit")] == [1, 2, 3]


@pytest.mark.parametrize("grace", [None, 60])
def test_a_signal_that_was_served_is_not_served_again(
    program: Program, grace: float | None
) -> None:
    """Neither by a later handler in the grace period, nor if the signal is repeated."""
    config = {"signals": ("USR1",), "sources": (), "grace_period": grace}
    first = program.handler(config=config | {"exit_fn": None})

    def fail() -> NoReturn:
        with first:
            first.run(program.step)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(is_told)
            raise OSError("no step can follow, so a grace of a minute is not used up")

    with pytest.raises(SystemExit):
        fail()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: len(program.events("notice")) == 2)
    with program.handler(config=config) as second:
        for _ in range(3):
            second.run(program.step)
    assert program.exits == 0
    assert second.total_run_calls == first.total_run_calls + 3


def test_a_notice_that_is_still_up_is_served_again(
    program: Program, tmp_path: Path
) -> None:
    """An existing notice file means that the machine will be taken away now."""
    file = tmp_path / "preempted"
    config = {"signals": (), "sources": (), "notice_file": file, "exit_fn": None}
    first = program.handler(config=config)
    first.run(program.step)
    file.touch()
    wait_until(is_told)
    with pytest.raises(SystemExit):
        first.run(program.step)
    second = program.handler(config=config)
    wait_until(is_told)
    file.unlink()
    with pytest.raises(SystemExit):
        second.run(program.step)
    with program.handler(config=config) as third:
        third.run(program.step)
    assert third.total_run_calls == 2


def test_a_notice_that_is_up_at_close_is_served(program: Program) -> None:
    """FACTS 2.5: after the last step, before `close()`: a commit and the exit."""
    handler = program.handler()
    handler.run(program.step)
    program.button.press()
    handler.close()
    assert program.exits == 1
    assert [r["step"] for r in program.events("commit")] == [1]


def test_results_arguments_and_errors_pass_through_run(program: Program) -> None:
    """`run()` is transparent; an error does not spoil the handler."""
    with program.handler() as handler:
        assert handler.run(lambda a, *, b: (a, b), 1, b=2) == (1, 2)
        with pytest.raises(StopIteration):
            handler.run(next, iter(()))
        with pytest.raises(ZeroDivisionError):
            handler.run(lambda: 1 / 0)
        assert handler.total_run_calls == 1
        assert handler.run(lambda self: self, self=3) == 3


def test_the_end_of_a_scope_is_a_boundary(program: Program) -> None:
    """`watch_preemption_scope()` commits at its end after a notice."""
    handler = program.handler()
    with handler.watch_preemption_scope():
        program.step()
    assert program.exits == 0
    with handler.watch_preemption_scope():
        program.button.press()
    assert program.exits == 1
    handler.close()


def test_a_scope_without_counted_steps_is_saved_by_close(program: Program) -> None:
    with program.handler() as handler, handler.watch_preemption_scope():
        program.step()
    again = Program(program.directory)
    with again.handler():
        assert again.variable.numpy().tolist() == [2.0, 3.0]


def test_scopes_without_counted_steps_make_progress_in_each_start(
    program: Program,
) -> None:
    """Although the program no longer has a variable of the commit."""

    def train(program: Program, handler: PreemptionCheckpointHandler) -> None:
        with handler.watch_preemption_scope():
            program.step()
            program.button.press()

    program.checkpoint.extra = tf.Variable(0.0)
    for number in range(3):
        handler = program.handler(config={"exit_fn": None})
        assert program.variable.numpy()[0] == 1.0 + number
        with pytest.raises(SystemExit):
            train(program, handler)
        program = Program(program.directory)


def test_an_evaluation_in_a_scope_before_the_first_step_is_not_saved(
    program: Program,
) -> None:
    with program.handler(save_freq=1) as handler:
        handler.run(program.step)
    made = program.events("commit")
    again = Program(program.directory)
    with again.handler(save_freq=1) as handler:
        with handler.watch_preemption_scope():
            pass
        handler.run(again.step)
        assert again.events("commit") == made


def test_tensorflows_own_config(program: Program) -> None:
    """A.5: its watcher function and its exit function are used."""
    told = threading.Event()
    config = tf.distribute.experimental.TerminationConfig(
        termination_watcher_fn=told.is_set, exit_fn=program.leave, grace_period=0
    )
    handler = PreemptionCheckpointHandler(
        None, program.checkpoint, program.directory, config
    )
    with handler:
        handler.run(program.step)
        told.set()
        wait_until(is_told)
        handler.run(program.step)
    assert program.exits == 1
    assert program.events("notice")[0]["source"].startswith("callable:")


# --- signals -------------------------------------------------------------------------


def test_the_previous_signal_handler_is_chained_and_restored(program: Program) -> None:
    """FACTS 2.8: it is called too, and is back after `close()`; ours only records."""
    seen: list[int] = []

    def theirs(signum: int, frame: Any) -> None:
        seen.append(signum)

    before = signal.signal(signal.SIGUSR1, theirs)
    try:
        with program.handler(config={"signals": ("USR1",)}) as handler:
            handler.run(program.step)
            ours: Any = signal.getsignal(signal.SIGUSR1)
            assert ours is not theirs
            ours(signal.SIGUSR1, None)  # called, and not sent: nothing but the chain
            assert seen == [signal.SIGUSR1]
            assert program.events("notice") == []
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(is_told)
            handler.run(program.step)
            assert seen == [signal.SIGUSR1] * 2
        assert signal.getsignal(signal.SIGUSR1) is theirs
        assert program.exits == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_notice_active_at_the_start_is_in_the_journal(program: Program) -> None:
    """The event of the last preemption may be up still."""
    config = tf.distribute.experimental.TerminationConfig(
        termination_watcher_fn=lambda: True, exit_fn=program.leave, grace_period=0
    )
    handler = PreemptionCheckpointHandler(
        None, program.checkpoint, str(program.directory), config
    )
    wait_until(is_told)
    handler.run(program.step)
    assert len(program.events("notice")) == 1
    assert program.exits == 1


def test_a_dropped_handler_puts_the_signals_back(program: Program) -> None:
    """FACTS 2.6: an unused handler that is dropped restores all signals."""
    before = signal.getsignal(signal.SIGUSR1)
    handler = program.handler(config={"signals": ("USR1",)})
    assert signal.getsignal(signal.SIGUSR1) is not before
    del handler
    gc.collect()
    assert signal.getsignal(signal.SIGUSR1) is before
    assert list(current_session.current().runs) == []


# --- errors under a notice -----------------------------------------------------------


class LostReader:
    """Data whose reader was killed."""

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self._at_once = at_once

    def __iter__(self) -> LostReader:
        return self

    def __next__(self) -> float:
        batch: float = self._pipe.recv()
        return batch

    @property
    def _pipe(self) -> Any:
        self._at_once()
        ours, theirs = multiprocessing.Pipe(duplex=False)
        theirs.close()
        return ours


def train(program: Program, act: Callable[[Any], Any], **config: Any) -> None:
    with program.handler(config={"exit_fn": None, **config}) as handler:
        handler.run(program.step)
        act(handler)


@pytest.mark.parametrize("grace", [None, 60])
def test_an_error_between_two_runs_under_a_notice_commits_and_leaves(
    program: Program, grace: float | None
) -> None:
    """No step can follow, so a grace of a minute is not used up."""
    data = LostReader(program.button.press)
    with pytest.raises(SystemExit) as left:
        train(program, lambda handler: next(data), grace_period=grace)
    assert left.value.code == 143
    assert [r["step"] for r in program.events("commit")] == [1]
    assert program.events("exit")[0]["outcome"] == "committed"


def test_a_data_error_first_in_a_step_commits_the_state_before(
    program: Program,
) -> None:
    """Although the interval was already counted at the notice."""
    data = LostReader(program.button.press)

    def step() -> None:
        batch = next(data)
        program.variable.assign_add([batch, batch])

    with pytest.raises(SystemExit) as left:
        train(program, lambda handler: handler.run(step))
    assert left.value.code == 143
    assert [r["step"] for r in program.events("commit")] == [1]


def test_data_that_fail_within_a_step_commit_nothing(program: Program) -> None:
    """The assigned values are half of a step; the platform restarts the program."""
    data = LostReader(program.button.press)

    def step() -> None:
        program.step()
        next(data)

    with pytest.raises(SystemExit) as left:
        train(program, lambda handler: handler.run(step))
    assert left.value.code == 143
    assert program.events("commit") == []
    [exit] = program.events("exit")
    assert (exit["outcome"], "EOFError" in exit["detail"]) == ("lost", True)


def test_a_reader_that_keeps_its_position_in_saved_state(program: Program) -> None:
    """The reader may have advanced before its error: a batch would be skipped."""

    class Placed(LostReader):
        def __next__(self) -> float:
            program.variable.assign_add([1.0, 1.0])
            return super().__next__()

    data = Placed(program.button.press)
    with pytest.raises(SystemExit) as left:
        train(program, lambda handler: handler.run(lambda: next(data)))
    assert left.value.code == 143
    assert program.events("commit") == []


def test_an_error_in_a_step_that_run_does_not_call_commits_nothing(
    program: Program,
) -> None:
    def half_a_step(handler: Any) -> None:
        handler.save_checkpoint_if_preempted()
        program.step()
        program.button.press()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(program, half_a_step)
    assert program.events("commit") == []


def test_a_loop_that_failed_can_be_tried_again_in_its_directory(
    program: Program,
) -> None:
    """The program has no reference to the first handler, and cannot close it."""

    def attempt(step: Callable[[], Any]) -> int:
        handler = program.handler()
        handler.run(program.step)
        handler.save()
        handler.run(step)
        return handler.total_run_calls

    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)
    assert attempt(program.step) == 3


def test_an_error_in_a_step_under_a_notice_is_raised(program: Program) -> None:
    def step() -> None:
        program.button.press()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(program, lambda handler: handler.run(step))
    assert program.events("commit") == []


def test_without_a_notice_lost_data_are_an_error(program: Program) -> None:
    reads: list[Any] = [
        lambda handler: next(LostReader()),
        lambda handler: handler.run(next, LostReader()),
    ]
    for read in reads:
        with pytest.raises(EOFError):
            train(program, read)
    assert program.events("commit") == []


def test_the_second_step_of_a_process_is_measured_from_the_end_of_the_first(
    program: Program,
) -> None:
    """A notice may arrive after the second step, and needs the duration of a step."""
    with program.handler() as handler:
        for _ in range(2):
            handler.run(time.sleep, 0.01)
            time.sleep(0.02)  # the loop, or callbacks, before the next step
        [seconds] = handler._session.step_flag.step_times()
    assert seconds >= 0.03
