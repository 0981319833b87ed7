"""Saves of one process: contents, times, and the restart."""

from __future__ import annotations

import datetime
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import IO, Any

import keras
import pytest
import tensorflow as tf

from tests.checkpoint.fakes import watch_searches
from tests.fakes.process import new_process
from tests.handler.program import LIMIT, Program, is_told, wait_until
from tfpreempt import State, errors
from tfpreempt.handler import current_session
from tfpreempt.handler.exit import describe
from tfpreempt.handler.handler import PreemptionCheckpointHandler
from tfpreempt.handler.training_end import close_unfinished
from tfpreempt.states import JsonState

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


# --- what is saved -------------------------------------------------------------------


def test_arguments_reach_a_managers_save(program: Program) -> None:
    """A.5: `checkpoint_number=` names the checkpoint that the manager writes."""
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )
    with program.handler(manager) as handler:
        program.button.press()
        handler.save_checkpoint_if_preempted(checkpoint_number=77)
    assert program.exits == 1
    assert (program.directory / "ckpt-77.index").exists()


def test_the_keys_of_the_first_save_are_searched_for_after_the_first_step(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace of a notice is not spent on the search."""
    searches: list[int] = []
    watch_searches(monkeypatch, lambda: searches.append(handler.run_calls))
    with program.handler() as handler:
        for _ in range(3):
            handler.run(program.step)
        program.button.press()
        handler.save_checkpoint_if_preempted()
        assert handler.latest_checkpoint is not None
    assert program.exits == 1
    assert searches == [1]


def test_arguments_reach_our_own_save(program: Program) -> None:
    """A.5: likewise without a manager; positional as well."""
    with program.handler() as handler:
        program.button.press()
        handler.save_checkpoint_if_preempted(77)
        assert handler.latest_checkpoint is not None
    assert (program.directory / "77" / "COMMITTED").exists()


def test_a_save_fn_that_returns_a_path(program: Program) -> None:
    """A.4: it gets the arguments; its path gets a manifest and is restored."""
    calls = []

    def save_fn(name: str, *, suffix: str) -> str:
        calls.append((name, suffix))
        return program.checkpoint.write(str(program.directory / f"{name}-{suffix}"))

    handler = program.handler(config={"save_fn": save_fn, "exit_fn": None})
    handler.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit):
        handler.save_checkpoint_if_preempted("mine", suffix="a")
    assert calls == [("mine", "a")]
    prefix = program.directory / "mine-a"
    assert (Path(f"{prefix}.tfpreempt") / "COMMITTED").exists()
    again = Program(program.directory)
    restored = again.handler(config={"save_fn": save_fn})
    assert restored.total_run_calls == 1
    assert again.variable.numpy().tolist() == [2.0, 3.0]


def test_a_save_fn_that_returns_none(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """A.4: without a path there is no commit; a warning, and the exit continues."""
    handler = program.handler(config={"save_fn": lambda: None})
    handler.run(program.step)
    program.button.press()
    handler.run(program.step)
    assert program.exits == 1
    assert program.events("commit") == []
    assert "save_fn returned None" in caplog.text


def test_a_save_fn_that_raises(program: Program) -> None:
    """The exit continues, and the log reports the loss."""

    def save_fn() -> str:
        if handler.total_run_calls > 1:
            raise OSError("no such volume")
        return program.checkpoint.write(str(program.directory / "first"))

    handler = program.handler(config={"save_fn": save_fn})
    handler.run(program.step)
    handler.save()
    handler.run(program.step)
    program.button.press()
    handler.run(program.step)
    assert program.exits == 1
    left = program.events("exit")[-1]
    assert left["outcome"] == "lost"
    assert "no such volume" in left["detail"]
    assert [commit["step"] for commit in program.events("commit")] == [1]


@pytest.mark.parametrize("is_managed", [False, True])
def test_stock_tensorflow_restores_the_latest_checkpoint(
    program: Program, is_managed: bool
) -> None:
    """The value is a path, like that of a CheckpointManager."""
    manager = None
    if is_managed:
        manager = tf.train.CheckpointManager(
            program.checkpoint, str(program.directory), max_to_keep=None
        )
    with program.handler(manager) as handler:
        assert (handler.latest_checkpoint, handler.checkpoints()) == (None, [])
        for _ in range(2):
            handler.run(program.step)
            handler.save()
        path = handler.latest_checkpoint
        assert type(path) is str
        assert path == tf.train.latest_checkpoint(str(program.directory))
        assert manager is None or path == manager.latest_checkpoint
        assert [each.step for each in handler.checkpoints()] == [1, 2]
        assert [each.prefix for each in handler.checkpoints()][-1] == path
    variable = tf.Variable([0.0, 0.0])
    status = tf.train.Checkpoint(variable=variable).restore(path)
    status.assert_existing_objects_matched()
    assert variable.numpy().tolist() == [3.0, 4.0]


def test_save_freq_steps_and_by_hand(program: Program) -> None:
    """`save_freq=3` and `save()`; no more than `max_to_keep` stay."""
    with program.handler(save_freq=3, max_to_keep=2) as handler:
        while handler.total_run_calls < 8:
            handler.run(program.step)
            if handler.total_run_calls == 4:
                made = handler.save()
                assert made is not None
                assert Path(made.path).name == "4"
    commits = [(r["step"], r["because"]) for r in program.events("commit")]
    assert commits == [
        (3, "periodic"),
        (4, "save"),
        (6, "periodic"),
        (8, "finished"),
    ]
    assert sorted(p.name for p in program.directory.iterdir() if p.name.isdigit()) == [
        "6",
        "8",
    ]


def test_save_freq_so_much_time(program: Program) -> None:
    """`save_freq=timedelta(...)`: training continues during and after the commits."""
    every = datetime.timedelta(seconds=0.1)
    with program.handler(save_freq=every) as handler:
        end = time.monotonic() + LIMIT
        while len(program.events("commit")) < 2 and time.monotonic() < end:
            handler.run(program.step)
    assert program.exits == 0
    assert [r["because"] for r in program.events("commit")][:2] == ["periodic"] * 2


def test_a_complete_run_started_again_has_nothing_to_do(program: Program) -> None:
    """E.1: the final state is committed; `restore=False` starts afresh all the same."""
    with program.handler() as handler:
        for _ in range(5):
            handler.run(program.step)
    again = Program(program.directory)
    with again.handler() as handler:
        assert handler.total_run_calls == 5
    assert again.variable.numpy().tolist() == [6.0, 7.0]
    assert [r["step"] for r in program.events("commit")] == [5]
    afresh = Program(program.directory)
    with afresh.handler(restore=False) as handler:
        assert handler.total_run_calls == 0
    assert afresh.variable.numpy().tolist() == [1.0, 2.0]


def test_an_evaluation_after_a_restart_at_the_last_step(program: Program) -> None:
    """A preemption in the evaluation; the next start evaluates to the end."""
    found = JsonState("found", [])
    handler = program.handler(config={"exit_fn": None})
    for _ in range(3):
        handler.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit):
        handler.check_preemption()
    again = Program(program.directory)
    with again.handler() as handler:
        assert handler.total_run_calls == 3
        handler.check_preemption()
        found.value.append("evaluated")
    found.value = []
    with Program(program.directory).handler():
        assert found.value == ["evaluated"]
    commits = [(r["step"], r["because"]) for r in program.events("commit")]
    assert commits == [(3, "preemption"), (3, "finished")]
    found.unregister()  # the error's frames keep it, and later tests would meet it


def test_an_end_without_a_step_keeps_variables_of_the_first_step(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """An optimizer creates its moments there; a restart may have no further step."""

    def train(steps: int, *, is_preempted: bool = False) -> list[float]:
        variable = tf.Variable([1.0, 2.0])
        optimizer = keras.optimizers.Adam(0.1)
        here = Program(program.directory)
        here.checkpoint = tf.train.Checkpoint(v=variable, optimizer=optimizer)

        def step() -> None:
            slope = variable * (1.0 + tf.cast(optimizer.iterations, tf.float32))
            optimizer.apply_gradients([(slope, variable)])

        handler = here.handler(config={"exit_fn": None} if is_preempted else {})
        while handler.total_run_calls < steps:
            handler.run(step)
        if is_preempted:
            here.button.press()
            with pytest.raises(SystemExit):
                handler.check_preemption()
        else:
            handler.close()
        return [float(each) for each in variable.numpy()]

    train(6, is_preempted=True)
    train(6)
    assert "so the restored commit is kept" in caplog.text
    resumed = train(10)
    shutil.rmtree(program.directory)
    assert resumed == train(10)


def test_a_step_that_creates_missing_variables_is_a_step(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a save followed the step, and no value has changed since."""
    tracked = tf.train.Checkpoint(late=tf.Variable(3.0))
    program.checkpoint = tracked
    with program.handler() as handler:
        handler.run(lambda: None)
    again = Program(program.directory)
    again.checkpoint = tf.train.Checkpoint()

    def step() -> None:
        again.checkpoint.late = tf.Variable(0.0)

    with again.handler() as handler:
        handler.run(step)
        handler.save()
    assert "so the restored commit is kept" not in caplog.text
    assert again.checkpoint.late.numpy() == 3.0


def test_a_restart_without_a_commit_names_the_searched_directory(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with program.handler():
        assert caplog.text == ""  # a first start
    monkeypatch.setenv("TFPREEMPT_NUM_RESTARTS", "2")
    with Program(program.directory / "other").handler():
        assert " at restart 2: training starts from step 0" in caplog.text
        assert str(program.directory / "other") in caplog.text


def test_a_restart_after_starts_without_a_commit_searches_nothing(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a bad step before the first commit."""
    with program.handler():
        pass
    monkeypatch.setenv("TFPREEMPT_NUM_RESTARTS", "1")
    with Program(program.directory).handler():
        assert "no commit in" not in caplog.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("of the\n  program"), ["ValueError: of the program"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt"]),
        (SystemExit(0), []),
        (StopIteration(), []),
    ],
)
def test_the_journal_records_an_error_but_not_an_intended_exit(
    program: Program, error: BaseException, told: list[str]
) -> None:
    def train() -> None:
        with program.handler() as handler:
            handler.run(program.step)
            raise error

    with pytest.raises(type(error)):
        train()
    left = program.events("exit")
    assert [each["detail"] for each in left] == told
    assert {(each["outcome"], each["step"]) for each in left} <= {("failed", 1)}


def test_a_refused_start_names_the_step_of_the_commit(program: Program) -> None:
    with program.handler() as handler:
        for _ in range(3):
            handler.run(program.step)
    wider = tf.train.Checkpoint(variable=tf.Variable(tf.zeros([77])))
    with pytest.raises(errors.CheckpointMismatchError):
        program.handler(wider)
    finished, refused = program.events("exit")
    assert (finished["outcome"], finished["step"]) == ("finished", 3)
    assert (refused["outcome"], refused["step"]) == ("failed", 3)
    assert refused["detail"].startswith("CheckpointMismatchError: The checkpoint ")
    with program.handler() as handler:
        assert handler.total_run_calls == 3


def test_unrestored_variables_are_named_before_the_next_save(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    program.checkpoint.extra = tf.Variable(1.0)
    with program.handler() as handler:
        handler.run(program.step)
    again = Program(program.directory)
    with again.handler() as handler:
        assert "this program does not have" not in caplog.text
        handler.run(again.step)
    assert (
        caplog.text.count("this program does not have, so they were not restored (1)")
        == 1
    )


@pytest.mark.parametrize("where", ["run", "check_preemption"])
def test_a_notice_before_the_first_step_keeps_the_variables_of_the_optimizer(
    program: Program, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """A commit before the first step would lack the moments, which the step creates."""
    optimizer: Any = None

    def handler(program: Program) -> PreemptionCheckpointHandler:
        nonlocal optimizer
        optimizer = keras.optimizers.Adam(0.1)
        program.checkpoint.optimizer = optimizer
        return program.handler(config={"exit_fn": None})

    first = handler(program)
    first.run(optimizer.apply, [tf.ones([2])], [program.variable])
    moment = optimizer.variables[2].numpy().tolist()
    program.button.press()
    with pytest.raises(SystemExit):
        first.check_preemption()
    for _ in range(2):
        program = Program(program.directory)
        again = handler(program)
        program.button.press()
        with pytest.raises(SystemExit):
            again.run(int) if where == "run" else again.check_preemption()
    assert "so the restored commit is kept" in caplog.text
    assert "this program does not have" not in caplog.text
    assert [each["step"] for each in program.events("commit")] == [1]
    program = Program(program.directory)
    with handler(program):
        optimizer.build([program.variable])
        assert optimizer.variables[2].numpy().tolist() == moment


def test_variables_restored_by_alternating_steps_are_not_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a GAN, whose optimizers create their variables in their first steps."""

    def train(program: Program, steps: int) -> None:
        kept = program.variable
        made = {name: keras.optimizers.Adam(0.1) for name in ("one", "two")}
        given = tf.train.Checkpoint(variable=kept, **made)
        with program.handler(given) as handler:
            for number in range(steps):
                optimizer = made["two" if number % 2 else "one"]
                handler.run(optimizer.apply, [tf.ones_like(kept)], [kept])

    train(program, 2)
    train(Program(program.directory), 5)
    assert "this program does not have" not in caplog.text


def test_an_error_is_recorded_in_one_line_of_bounded_length() -> None:
    assert describe(ValueError()) == "ValueError"
    assert describe(ValueError("of the\n  program")) == "ValueError: of the program"
    long = describe(OSError("/" + "x" * 1000))
    assert long.startswith("OSError: /xxx")
    assert long.endswith("xxx ...")
    assert len(long) == 300


def test_a_final_save_that_fails_is_no_success(program: Program) -> None:
    """E.1: an exit with 0 would not be started again, and nothing may be durable."""
    handler = program.handler(save_freq=2)
    in_the_way = program.directory / ".tfpreempt-staging"
    in_the_way.write_text("a file")
    for _ in range(3):
        handler.run(program.step)  # a periodic save that fails is survived
    with pytest.raises(errors.SaveError, match="step 3") as raised:
        handler.close()
    assert "start the program again" in str(raised.value.__notes__)
    faults = [record["where"] for record in program.events("fault")]
    assert faults == ["periodic save", "the final save"]
    [left] = program.events("exit")
    assert left["outcome"] == "failed"
    assert left["detail"].startswith("SaveError: ")
    handler.close()  # it is closed
    in_the_way.unlink()
    with program.handler() as handler:
        assert handler.total_run_calls == 0


@pytest.mark.parametrize("is_mended", [False, True])
@pytest.mark.parametrize("failed", ["save()", "preemption", "periodic round"])
def test_after_a_failed_save_the_end_is_committed_or_close_raises(
    program: Program, failed: str, is_mended: bool
) -> None:
    """Also where no step follows the failed save."""
    handler = program.handler(async_save=False)
    handler.run(program.step)
    in_the_way = program.directory / ".tfpreempt-staging"
    in_the_way.write_text("a file")
    if failed == "save()":
        with pytest.raises(errors.SaveError):
            handler.save()
    elif failed == "preemption":  # the exit function returns
        program.button.press()
        handler.check_preemption()
        assert program.exits == 1
    else:
        here = current_session.current()
        assert here is not None
        here.coordinator.periodic()
        wait_until(is_told)
        handler.check_preemption()
        assert program.events("fault")
    if is_mended:
        in_the_way.unlink()
        handler.close()
        assert [each["step"] for each in program.events("commit")] == [1]
    else:
        with pytest.raises(errors.SaveError, match="step 1"):
            handler.close()
        assert program.events("commit") == []


def test_a_state_that_fails_in_the_final_save(program: Program) -> None:
    """The error is raised unchanged, and the handler is closed."""

    class Broken(State):
        def save(self, fileobj: IO[bytes]) -> None:
            raise TypeError("cannot pickle")

        def load(self, fileobj: IO[bytes]) -> None:
            pass

    broken = Broken("broken")
    handler = program.handler()
    handler.run(program.step)
    with pytest.raises(TypeError, match="cannot pickle"):
        handler.close()
    broken.unregister()
    with pytest.raises(errors.HandlerClosedError):
        handler.run(program.step)


def test_two_open_handlers_are_both_saved(program: Program) -> None:
    """FACTS 2.7: at a notice every open handler commits, and at its own `close()`."""
    other = Program(program.directory.with_name("other"))
    first, second = program.handler(), other.handler()
    first.run(program.step)
    second.run(other.step)
    program.button.press()
    second.run(other.step)
    assert (program.exits, other.exits) == (1, 0)
    assert [r["step"] for r in program.events("commit")] == [1]
    assert [r["step"] for r in other.events("commit")] == [1]
    first.run(program.step)
    first.close()
    second.close()
    assert [r["step"] for r in program.events("commit")] == [1, 2]
    assert [r["step"] for r in other.events("commit")] == [1, 2]


def test_a_checkpoint_of_a_plain_manager_is_restored(program: Program) -> None:
    """G.2: a run resumes from a checkpoint of a CheckpointManager."""
    program.variable.assign([5.0, 6.0])
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=1
    )
    path = manager.save()
    again = Program(program.directory)
    with again.handler() as handler:
        assert handler.total_run_calls == 0
        assert again.variable.numpy().tolist() == [5.0, 6.0]
        handler.run(again.step)
    assert Path(path + ".index").exists()
    third = Program(program.directory)
    with third.handler():
        assert third.variable.numpy().tolist() == [6.0, 7.0]


def test_a_notice_just_after_a_save_has_a_commit_of_its_own(program: Program) -> None:
    """The program may have changed its state since `save()`."""
    handler = program.handler(config={"exit_fn": None})
    handler.run(program.step)
    handler.save()
    program.button.press()
    with pytest.raises(SystemExit) as left:
        handler.run(program.step)
    assert left.value.code == 143
    commits = [(r["step"], r["because"]) for r in program.events("commit")]
    assert commits == [(1, "save"), (1, "preemption")]
    [exit] = program.events("exit")
    assert (exit["outcome"], exit["code"], exit["step"]) == ("committed", 143, 1)


def test_a_save_that_failed_just_before_a_notice_is_tried_again(
    program: Program,
) -> None:
    handler = program.handler()
    handler.run(program.step)
    contents = handler._run.directory.contents
    capture, contents.capture = contents.capture, lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        handler.save()
    contents.capture = capture
    program.button.press()
    handler.run(program.step)
    assert [r["because"] for r in program.events("commit")] == ["preemption"]


def test_a_save_that_fails_leaves_the_last_commit(program: Program) -> None:
    """A notice whose save fails: the process exits, outcome lost, the commit stays."""

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    handler = program.handler(config={"save_fn": None})
    handler.run(program.step)
    handler.save()
    handler.run(program.step)
    handler._run.directory.contents.capture = fail
    program.button.press()
    handler.run(program.step)
    assert program.exits == 1
    [left] = program.events("exit")
    assert left["outcome"] == "lost"
    assert "No space left" in left["detail"]
    assert handler.latest_checkpoint == str(program.directory / "1" / "ckpt")


@pytest.mark.parametrize("is_used", [False, True])
def test_a_second_handler_in_the_directory_of_an_open_one_is_refused(
    program: Program, tmp_path: Path, is_used: bool
) -> None:
    """One handler would restore the other's counts, even if no handler trains."""
    first = program.handler()
    if is_used:
        first.run(program.step)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    before = signal.getsignal(signal.SIGUSR1), threading.active_count()
    for place in (program.directory, tmp_path / "link" / program.directory.name):
        says = f"open in '{program.directory}'"
        with pytest.raises(errors.ConfigurationError, match=says):
            program.handler(checkpoint_dir=place, config={"signals": ("USR1",)})
    assert (signal.getsignal(signal.SIGUSR1), threading.active_count()) == before
    first.run(program.step)
    first.close()
    with program.handler() as second:
        assert second.total_run_calls == first.total_run_calls


def test_a_handler_that_was_dropped_is_in_nobodys_way(program: Program) -> None:
    program.handler()
    program.handler().close()


def test_a_handler_after_a_caught_exit_is_replaced(program: Program) -> None:
    """A notebook's cell is run again, and its old handler is still there."""
    first = program.handler(config={"exit_fn": None})
    first.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit):
        first.run(program.step)
    second = program.handler()
    assert second.total_run_calls == 1
    with pytest.raises(errors.HandlerClosedError):
        first.run(program.step)
    second.run(program.step)
    second.close()
    assert [r["step"] for r in program.events("commit")] == [1, 2]


def test_a_handler_that_trained_on_after_its_exit_does_not(program: Program) -> None:
    first = program.handler(config={"exit_fn": None})
    first.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit):
        first.run(program.step)
    first.run(program.step)
    with pytest.raises(errors.ConfigurationError, match="is open in"):
        program.handler()
    first.close()


