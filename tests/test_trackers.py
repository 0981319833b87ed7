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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfpreempt
from tests.fakes.process import new_process
from tests.replays import replaying
from tfpreempt import errors, trackers
from tfpreempt.cli.report.scalars import _frames
from tfpreempt.states import StepCounter
from tfpreempt.trackers import Tracker

pytestmark = pytest.mark.timeout(60)
Rows = list[tuple[int, dict[str, float]]]


class Server(Tracker):
    """A tracker that keeps values for ever, and loses values that are not stored.

    Args:
        rows: the stored rows.
        loses_seconds: age of the rows that the tracker may lose.
        is_full: whether the tracker cannot store values.
        refused: name of a metric that the tracker never accepts.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        loses_seconds: float = 0,
        is_full: bool = False,
        refused: str = "",
    ) -> None:
        super().__init__("json", None)
        self._rows, self._queue, self.is_full = rows, Rows(), is_full
        self._loses_seconds, self._refused = loses_seconds, refused

    def _start(self, key: str, base: int) -> None:
        self.run_id = key
        for step, row in self._rows:
            self._before.update(dict.fromkeys(row, step))

    def _write(self, row: dict[str, float], step: int) -> None:
        if self._refused in row:
            raise ValueError(f"{self._refused} is refused")
        self._queue.append((step, row))

    def _flush(self) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        if not self._loses_seconds:
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
    with new_process():
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
        server = Server(rows, loses_seconds=60)
        train(tmp_path, server, upto)
        rows += server._queue[:stored]
        server.unregister()
    assert rows == [(step, {"loss": step}) for step in range(1, 13)]


def test_a_full_tracker_costs_no_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([], is_full=True)
    with start(tmp_path, save_freq=2) as (handler, make_step):
        for _ in range(5):
            make_step()
            server.log({"loss": 1})
        assert [each.step for each in handler.checkpoints()] == [2, 4]
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "keeps the newest 1000 rows for later: OSError(28" in warning.getMessage()
    server.unregister()


class Network(Server):
    """A tracker whose server refuses or holds calls."""

    _has_server = True

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.calls = 0

    def _write(self, row: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.answers.wait()
        super()._write(row, step)


def test_a_failed_call_does_not_end_training_and_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: Rows = []
    server = Network(rows)
    with start(tmp_path, save_freq=2) as (_, make_step):
        for step in range(1, 8):
            server.error = ConnectionError("gone") if step < 5 else None
            server._retries_at = 0.0
            make_step()
            server.log({"loss": step})
    assert rows == [(step, {"loss": step}) for step in range(1, 7)]
    assert len(server.value["rows"]) == 1
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "ConnectionError('gone')" in warning.getMessage()
    server.unregister()


def test_rows_that_were_not_sent_are_sent_by_the_next_start(tmp_path: Path) -> None:
    rows: Rows = []
    for upto in (5, 6):
        server = Network(rows)
        server.error = ConnectionError("gone") if upto == 5 else None
        train(tmp_path, server, upto)
        server.store()
        server.unregister()
    assert rows == [(step, {"loss": step}) for step in range(1, 7)]


def test_rows_that_finish_cannot_send_are_sent_by_a_start_without_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: Rows = []
    for is_gone in (True, False):
        server = Network(rows)
        server.error = ConnectionError("gone") if is_gone else None
        with start(tmp_path) as (handler, make_step):
            while handler.total_run_calls < 2:
                make_step()
                server.log({"loss": 1})
            handler.close()
            server.finish()
        assert ("start the program again, to send 3 rows" in caplog.text) is is_gone
        caplog.clear()
        server.unregister()
    assert [step for step, _ in rows] == [1, 2, 2]


def test_a_server_that_does_not_answer_is_awaited_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_SECONDS", 0.2)
    rows: Rows = []
    server = Network(rows)
    server.answers.clear()
    began = time.monotonic()
    with start(tmp_path, save_freq=10) as (handler, make_step):
        for step in range(1, 41):
            make_step()
            server.log({"loss": step})
        assert time.monotonic() - began < 5  # 40 waits would be 8 s
        assert handler.checkpoints()
        assert server.calls == 1
        server.answers.set()
        handler.close()
        server.finish()
    *losses, (last, goodput) = rows
    assert losses == [(step, {"loss": step}) for step in range(1, 41)]
    assert (last, goodput.keys()) == (40, {"tfpreempt/goodput"})
    server.unregister()


def test_a_refused_row_holds_up_no_other_row(tmp_path: Path) -> None:
    rows: Rows = []
    server = Server(rows, refused="bad")
    with start(tmp_path) as (handler, make_step):
        for step in range(1, 4):
            make_step()
            server.log({"bad": 1} if step == 1 else {"loss": step})
        handler.close()
        server.finish()
    assert rows[:2] == [(2, {"loss": 2}), (3, {"loss": 3})]
    server.unregister()


def test_a_tracker_keeps_1000_rows(tmp_path: Path) -> None:
    server = Network([])
    server.error = ConnectionError("gone")
    with start(tmp_path) as (_, make_step):
        for step in range(1002):
            make_step()
            server.log({"loss": step})
    assert [row[0] for row in server.value["rows"]] == list(range(3, 1003))
    server.unregister()


def test_another_directory_begins_another_run(tmp_path: Path) -> None:
    """Also if a commit of the second run precedes its first metrics."""
    tracker = trackers.tensorboard(tmp_path / "logs")
    config = tfpreempt.TerminationConfig(exit_fn=lambda: None, signals=())
    with start(tmp_path / "first", save_freq=4) as (handler, make_step):
        for _ in range(6):
            make_step()
            tracker.log({"loss": 1})
        handler.close()
        first = tracker.run_id
        second = tfpreempt.PreemptionCheckpointHandler(
            None, None, tmp_path / "second", config, save_freq=2, async_save=False
        )
        for step in range(1, 4):
            second.run(lambda: None)
            if step == 3:
                tracker.log({"loss": 1})
        second.close()
    tracker._flush()
    assert first != tracker.run_id
    found = [steps_in_files(Path(str(each))) for each in (first, tracker.run_id)]
    assert found == [{"loss": [1, 2, 3, 4, 5, 6]}, {"loss": [3]}]
    tracker.unregister()


def test_two_open_handlers_share_no_run(tmp_path: Path) -> None:
    """The tracker follows the oldest; a commit of the other contains its value too."""
    config = tfpreempt.TerminationConfig(exit_fn=lambda: None, signals=())
    tracker = trackers.tensorboard(tmp_path / "logs")
    with start(tmp_path / "first", save_freq=2) as (_, make_step):
        second = tfpreempt.PreemptionCheckpointHandler(
            None, None, tmp_path / "second", config, save_freq=2, async_save=False
        )
        for _ in range(5):
            make_step()
            second.run(lambda: None)
            tracker.log({"loss": 1})
        shared = tracker.run_id
        del second
    tracker.unregister()
    for name, is_same in (("second", False), ("first", True)):
        tracker = trackers.tensorboard(tmp_path / "logs")
        with start(tmp_path / name) as (handler, make_step):
            assert handler.total_run_calls == 4
            make_step()
            tracker.log({"loss": 1})
        assert (tracker.run_id == shared) == is_same
        tracker.unregister()


def test_finish_after_a_kill_behind_the_last_commit(tmp_path: Path) -> None:
    """The next start has no further step, so only `finish` opens the run."""
    for is_killed in (True, False):
        tracker = trackers.tensorboard(tmp_path / "logs")
        with start(tmp_path / "ckpt") as (handler, make_step):
            while handler.total_run_calls < 3:
                make_step()
                tracker.log({"loss": 1})
            handler.close()
            if not is_killed:
                assert tracker.run_id is None
                tracker.finish()
        tracker.unregister()
    [folder] = (tmp_path / "logs").iterdir()
    assert steps_in_files(folder) == {"loss": [1, 2, 3], "tfpreempt/goodput": [3]}


def test_a_tracker_that_is_added_to_a_run_causes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(tmp_path, save_freq=2) as (_, make_step):
        for _ in range(3):
            make_step()
    server = Server([])
    with start(tmp_path) as (handler, make_step):
        assert handler.total_run_calls == 2
        make_step()
        server.log({"loss": 1})
    assert "has no State" not in caplog.text
    server.unregister()


def test_only_a_folder_is_a_log_directory() -> None:
    with pytest.raises(errors.ConfigurationError, match="local or mounted folder"):
        trackers.tensorboard("gs://bucket/logs")


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
        server.finish()
    assert rows[0] == (1, {"epoch": 0, "loss": 1})
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        server.unknown  # noqa: B018
    server.unregister()


def test_only_the_chief_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1", "b:1"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    server = Server([])
    with new_process():
        server.log({"loss": 1})
        server.finish()
    assert server.run_id is None
    server.unregister()


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([])
    expected = "expected a PreemptionCheckpointHandler"
    with (
        new_process(),
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


def test_a_replay_logs_nothing(tmp_path: Path) -> None:
    """And commits its last step in the copy, not in the directory of the run."""
    rows, run, copy = Rows(), tmp_path / "run", tmp_path / "copy"
    train(run, Server(rows), 6)
    assert len(rows) == 4
    shutil.copytree(run, copy)
    with replaying(run, copy), pytest.raises(SystemExit):
        train(run, Server(rows), 6)
    assert len(rows) == 4
    assert [(run / name).exists() for name in ("4", "5")] == [True, False]
    assert (copy / "5" / "COMMITTED").exists()
