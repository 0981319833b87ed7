"""The reader of journals: processes and starts, made of records of scripted runs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.cli.report.scripted import Scripted
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.status.read_status import read_status
from tfpreempt.cli.status.run_status import ReportedState
from tfpreempt.core.events import Commit, Exit, Outcome
from tfpreempt.core.journal import MAX_LINE_BYTES, Journal
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    _pack,
    status_path,
)

WALL = 1_800_000_000.0
COMMIT = Commit(
    step=5,
    path="/run/5",
    sequence=1,
    world_size=1,
    save_seconds=1.0,
    bytes=10,
    because="periodic",
)
EXIT = Exit(outcome=Outcome.COMMITTED, code=143, step=5)


def long_run(*, is_supervised: bool) -> Scripted:
    """Preempted and killed, again and again."""
    run = Scripted(is_supervised=is_supervised)
    for _ in range(20):
        run.start()
        for _ in range(20):
            run.train(5)
            run.save(0.5)
        run.preempt()
        run.start()
        run.train(3)
        run.kill()
    run.start()
    return run


def opened(directory: Path, *, keeps_all: bool) -> JournalTailer:
    journals = JournalTailer(directory, keeps_all=keeps_all)
    journals.read_on(WALL)
    return journals


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_reader_of_the_current_state_keeps_few_records(
    tmp_path: Path, is_supervised: bool
) -> None:
    run = long_run(is_supervised=is_supervised)
    run.write(tmp_path)
    whole, newest = (opened(tmp_path, keeps_all=each) for each in (True, False))
    at = WALL + run.now
    assert read_status(newest, at) == read_status(whole, at)
    assert newest.supervisors == [] or len(newest.supervisors[0].starts) < 5
    trainings = newest.workers[0].trainings
    assert len(trainings) < 5
    assert max(len(each.records) for each in trainings) < 10
    assert len(whole.workers[0].trainings) == 41


@pytest.mark.parametrize("keeps_all", [True, False])
def test_one_start_of_workers_has_few_ends_and_records(
    tmp_path: Path, keeps_all: bool
) -> None:
    """`tfpreempt status` showed a row for each of millions of workers that never ran,
    and the supervisor kept every record."""
    who = {"wall": WALL, "monotonic": 1.0, "supervisor": "s", "incarnation": "a"}
    records = [{"event": "started", "workers": 2, "first_worker": 4}]
    for number in range(100):
        records += [
            {"event": "worker_ended", "worker": number, "returncode": 1},
            {"event": "budget", "cause": "failure", "is_used_up": False},
        ]
    lines = "".join(f"{json.dumps({**who, **each})}\n" for each in records)
    (tmp_path / "supervisor.jsonl").write_text(lines)
    [journal] = opened(tmp_path, keeps_all=keeps_all).supervisors
    [start] = journal.starts
    assert [*start.ends] == [4, 5]
    assert [each.event for each in start.records[:2]] == ["started", "worker_ended"]
    assert len(start.records) == (103 if keeps_all else 3)
    assert start.cause == "failure"
    assert journal.corrupt == 98


def test_a_late_record_belongs_to_the_process_that_made_it(tmp_path: Path) -> None:
    """A frozen process wakes after another process has taken over."""
    run = Scripted(workers=1, is_supervised=False)
    run.start()
    run.preempt()
    late = run.lines["worker-0.jsonl"].pop()
    run.start()
    run.lines["worker-0.jsonl"].append(late)
    run.write(tmp_path)
    journals = opened(tmp_path, keeps_all=False)
    [worker] = read_status(journals, WALL + run.now).workers
    assert worker.state is ReportedState.STARTING
    first, second = journals.workers[0].trainings
    assert first.exit is not None
    assert second.exit is None


def test_the_files_of_a_journal_are_read_as_one_while_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpreempt.core.journal.SEGMENT_BYTES", 1000)
    journals, journal = opened(tmp_path, keeps_all=True), Journal(tmp_path, 0)
    for step in range(20):
        journal.record(dataclasses.replace(COMMIT, step=step))
        journals.read_on(WALL)
        assert [each["step"] for each in journals.records("commit")] == [
            *range(step + 1)
        ]
    assert len(list(tmp_path.iterdir())) > 5
    # A shortened file: all files are read again.
    os.truncate(tmp_path / "worker-0.jsonl", 0)
    journals.read_on(WALL)
    steps = [each["step"] for each in journals.records("commit")]
    assert steps == [*range(20 - len(steps), 20)]
    assert 10 < len(steps) < 20
    assert journals.warnings == []


def test_a_worker_without_a_journal_has_a_status(tmp_path: Path) -> None:
    """The disk was full when the journal was created."""
    doing = WorkerActivity.TRAINING
    now = WorkerStatus(
        at=WALL, worker=0, num_workers=1, host="h", pid=1, doing=doing, step=3
    )
    status_path(tmp_path, 0).write_bytes(_pack(now))
    assert opened(tmp_path, keeps_all=True).reports.keys() == {0}


def test_a_pipe_in_place_of_a_journal_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-0.jsonl")
    journals = opened(tmp_path, keeps_all=True)
    assert journals.workers[0].trainings == []
    [warning] = journals.warnings
    assert "Not a regular file" in warning


def test_a_line_without_an_end_and_a_hole_cost_no_memory_and_no_time(
    tmp_path: Path,
) -> None:
    """The attacker has appended to the journal of a worker."""
    journal = Journal(tmp_path, 0)
    journal.record(EXIT)
    journal.close()
    with (tmp_path / "worker-0.jsonl").open("ab") as file:
        file.write(b"x" * (3 * MAX_LINE_BYTES))
        file.truncate(8 << 40)
    Journal(tmp_path, 0).record(EXIT)
    journals = opened(tmp_path, keeps_all=True)
    assert [each.event for each in journals.records("exit")] == ["exit", "exit"]
    [warning] = journals.warnings
    assert warning.startswith("worker-0.jsonl: 1 line(s) are corrupt")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = Scripted()
    run.start()
    run.write(tmp_path / "run")
    elsewhere = (tmp_path / "run" / "worker-1.jsonl").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "worker-1.jsonl").symlink_to(elsewhere)
    journals = opened(tmp_path / "run", keeps_all=True)
    assert sorted(journals.workers) == [0, 1]
    assert journals.workers[1].trainings == []
    [warning] = journals.warnings
    assert warning.startswith("worker-1.jsonl: cannot be read (")
