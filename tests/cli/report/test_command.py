"""`tfpreempt report`: input, output, and written files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tensorboardX import SummaryWriter

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.cli.report.scripted import Scripted, a_run
from tests.cli.report.test_plots import many_restarts
from tests.fakes.storage import FaultyObjectStore
from tfpreempt.cli import main
from tfpreempt.core.journal import journal_directory
from tfpreempt.errors import CheckpointError

pytestmark = pytest.mark.slow  # imports matplotlib


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint directory with a journal."""
    a_run().write(tmp_path / "run" / "journal")
    return tmp_path / "run"


def call(*arguments: str | Path, width: int = 80) -> Result:
    told: Sequence[str] = [str(each) for each in arguments]
    return CliRunner().invoke(main, ["report", *told], env={"COLUMNS": str(width)})


def test_the_tables_for_people(run: Path) -> None:
    done = call(run)
    assert done.exit_code == 0
    assert "finished at step 286" in done.stdout
    assert "50 step(s) lost" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [
        "down",
        "105.0",
        "14.0%",
        "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ] in lines
    assert any(line[:1] == ["2"] and "failure" in line for line in lines)
    assert (
        "9 commit(s), 8.79 KiB; restores: 3 from mirror, 3 from memory" in done.stdout
    )
    assert "warning: supervisor.jsonl, worker-0.jsonl" in done.stderr


def test_commits_without_a_journal_of_a_worker_are_counted(run: Path) -> None:
    for path in (run / "journal").glob("worker-*"):
        path.unlink()
    opened = open_directory(str(run), OwnContents())
    for step in (80, 100):
        save(opened, step)
    done = call(run)
    assert "commit(s), " not in done.stdout
    assert f"2 commit(s) in {run}, newest step 100" in done.stderr


def test_the_journals_own_directory_can_be_named(run: Path) -> None:
    assert call(run / "journal").stdout == call(run).stdout


def test_json_has_all_of_it(run: Path) -> None:
    done = call(run, "--json")
    told = json.loads(done.stdout)
    assert told["outcome"] == "finished"
    assert told["goodput"] == pytest.approx(425 / 749, abs=0.01)
    assert [each["cause"] for each in told["interruptions"]] == [
        "preemption",
        "failure",
    ]
    assert told["interruptions"][0]["sources"] == {"signal:SIGTERM": [1]}
    assert [each["index"] for each in told["workers"]] == [0, 1, 2]
    assert told["durations"]["notice to commit"]["count"] == 1
    assert len(told["metrics"]["loss"]) == 8
    assert len(told["warnings"]) == 1


def test_the_page_is_one_file(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = call(run, "--html", page)
    assert done.exit_code == 0, done.stderr
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(tmp_path.iterdir()) == [page, run]


def test_without_what_reads_tensorboards_files_it_is_one_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        writer.add_scalar("loss", 0.5, 1)
    monkeypatch.setitem(sys.modules, "tensorboardX.proto.event_pb2", None)
    done = call(run, "--tensorboard", tmp_path / "logs")
    assert done.exit_code == 2
    assert "--tensorboard needs tensorboardX" in done.stderr


def test_curves_of_tensorboard_are_read(run: Path, tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "logs" / "train")) as writer:
        for step in range(5):
            writer.add_scalar("epoch_loss", 1 / (step + 1), step, 1_800_000_000 + step)
    told = json.loads(call(run, "--json", "--tensorboard", tmp_path / "logs").stdout)
    points = told["metrics"]["train/epoch_loss"]
    assert points[1] == [1_800_000_001, 1, 0.5]
    assert "loss" in told["metrics"]


def test_an_event_file_that_was_cut_off_is_read_as_far_as_it_goes(
    run: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    with SummaryWriter(str(logs)) as writer:
        for step in range(5):
            writer.add_scalar("loss_of_batch", float(step), step)
    [path] = logs.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    told = json.loads(call(run, "--json", "--tensorboard", logs).stdout)
    assert len(told["metrics"]["loss_of_batch"]) == 4
    assert "not read to the end (the file ends within a record)" in told["warnings"][-1]


@pytest.mark.timeout(60)
def test_hostile_event_files_are_named_in_warnings(run: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with SummaryWriter(str(logs)) as writer:
        writer.add_scalar("a", 1.0, 1, math.nan)
    sparse = logs / "sparse.tfevents"
    sparse.touch()
    os.truncate(sparse, 8 << 40)
    options = ("--html", tmp_path / "page.html", "--tensorboard", logs)
    done = call(run, *options, "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)["warnings"]
    assert "a record with the time nan" in told[-2]
    assert "a record of 0 bytes" in told[-1]


def test_a_directory_without_event_files_is_refused(run: Path, tmp_path: Path) -> None:
    done = call(run, "--tensorboard", run)
    assert done.exit_code == 2
    assert "no event files found" in done.stderr


def test_the_journal_of_a_bucket_is_where_it_was_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(run / "journal"))
    store = FaultyObjectStore()
    monkeypatch.setattr("tfpreempt.cli.journals.locate.open_store", lambda url: store)
    assert call("gs://bucket/run").stdout == call(run).stdout
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(run / "nothing"))
    done = call("other://bucket/run")
    assert done.exit_code == 2
    assert "is on the machines that trained" in done.stderr
    assert "Set TFPREEMPT_JOURNAL_DIR" not in done.stderr


def test_the_copy_in_a_bucket_continues_the_journal_of_this_machine(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine continued the run."""
    whole = {path.name: path.read_bytes() for path in (run / "journal").glob("*.jsonl")}
    store = FaultyObjectStore()
    for path in (run / "journal").glob("*.jsonl"):
        lines = whole[path.name].splitlines(keepends=True)
        half = max(1, len(lines) // 2)
        if lines[half:]:
            name = f"journals/{path.stem}-00000000.jsonl"
            store.replace(name, b"".join(lines[half:]))
        path.write_bytes(b"".join(lines[:half]))
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(run / "journal"))
    monkeypatch.setattr("tfpreempt.cli.journals.locate.open_store", lambda url: store)
    done = call("gs://bucket/run")
    assert "this is the copy of the journal in gs://bucket/run" in done.stderr
    for name, data in whole.items():
        (run / "journal" / name).write_bytes(data)
    assert done.stdout == call(run).stdout


def test_the_journal_of_another_run_is_not_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    monkeypatch.delenv("TFPREEMPT_JOURNAL_DIR", raising=False)
    monkeypatch.setenv("TFPREEMPT_SCRATCH_DIR", str(run))
    a_run().write(journal_directory("other://bucket/run-a"))
    assert call("other://bucket/run-a/").exit_code == 0
    assert call("other://bucket/run-b").exit_code == 2


def test_a_bucket_that_cannot_be_asked_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: str) -> None:
        raise CheckpointError("no permission")

    monkeypatch.setenv("TFPREEMPT_SCRATCH_DIR", str(tmp_path))
    monkeypatch.setattr("tfpreempt.cli.journals.locate.open_store", refuse)
    done = call("gs://bucket/run")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "/gs-bucket-run-" in said
    assert "no copy of a journal can be downloaded: no permission" in said


def test_a_file_uri_is_its_path(run: Path) -> None:
    assert call(run.as_uri()).stdout == call(run).stdout
    done = call(f"file://elsewhere{run}")
    assert done.exit_code == 2
    assert "with three slashes" in done.stderr


def test_where_no_journal_is_it_says_where_it_looked(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert done.exit_code == 2
    assert f"no *.jsonl in {tmp_path}/journal." in done.stderr.replace("\n", "")


def test_a_journal_of_nobody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "worker-0.jsonl").write_text('{"wall": 1.0, "event": "other"}\n')
    done = call(tmp_path)
    assert done.exit_code == 2
    assert "has no records of a worker" in done.stderr


def test_a_page_that_cannot_be_written_is_refused(run: Path) -> None:
    done = call(run, "--html", run / "missing" / "report.html", width=300)
    assert done.exit_code == 2
    assert f"the directory '{run}/missing' does not exist. Create" in done.stderr


def test_of_many_interruptions_the_newest_are_shown(tmp_path: Path) -> None:
    many_restarts(25).write(tmp_path)
    lines = [line.split() for line in call(tmp_path, width=160).stdout.splitlines()]
    numbers = [int(line[0]) for line in lines if line and line[0].isdigit()]
    assert [each for each in numbers if 5 < each <= 25][:20] == list(range(6, 26))


def test_where_nothing_was_measured_there_is_no_table_of_it(tmp_path: Path) -> None:
    run = Scripted()
    run.start(restoring=0.0, tier=None)
    run.lines.pop("worker-0.jsonl")
    run.lines.pop("worker-1.jsonl")
    run.kill()
    run.write(tmp_path)
    assert "durations" not in call(tmp_path).stdout


def test_what_a_journal_says_moves_no_cursor(run: Path) -> None:
    path = run / "journal" / "worker-0.jsonl"
    path.write_text(path.read_text().replace("signal:SIGTERM", "\\u001b[2J"))
    text = (run / "journal" / "worker-1.jsonl").read_text()
    (run / "journal" / "worker-1.jsonl").write_text(
        text.replace("signal:SIGTERM", "\\u001b[2J")
    )
    done = call(run, width=160)
    assert "\x1b[2J" not in done.output
    assert "\\x1b[2J (1)" in done.output


def test_a_name_of_bytes_that_are_no_text_is_shown_as_them(
    run: Path, tmp_path: Path
) -> None:
    odd = run.rename(tmp_path / "run-\udcff")
    page = tmp_path / "report.html"
    assert call(odd, "--html", page).exit_code == 0
    assert "run-\\udcff" in page.read_text("utf-8")
