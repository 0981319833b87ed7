"""tfpreempt.trackers: one run over all starts, each step once, without TensorFlow.

A start is a handler without a TensorFlow checkpoint, in this process; its end without
`close` is a kill. tests/recipes/test_trackers.py has real kills and real readers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfpreempt
from tfpreempt import errors, trackers
from tfpreempt.cli.report.scalars import _frames
from tfpreempt.core import replay
from tfpreempt.handler import current_session
from tfpreempt.states import StepCounter
from tfpreempt.trackers import Tracker

pytestmark = pytest.mark.timeout(60)
Rows = list[tuple[int, dict[str, float]]]


class Server(Tracker):
    """A tracker that keeps values for ever, and loses what it has not stored.

    Args:
        rows: the stored rows.
        kept_rows: number of rows that it may lose.
        is_full: whether it can store nothing.
    """

    def __init__(self, rows: Rows, kept_rows: int = 0, is_full: bool = False) -> None:
        super().__init__("json", None)
        self._rows, self._queue, self._is_full = rows, Rows(), is_full
        self._kept_rows = kept_rows

    def _start(self, key: str, base: int | None) -> None:
        self.run_id = key
        for step, row in self._rows:
            self._before.update(dict.fromkeys(row, step))

    def _write(self, row: dict[str, float], step: int) -> None:
        self._queue.append((step, row))

    def _flush(self) -> None:
        if self._is_full:
            raise OSError(28, "No space left on device")
        if not self._kept_rows:
            self.store()

    def store(self) -> None:
        self._rows += self._queue
        self._queue.clear()


@contextlib.contextmanager
def start(directory: Path, **more: Any) -> Iterator[Any]:
    """A start that is killed at the end of the block, unless it has closed the handler.

    Yields:
        A function that makes a step.
    """
    with current_session.new_process():
        config = tfpreempt.TerminationConfig(exit_fn=lambda: None, signals=())
        step = StepCounter()
        handler = tfpreempt.PreemptionCheckpointHandler(
            None, None, directory, config, async_save=False, **more
        )
        yield handler, lambda: handler.run(step.increment)
    step.unregister()
    gc.collect()


def steps_in_files(folder: Path, *, drops: bool = True) -> dict[str, list[int]]:
    """The steps by tag, as TensorBoard reads event files.

    Args:
        folder: the folder of the files.
        drops: whether a START mark drops the steps from its own on.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        for event in map(Event.FromString, _frames(path)):
            if drops and event.session_log.status == SessionLog.START:
                for steps in found.values():
                    steps[:] = [step for step in steps if step < event.step]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def train(directory: Path, tracker: Tracker, upto: int, **more: Any) -> None:
    """Trains and logs up to a step, with a commit every four steps, and is killed."""
    with start(directory, save_freq=4, **more) as (handler, make_step):
        for _ in range(handler.total_run_calls, upto):
            make_step()
            tracker.log({"loss": handler.total_run_calls})
        if isinstance(tracker, Server):
            return
        tracker._flush()  # as in a long run: more than the last commit is stored
    tracker.unregister()


def test_tensorboard_drops_the_steps_after_the_restored_commit(tmp_path: Path) -> None:
    for upto in (7, 11):
        train(tmp_path / "ckpt", trackers.tensorboard(tmp_path / "logs"), upto)
    tracker = trackers.tensorboard(tmp_path / "logs", config={"rate": 0.1})
    with start(tmp_path / "ckpt") as (handler, make_step):
        assert handler.total_run_calls == 8
        make_step()
        tracker.log({"loss": 1, "other": 2})
        tracker.log({"loss": 1})
        handler.close()
        tracker.log({"test": 3})
        tracker.finish()
    [folder] = (tmp_path / "logs").iterdir()
    assert tracker.run_id == str(folder)
    found = steps_in_files(folder)
    assert found.pop("tfpreempt/goodput") == [9]
    assert found == {
        "loss": [*range(1, 10)], "other": [9], "test": [9], "config/text_summary": [8],
    }  # fmt: skip
    tracker.unregister()


def test_a_kill_before_the_first_commit_leaves_no_second_run(tmp_path: Path) -> None:
    for _ in range(2):
        train(tmp_path / "ckpt", trackers.tensorboard(tmp_path / "logs"), 2)
    [folder] = (tmp_path / "logs").iterdir()
    assert steps_in_files(folder) == {"loss": [1, 2]}


def test_a_start_from_scratch_begins_a_new_run(tmp_path: Path) -> None:
    for _ in range(2):
        logs = trackers.tensorboard(tmp_path / "logs")
        train(tmp_path / "ckpt", logs, 5, restore=False)
    assert [steps_in_files(each) for each in (tmp_path / "logs").iterdir()] == [
        {"loss": [1, 2, 3, 4, 5]}
    ] * 2