def test_the_journal_has_the_facts_for_a_report(program: Program) -> None:
    """Duration of a start, time of the first step, time lost by a save."""
    with program.handler() as handler:
        for _ in range(3):
            handler.run(program.step)
        handler.save()
    [restored], [first] = program.events("restored"), program.events("firststep")
    assert 0 < restored["seconds"] < restored["process_seconds"]
    assert restored["start"] is restored["reached"] is None
    assert first["step"] == 1
    saved = program.events("commit")[0]
    assert saved["blocked_seconds"] == saved["save_seconds"] > 0


# --- the log -------------------------------------------------------------------------


@pytest.mark.parametrize("has_exited", [False, True])
def test_of_periodic_commits_the_first_and_the_last_are_logged(
    program: Program, caplog: pytest.LogCaptureFixture, has_exited: bool
) -> None:
    """At most one line in a minute; the last line also if the program fails.

    The same after an exit function that has returned.
    """
    caplog.set_level("INFO")

    def train_and_fail() -> None:
        with program.handler(save_freq=1, async_save=False) as handler:
            for step in range(5):
                if has_exited and step == 2:
                    program.button.press()
                handler.run(program.step)
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        train_and_fail()
    steps = [each["step"] for each in program.events("commit")]
    assert steps[:3] == [1, 2, 3]
    logged = [each for each in caplog.messages if "committed: " in each]
    more = " (further periodic commits are logged at most once a minute)"
    assert logged == [
        f"checkpoint for step {step} committed: {program.directory / str(step)}{end}"
        for step, end in ((steps[0], more), (steps[-1], ""))
    ]


