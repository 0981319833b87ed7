"""Asynchronous periodic saves, in one process."""

from __future__ import annotations

import datetime
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fakes.storage import FaultyObjectStore
from tests.handler.program import LIMIT, Program, wait_until
from tests.handler.test_heartbeat import opened_once_apart
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle_writer
from tfpreempt.checkpoint.bundles.tensor_copies import CopyMemory
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.directory.retention import metrics_of
from tfpreempt.core.deadline import SAFETY, until_end
from tfpreempt.core.events import Outcome
from tfpreempt.handler import current_session
from tfpreempt.handler.handler import PreemptionCheckpointHandler
from tfpreempt.storage.files import LocalFiles

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


class Gate:
    """Stands for the disk: each write of a large tensor waits until the gate is opened.

    Attributes:
        holds: number of writes that wait; None: all.
    """

    def __init__(self) -> None:
        self.holds: int | None = None
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.failure: OSError | None = None
        self.tensors: list[weakref.ref[Any]] = []

    def add(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.tensors = [weakref.ref(each.data) for each in args[2]]
            self.reached.set()
            if self.holds is not None:
                self.holds -= 1
                if self.holds < 0:
                    return self.really(*args, **kwargs)
            assert self.opened.wait(LIMIT)
            if self.failure is not None:
                raise self.failure
        return self.really(*args, **kwargs)

    really = staticmethod(bundle_writer.add)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Makes tfpreempt write all tensors, through the gate."""
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    gate = Gate()
    monkeypatch.setattr(bundle_writer, "add", gate.add)
    yield gate
    gate.opened.set()


def steps(program: Program, handler: PreemptionCheckpointHandler, to: int) -> None:
    while handler.total_run_calls < to:
        handler.run(program.step)


def commits(program: Program) -> list[tuple[int, str]]:
    return [(each["step"], each["because"]) for each in program.events("commit")]


def test_training_continues_while_a_save_is_written(
    program: Program, disk: Gate
) -> None:
    """The save has the state of its step, and is not a commit before its end."""
    handler = program.handler(save_freq=3)
    steps(program, handler, 3)
    handler.run(program.step)
    assert disk.reached.wait(LIMIT)
    assert handler.latest_checkpoint is None
    disk.opened.set()
    wait_until(lambda: commits(program))
    assert commits(program) == [(3, "periodic")]
    [told] = program.events("commit")
    assert 0 < told["blocked_seconds"] < told["save_seconds"]
    found = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(program.directory)))
    value = found.get_tensor("variable/.ATTRIBUTES/VARIABLE_VALUE")
    assert value.tolist() == [4.0, 5.0]
    handler.close()


def test_a_commit_made_during_an_exit_is_logged(
    program: Program, disk: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """The exit names no commit, and the next start resumes from this commit."""
    caplog.set_level("INFO")
    disk.opened.set()
    handler = program.handler(save_freq=1)
    steps(program, handler, 2)
    wait_until(lambda: commits(program))
    disk.opened.clear()
    disk.reached.clear()
    handler.run(program.step)
    assert disk.reached.wait(LIMIT)
    threading.Timer(0.2, disk.opened.set).start()
    here = current_session.current()
    assert here is not None
    here.exit.leave(Outcome.LOST, "a peer is gone")
    assert commits(program) == [(1, "periodic"), (2, "periodic")]
    path = program.directory / "2"
    assert f"checkpoint for step 2 committed: {path}" in caplog.messages
    handler.close()


def test_training_waits_for_the_save_on_request(program: Program, disk: Gate) -> None:
    handler = program.handler(save_freq=3, async_save=False)
    steps(program, handler, 4)
    assert commits(program) == [(3, "periodic")]
    handler.close()
    assert not disk.reached.is_set()


def test_a_managers_saves_are_waited_for(program: Program) -> None:
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )
    with program.handler(manager, save_freq=3) as handler:
        steps(program, handler, 4)
        assert commits(program) == [(3, "periodic")]


def test_no_copy_is_kept_once_it_is_written(program: Program, disk: Gate) -> None:
    with program.handler(save_freq=3) as handler:
        steps(program, handler, 4)
        assert disk.reached.wait(LIMIT)
        assert all(tensor() is not None for tensor in disk.tensors)
        disk.opened.set()
        wait_until(lambda: commits(program))
        wait_until(lambda: all(tensor() is None for tensor in disk.tensors))


def test_a_save_due_during_another_save_begins_afterwards(
    program: Program, disk: Gate
) -> None:
    with program.handler(save_freq=3) as handler:
        steps(program, handler, 6)
        threading.Timer(0.2, disk.opened.set).start()
        steps(program, handler, 8)
        assert commits(program)[0] == (3, "periodic")
    assert commits(program) == [(3, "periodic"), (6, "periodic"), (8, "finished")]


def test_a_wait_for_the_save_at_the_end_does_not_hang(
    program: Program, disk: Gate
) -> None:
    handler = program.handler(save_freq=3)
    steps(program, handler, 3)
    handler.save_checkpoint_if_preempted()
    assert disk.reached.wait(LIMIT)
    with opened_once_apart(disk.opened):
        handler.close()


def test_close_waits_for_it(program: Program, disk: Gate) -> None:
    handler = program.handler(save_freq=3)
    steps(program, handler, 3)
    handler.save_checkpoint_if_preempted()
    assert disk.reached.wait(LIMIT)
    threading.Timer(0.2, disk.opened.set).start()
    handler.close()
    assert [step for step, _ in commits(program)] == [3, 4]


def test_the_copy_elsewhere_is_of_it_too(program: Program, disk: Gate) -> None:
    """A wait for the mirror includes every save that has begun."""
    store = FaultyObjectStore(uri="memory://asynchronous")
    with program.handler(save_freq=3, mirror_dir=store) as handler:
        steps(program, handler, 4)
        assert disk.reached.wait(LIMIT)
        assert not handler.wait_for_mirror(0.1)
        threading.Timer(0.2, disk.opened.set).start()
        assert handler.wait_for_mirror(LIMIT)
        assert handler.mirror_status is not None
        assert handler.mirror_status.mirrored_step == 3


def test_another_save_follows_the_asynchronous_save(
    program: Program, disk: Gate
) -> None:
    with program.handler(save_freq=3) as handler:
        steps(program, handler, 4)
        assert disk.reached.wait(LIMIT)
        threading.Timer(0.2, disk.opened.set).start()
        handler.save()
        assert commits(program) == [(3, "periodic"), (4, "save")]


def test_a_failure_is_logged_and_training_continues(
    program: Program, disk: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with program.handler(save_freq=3) as handler:
        steps(program, handler, 4)
        disk.failure = OSError(28, "No space left on device")
        disk.opened.set()
        wait_until(lambda: program.events("fault"))
        disk.failure = None
        steps(program, handler, 5)
    [fault] = program.events("fault")
    assert fault["where"] == "periodic save"
    assert "No space left" in fault["error"]
    assert "periodic save failed" in caplog.text
    assert commits(program) == [(5, "finished")]
    assert not list(Path(program.directory).glob(".tfpreempt-staging/*"))


def test_a_notice_waits_for_the_save_if_there_is_time_for_both(
    program: Program, disk: Gate
) -> None:
    handler = program.handler(save_freq=3, config={"grace_period": LIMIT})
    steps(program, handler, 4)
    assert disk.reached.wait(LIMIT)
    threading.Timer(0.2, disk.opened.set).start()
    program.button.press()
    handler.run(program.step)
    assert commits(program)[:2] == [(3, "periodic"), (4, "preemption")]
    handler.close()


def test_a_notice_gives_up_a_save_that_would_take_too_long(
    program: Program, disk: Gate
) -> None:
    """The newest step matters; the older save is not committed afterwards."""
    grace = 6.0
    others = set(threading.enumerate())
    handler = program.handler(save_freq=3, config={"grace_period": grace})
    steps(program, handler, 4)
    assert disk.reached.wait(LIMIT)
    deadlines = handler._session.coordinator.deadlines
    deadlines.save_seconds = 0.9 * until_end(grace) / SAFETY
    program.button.press()
    handler.run(program.step)
    assert program.exits == 1
    assert commits(program) == [(4, "preemption")]
    disk.opened.set()
    handler.close()
    wait_until(
        lambda: not any("save" in t.name for t in {*threading.enumerate()} - others)
    )
    assert [step for step, _ in commits(program)] == [4, 5]


def test_a_notice_ends_the_wait_for_the_save_before(
    program: Program, disk: Gate
) -> None:
    """Saves are slower than their interval, so training waits for the save before."""
    disk.holds = 1
    handler = program.handler(save_freq=3, config={"grace_period": 3.0})
    steps(program, handler, 6)
    assert disk.reached.wait(LIMIT)
    handler._session.coordinator.deadlines.save_seconds = 1.0
    threading.Timer(0.2, program.button.press).start()
    handler.run(program.step)  # leaves before the seventh, with the sixth
    assert program.exits == 1
    assert commits(program) == [(6, "periodic")]
    disk.opened.set()
    handler.close()


@pytest.mark.timeout(25)
def test_an_exit_does_not_wait_for_a_save_that_was_given_up(
    program: Program, disk: Gate
) -> None:
    """The disk may hang for the whole grace period."""
    disk.holds = 1
    handler = program.handler(save_freq=3, config={"grace_period": 90.0})
    steps(program, handler, 4)
    assert disk.reached.wait(LIMIT)
    deadlines = handler._session.coordinator.deadlines
    deadlines.save_seconds = 0.98 * until_end(90.0) / SAFETY  # one has time alone
    program.button.press()
    handler.run(program.step)
    assert commits(program)[0] == (4, "preemption")
    assert program.exits == 1
    disk.opened.set()
    handler.close()


def test_the_duration_of_a_save_is_known_at_a_notice(
    program: Program, disk: Gate
) -> None:
    """Synchronous saves are measured; without them, asynchronous saves must do."""
    with program.handler(save_freq=3) as handler:
        deadlines = handler._session.coordinator.deadlines
        steps(program, handler, 4)
        assert disk.reached.wait(LIMIT)
        assert deadlines.save_seconds is None
        threading.Event().wait(0.5)
        disk.opened.set()
        wait_until(lambda: commits(program))
        assert handler._session.wait_for_save(LIMIT)
        beside = deadlines.save_seconds
        assert beside is not None
        assert beside >= 0.5
        handler.save()
        waited_for = deadlines.save_seconds
        assert waited_for is not None
        assert waited_for < beside
        steps(program, handler, 7)
        assert handler._session.wait_for_save(LIMIT)
        assert deadlines.save_seconds <= waited_for


def test_a_notice_at_its_very_step_leaves_with_it(program: Program, disk: Gate) -> None:
    handler = program.handler(save_freq=3, config={"grace_period": LIMIT})
    steps(program, handler, 3)
    handler._session.saves.try_save(handler._run)
    threading.Timer(0.2, disk.opened.set).start()
    program.button.press()
    handler.run(program.step)
    assert commits(program)[:1] == [(3, "periodic")]
    assert (3, "preemption") not in commits(program)
    handler.close()


def test_a_periodic_save_by_time_follows_the_arguments_of_the_program(
    program: Program, disk: Gate
) -> None:
    """With such options TensorFlow writes at the boundary."""
    every = datetime.timedelta(seconds=0.05)
    written: list[str] = []
    options = tf.train.CheckpointOptions(experimental_write_callbacks=[written.append])
    with program.handler(save_freq=every) as handler:
        end = time.monotonic() + LIMIT
        while not commits(program) and time.monotonic() < end:
            program.step()
            handler.save_checkpoint_if_preempted(options=options)
        assert written
        assert not disk.reached.is_set()
        disk.opened.set()  # at the end there are no arguments


def test_by_time_it_is_asynchronous_too(program: Program, disk: Gate) -> None:
    every = datetime.timedelta(seconds=0.05)
    with program.handler(save_freq=every) as handler:
        while not disk.reached.is_set():
            handler.run(program.step)
        before = handler.total_run_calls
        steps(program, handler, before + 20)
        assert commits(program) == []
        disk.opened.set()
        wait_until(lambda: commits(program))
    assert commits(program)[0][1] == "periodic"
    assert commits(program)[0][0] <= before


def test_a_failed_save_is_replaced_by_the_final_save(
    program: Program, disk: Gate
) -> None:
    """No step was trained since, but the failed save is not a commit."""
    handler = program.handler(save_freq=3)
    steps(program, handler, 3)
    handler._session.saves.try_save(handler._run)
    disk.failure = OSError(28, "No space left on device")
    disk.opened.set()
    wait_until(lambda: program.events("fault"))
    disk.failure = None
    handler.close()
    assert commits(program) == [(3, "finished")]


def test_another_handler_waits_for_it(program: Program, disk: Gate) -> None:
    """The other handler takes the lease over, and would delete the unfinished save."""
    first = program.handler(save_freq=3)
    steps(program, first, 4)
    assert disk.reached.wait(LIMIT)
    with pytest.raises(ZeroDivisionError):  # in a notebook, whose cell is run again
        first.run(lambda: 1 / 0)
    threading.Timer(0.2, disk.opened.set).start()
    with program.handler() as second:
        assert second.total_run_calls == 3
    assert commits(program)[0] == (3, "periodic")


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MemoryError(), "async_save=False"),
        (RuntimeError("can't start new thread"), "new thread"),
    ],
)
def test_a_copy_that_cannot_be_made_ends_no_training(
    program: Program,
    disk: Gate,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
    said: str,
) -> None:
    def copied(*args: Any) -> Any:
        raise problem

    monkeypatch.setattr(CopyMemory, "copied", copied)
    with program.handler(save_freq=3) as handler:
        steps(program, handler, 5)
    [fault] = program.events("fault")
    assert said in fault["error"]
    assert commits(program) == [(5, "finished")]
    assert not list(Path(program.directory).glob(".tfpreempt-staging/*"))


def test_a_save_that_was_given_up_writes_nothing_more(program: Program) -> None:
    """The disk is needed for the commit of the newest step."""
    data = np.zeros(64 << 20, np.uint8)
    tensor = bundle_writer.DenseTensor(
        name="x", dtype=4, shape=data.shape, data=data, can_be_cut=False
    )
    prefix = str(program.directory / "ckpt")
    program.directory.mkdir(exist_ok=True)
    tf.train.Checkpoint().write(prefix)
    cancel_token, asked = CancellationToken(), itertools.count()

    def check() -> None:
        if next(asked) == 2:
            cancel_token.cancel()
        cancel_token.check()

    files = RecordingFiles()
    with pytest.raises(errors.SaveError, match="was cancelled"):
        bundle_writer.add(files, prefix, [tensor], 1, check=check)
    written = Path(bundle_writer.data_file(prefix, 0, 1))
    assert written.stat().st_size < data.nbytes
    assert files.synced == []


class RecordingFiles(LocalFiles):
    """Knows which files were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync_file(self, path: str) -> None:
        self.synced.append(path)
        super().sync_file(path)


# --- saves that the program asks for -------------------------------------------------


def test_a_save_need_not_be_waited_for(program: Program, disk: Gate) -> None:
    """The save keeps its step and its metrics; the next save waits for it."""
    handler = program.handler()
    steps(program, handler, 2)
    assert handler.wait_for_save(0.0)
    assert handler.save(wait=False, metrics={"loss": 0.5}) is None
    assert disk.reached.wait(LIMIT)
    steps(program, handler, 4)
    assert not handler.wait_for_save(0.05)
    assert handler.checkpoints() == []
    disk.opened.set()
    assert handler.wait_for_save()
    assert commits(program) == [(2, "save")]
    (entry,) = catalog.scan(str(program.directory))
    assert metrics_of(entry.manifest) == {"loss": 0.5}
    assert entry.manifest.because == "save"
    handler.save(wait=False)
    handler.save(wait=False)
    assert handler.wait_for_save()
    assert commits(program) == [(2, "save"), (4, "save"), (4, "save")]
    handler.close()


def test_an_error_of_an_asynchronous_save_is_raised_once(
    program: Program, disk: Gate
) -> None:
    """For `save(wait=False)` and for a periodic save; older commits stay valid."""
    disk.opened.set()
    handler = program.handler(save_freq=4)
    steps(program, handler, 1)
    handler.save()
    disk.failure = OSError(28, "No space left on device")
    for _ in ("asked for", "periodic"):
        if handler.total_run_calls == 1:
            handler.run(program.step)
            handler.save(wait=False)
        else:
            steps(program, handler, 5)
        with pytest.raises(errors.SaveError, match="No space left on device"):
            handler.wait_for_save()
        assert handler.wait_for_save()
    disk.failure = None
    assert [each.step for each in handler.checkpoints()] == [1]
    handler.save(wait=False)
    assert handler.wait_for_save()
    handler.close()


@pytest.mark.parametrize("every", [2, datetime.timedelta(milliseconds=1)])
def test_an_error_before_the_copy_is_complete_is_raised_too(
    program: Program, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    """The disk is so full that a periodic save cannot begin."""
    handler = program.handler(save_freq=every)
    with monkeypatch.context() as full:

        def make_dirs(files: LocalFiles, path: str) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(LocalFiles, "make_dirs", make_dirs)

        def fails() -> bool:
            handler.run(program.step)
            try:
                handler.wait_for_save()
            except errors.SaveError as error:
                return "No space left on device" in str(error)
            return False

        wait_until(fails)
    assert handler.wait_for_save()
    handler.close()


@pytest.mark.parametrize("kind", ["manager", "async_save"])
def test_a_save_that_cannot_be_asynchronous_is_waited_for(
    program: Program, kind: str
) -> None:
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )
    handler = program.handler(manager if kind == "manager" else None, async_save=False)
    handler.run(program.step)
    assert handler.save(wait=False) is None
    assert commits(program) == [(1, "save")]
    handler.close()


def test_a_notice_after_a_save_has_a_commit_of_its_own(
    program: Program, disk: Gate
) -> None:
    """The program may have changed its state since `save()`."""
    handler = program.handler(config={"grace_period": LIMIT})
    steps(program, handler, 3)
    handler.save(wait=False)
    threading.Timer(0.2, disk.opened.set).start()
    program.button.press()
    handler.run(program.step)
    assert commits(program)[:2] == [(3, "save"), (3, "preemption")]
    handler.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1"])
def test_a_timeout_that_cannot_be(program: Program, timeout: Any) -> None:
    with program.handler() as handler:
        with pytest.raises(errors.ConfigurationError, match="timeout is"):
            handler.wait_for_save(timeout)
        handler.run(program.step)