def test_a_tracker_made_after_the_handler_continues_its_run(tmp_path: Path) -> None:
    runs = []
    for upto in (5, 6):
        with start(tmp_path / "ckpt", save_freq=4) as (handler, make_step):
            tracker = trackers.tensorboard(tmp_path / "logs")
            while handler.total_run_calls < upto:
                make_step()
                tracker.log({"loss": 1})
            runs.append(tracker.run_id)
        tracker.unregister()
    assert runs[0] == runs[1]


def test_a_value_that_cannot_be_deleted_is_not_logged_twice(tmp_path: Path) -> None:
    rows: Rows = []
    for upto in (7, 11, 12):
        server = Server(rows)
        train(tmp_path, server, upto)
        server.store()
        server.unregister()
    assert rows == [(step, {"loss": step}) for step in range(1, 13)]


def test_rows_that_the_tracker_has_lost_are_logged_again(tmp_path: Path) -> None:
    rows: Rows = []
    for upto, stored in ((7, 2), (11, 4), (12, 99)):
        server = Server(rows, kept_rows=3)
        train(tmp_path, server, upto)
        rows += server._queue[:stored]
        server.unregister()
    assert rows == [(step, {"loss": step}) for step in range(1, 13)]


def test_a_full_tracker_costs_no_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([], is_full=True)
    with start(tmp_path, save_freq=2) as (handler, make_step):
        for _ in range(3):
            make_step()
            server.log({"loss": 1})
        assert [each.step for each in handler.checkpoints()] == [2]
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "may lack steps before the next commit: [Errno 28]" in warning.getMessage()
    server.unregister()


def test_a_full_tracker_does_not_prevent_the_last_commit_of_a_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([], is_full=True)
    with start(tmp_path) as (_, make_step):
        make_step()
        server.on_epoch_end(0, {"loss": 1})
        server.on_train_end()  # before the commit
    assert "may lack steps before the next commit" in caplog.text
    server.unregister()


def test_after_a_complete_run_the_last_step_is_known(tmp_path: Path) -> None:
    rows: Rows = []
    for _ in range(2):
        server = Server(rows)
        with start(tmp_path) as (handler, make_step):
            while handler.total_run_calls < 3:
                make_step()
                server.log({"loss": 1})
            handler.close()
            server.log({"test": 2})
            server.finish()
        server.unregister()
    goodput = rows.pop()
    assert goodput[0] == 3
    assert goodput[1].keys() == {"tfpreempt/goodput"}
    assert rows == [*((step, {"loss": 1}) for step in (1, 2, 3)), (3, {"test": 2})]


def test_epochs_are_logged_with_their_numbers_only(tmp_path: Path) -> None:
    rows: Rows = []
    server = Server(rows)
    with start(tmp_path) as (_, make_step):
        make_step()
        server.set_model(None)
        server.on_train_batch_end(3, {"loss": 1})
        server.on_epoch_end(0, {"loss": 1, "note": "text"})
        server.on_train_end()
    assert rows[0] == (1, {"epoch": 0, "loss": 1})
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        server.unknown  # noqa: B018
    server.unregister()


def test_only_the_chief_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1", "b:1"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    server = Server([])
    with current_session.new_process():
        server.log({"loss": 1})
        server.finish()
    assert server.run_id is None
    server.unregister()


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([])
    expected = "expected a PreemptionCheckpointHandler"
    with (
        current_session.new_process(),
        pytest.raises(errors.UsageError, match=expected),
    ):
        server.log({"loss": 1})
    with pytest.raises(errors.ConfigurationError, match="expected a dict of numbers"):
        server.log({"loss": "low"})
    server.unregister()
    for package, make in (
        ("wandb", trackers.wandb),
        ("mlflow", trackers.mlflow),
        ("tensorboardX", lambda: trackers.tensorboard(tmp_path)),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(errors.ConfigurationError, match=f"pip install {package}$"):
            make()


def test_a_replay_logs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And commits its last step in the copy, not in the directory of the run."""
    rows, run, copy = Rows(), tmp_path / "run", tmp_path / "copy"
    train(run, Server(rows), 6)
    assert len(rows) == 4
    shutil.copytree(run, copy)
    steps = replay.Replay(directory=str(run), copy=str(copy), until=5)
    for name, value in steps.to_environment().items():
        monkeypatch.setenv(name, value)
    replay.read_replay.cache_clear()
    try:
        with pytest.raises(SystemExit):
            train(run, Server(rows), 6)
    finally:
        monkeypatch.undo()
        replay.read_replay.cache_clear()
    assert len(rows) == 4
    assert [(run / name).exists() for name in ("4", "5")] == [True, False]
    assert (copy / "5" / "COMMITTED").exists()