def test_a_start_after_the_end_logs_that_training_is_complete(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with program.handler() as handler:
        handler.run(program.step)
        program.button.press()
        handler.run(program.step)
        handler.run(program.step)
    lines = []
    for _ in range(2):
        caplog.clear()
        with new_process(), program.handler():
            lines += [each for each in caplog.messages if "resumed at" in each]
    ended = f"resumed at step 3 from {program.directory / '3'}. The previous run ended"
    assert len(lines) == 2
    assert all(each.startswith(ended) for each in lines)
    assert "No step follows, unless the program now trains longer" in lines[0]


def test_a_second_commit_of_a_step_is_named_as_one(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with program.handler(async_save=False) as handler:
        handler.run(program.step)
        handler.save()
        handler.save()
    for number in (2, 3):  # close() commits the state after save()
        remark = f"another commit of step 1; {number} is its sequence number"
        path = f"{program.directory / f'1.{number}'} ({remark})"
        assert f"checkpoint for step 1 committed: {path}" in caplog.messages
    with new_process(), program.handler():
        pass
    assert any(f"resumed at step 1 from {path}" in each for each in caplog.messages)


# --- between save() or check_preemption() and the next run() -------------------------


@pytest.mark.parametrize("ending", ["notice", "evaluation", "close"])
def test_changes_after_save_are_in_the_next_commit(
    program: Program, ending: str
) -> None:
    """The commit of `save()` counted as the newest state, and the changes were lost."""
    handler = program.handler()
    handler.run(program.step)
    handler.save()
    program.variable.assign([7.0, 8.0])  # as an evaluation changes a learning rate
    if ending == "notice":
        program.button.press()
        handler.run(lambda: None)
        assert program.exits == 1
    elif ending == "evaluation":
        program.button.press()
        handler.check_preemption()
        assert program.exits == 1
    handler.close()
    again = Program(program.directory)
    again.handler().close()
    assert again.variable.numpy().tolist() == [7.0, 8.0]


@pytest.mark.parametrize("saved_by", ["notice", "save"])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_code_that_a_restart_does_not_execute_again_is_named(
    program: Program,
    caplog: pytest.LogCaptureFixture,
    saved_by: str,
    is_repeated: bool,
) -> None:
    """A restart in an evaluation left out the rest of the evaluation without a word."""
    handler = program.handler()
    for _ in range(4):
        handler.run(program.step)
    if saved_by == "notice":
        program.button.press()
        handler.check_preemption()
        assert program.exits == 1
    else:
        handler.save()
    close_unfinished(handler._session, handler._run)  # killed here
    again = Program(program.directory)
    handler = again.handler()
    assert handler.total_run_calls == 4
    if is_repeated:  # the loop begins with the evaluation
        handler.check_preemption()
    handler.run(again.step)
    named = "made after step 4, outside of run(): by save() or check_preemption()"
    assert (named in caplog.text) == (not is_repeated)
    handler.close()


def test_an_evaluation_in_front_of_the_first_step_needs_no_periodic_commit(
    program: Program,
) -> None:
    """The commit lacked the variables that the first step creates."""
    handler = program.handler()
    for _ in range(4):
        handler.run(program.step)
    handler.save()
    close_unfinished(handler._session, handler._run)
    again = Program(program.directory)
    handler = again.handler(save_freq=4)
    handler.check_preemption()
    handler.run(again.step)
    assert [each["step"] for each in program.events("commit")] == [4]
    close_unfinished(handler._session, handler._run)
