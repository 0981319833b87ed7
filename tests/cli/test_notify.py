"""`tfpreempt notify` with real processes: the right one is signalled, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import Run, is_alive, wait_until
from tfpreempt.cli import main
from tfpreempt.cli.notify.workers import _holders
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.journal import JsonLines, journal_directory

# A worker as this command sees it: it holds its journal open, and ends by SIGTERM.
_WORKER = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if len(sys.argv) > 1:
    journal = open(sys.argv[1], "a")
if len(sys.argv) > 2 and os.fork() == 0:  # a data loader
    signal.pause()
signal.signal(signal.SIGUSR2, lambda *_: None)
print("ready", flush=True)
while True:
    signal.pause()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts small programs that are killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WORKER, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def notify(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["notify", *map(str, arguments)])


def record_start(directory: Path, pids: list[int | None], **values: Any) -> None:
    """Writes what a supervisor writes when it has started workers."""
    lines = JsonLines(journal_directory(directory) / "supervisor.jsonl", SystemClock())
    record = {"event": "started", "incarnation": "life-0", "restart": 0, "pids": pids}
    lines.append({**record, **values})
    lines.close()


def supervised(**variables: str) -> dict[str, str]:
    return {
        "TFPREEMPT_SUPERVISED": "1",
        "TFPREEMPT_NUM_RESTARTS": "0",
        "TFPREEMPT_INCARNATION": "life-0",
        **variables,
    }


# --- signals -------------------------------------------------------------------------


def test_a_worker_of_a_real_supervisor(supervised: Run) -> None:
    supervised.start("until_told() if restart == 0 else None", "--workers", "2")
    pids = [supervised.wait_told(f"ready-{i}-0") for i in (0, 1)]
    result = notify("--worker", "1", supervised.directory / "ckpt")
    assert result.exit_code == 0, result.output
    assert f"sent SIGTERM to worker 1, process {pids[1]} " in result.output

    def ends() -> list[tuple[int, int]]:
        records = supervised.records()
        return [
            (each["worker"], each["code"])
            for each in records
            if each["event"] == "worker_ended"
        ]

    wait_until(lambda: len(ends()) == 1, "the end of worker 1")
    assert ends() == [(1, 143)]  # the other one has not heard of it
    os.kill(int(pids[0]), signal.SIGTERM)
    assert supervised.finish()[0] == 0
    assert ends()[1] == (0, 143)


def test_a_worker_without_a_supervisor(start: Start, tmp_path: Path) -> None:
    journal = journal_directory(tmp_path)
    journal.mkdir()
    processes = [start(str(journal / f"worker-{i}.jsonl")) for i in (0, 1)]
    result = notify(tmp_path, "--worker", "1")
    assert result.exit_code == 0, result.output
    assert f"process {processes[1].pid} (writes" in result.output
    assert processes[1].wait(10) == 143
    assert processes[0].poll() is None


def test_forks_of_a_worker_are_not_the_worker(start: Start, tmp_path: Path) -> None:
    journal = tmp_path / "worker-0.jsonl"
    process = start(str(journal), "with a fork")
    (child,) = children(process.pid)
    try:
        assert _holders(journal) == {process.pid}
    finally:
        os.kill(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in tasks.split()]


def test_worker_0_is_the_default_and_many_may_be_named(
    start: Start, tmp_path: Path
) -> None:
    journal = journal_directory(tmp_path)
    journal.mkdir()
    processes = [start(str(journal / f"worker-{i}.jsonl")) for i in range(3)]
    assert notify(tmp_path).exit_code == 0
    assert processes[0].wait(10) == 143
    assert notify(tmp_path, "--worker", "1", "--worker", "2").exit_code == 0
    assert [each.wait(10) for each in processes] == [143] * 3


def test_another_signal(start: Start, tmp_path: Path) -> None:
    process = start(**supervised())
    record_start(tmp_path, [process.pid])
    assert notify(tmp_path, "--signal", "usr1").exit_code == 0
    assert process.wait(10) == -signal.SIGUSR1


@pytest.mark.parametrize("name", ["SIGKILL", "NOPE"])
def test_signals_that_are_no_notice_are_refused(name: str, tmp_path: Path) -> None:
    result = notify(tmp_path, "--signal", name)
    assert result.exit_code == 1
    assert f"signal '{name}': expected one of TERM" in result.output


# --- never a stranger ----------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TFPREEMPT_INCARNATION": "life-1"},
        {"TFPREEMPT_NUM_RESTARTS": "1"},
        {"TFPREEMPT_SUPERVISED": ""},
    ],
)
def test_a_stranger_with_the_recorded_id_is_left_alone(
    variables: dict[str, str], start: Start, tmp_path: Path
) -> None:
    stranger = start(**(supervised(**variables) if variables else {}))
    record_start(tmp_path, [stranger.pid])
    result = notify(tmp_path)
    assert result.exit_code == 1
    assert f"process {stranger.pid} (started by the supervisor" in result.output
    assert "worker 0 of" in result.output
    assert stranger.poll() is None
    assert is_alive(stranger.pid)


def test_a_stranger_after_a_start_long_ago_is_left_alone(
    start: Start, tmp_path: Path
) -> None:
    """With a TF_CONFIG from outside the workers have no incarnation to compare."""
    told = {"TFPREEMPT_SUPERVISED": "1", "TFPREEMPT_NUM_RESTARTS": "0"}
    process = start(**told)
    record_start(tmp_path, [process.pid], wall=time.time() - 3600)
    assert notify(tmp_path).exit_code == 1
    assert is_alive(process.pid)
    record_start(tmp_path, [process.pid])
    assert notify(tmp_path).exit_code == 0
    assert process.wait(10) == 143


def test_a_child_of_the_worker_is_not_the_worker(tmp_path: Path) -> None:
    program = "print('ready', flush=True); import time; time.sleep(60)"
    child = subprocess.Popen(  # in our group, with a worker's variables
        [sys.executable, "-I", "-S", "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, **supervised()},
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        record_start(tmp_path, [child.pid])
        assert notify(tmp_path).exit_code == 1
        assert is_alive(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_the_index_is_that_of_tf_config(start: Start, tmp_path: Path) -> None:
    """One supervisor for each machine: its one worker is not worker 0 of the job."""
    config = {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]},
        "task": {"type": "worker", "index": 1},
    }
    process = start(**supervised(TF_CONFIG=json.dumps(config)))
    record_start(tmp_path, [process.pid])
    assert notify(tmp_path, "--worker", "0").exit_code == 1
    assert notify(tmp_path, "--worker", "2").exit_code == 0
    assert process.wait(10) == 143


def test_an_evaluator_is_no_worker(start: Start, tmp_path: Path) -> None:
    config = {
        "cluster": {"worker": ["a:1"], "evaluator": ["b:1"]},
        "task": {"type": "evaluator", "index": 0},
    }
    process = start(**supervised(TF_CONFIG=json.dumps(config)))
    record_start(tmp_path, [process.pid])
    assert notify(tmp_path, "--worker", "0").exit_code == 1
    assert is_alive(process.pid)


# --- nothing runs there --------------------------------------------------------------


def test_a_directory_without_a_journal(tmp_path: Path) -> None:
    result = notify(tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} has no journal" in result.output


@pytest.mark.parametrize("name", ["journal", "12"])
def test_a_directory_within_the_job_s(name: str, tmp_path: Path) -> None:
    record_start(tmp_path, [])
    (tmp_path / name).mkdir(exist_ok=True)
    result = notify(tmp_path / name)
    assert f"{tmp_path} has one: name that" in result.output


def test_all_are_looked_for_before_one_is_signalled(
    start: Start, tmp_path: Path
) -> None:
    processes = [start(**supervised()) for _ in range(2)]
    record_start(tmp_path, [each.pid for each in processes])
    result = notify(tmp_path, "--worker", "0", "--worker", "5")
    assert result.exit_code == 1
    assert "worker 5 of" in result.output
    assert "Here runs, by its index: 0, 1." in result.output
    assert [each.poll() for each in processes] == [None, None]
    assert "sent" not in result.output


def test_workers_that_have_ended(start: Start, tmp_path: Path) -> None:
    process = start(**supervised())
    record_start(tmp_path, [process.pid, None])
    process.kill()
    process.wait()
    result = notify(tmp_path)
    assert result.exit_code == 1
    assert "does not run on this machine" in result.output
    assert "No worker of that job does: it has ended" in result.output
    assert f"process {process.pid}" in result.output


def test_a_recorded_end_is_believed(start: Start, tmp_path: Path) -> None:
    process = start(**supervised())
    record_start(tmp_path, [process.pid])
    record_start(tmp_path, [], event="worker_ended", worker=0)
    assert notify(tmp_path).exit_code == 1
    assert is_alive(process.pid)


def test_a_supervisor_that_has_left_has_no_workers(
    start: Start, tmp_path: Path
) -> None:
    process = start(**supervised())
    record_start(tmp_path, [process.pid])
    record_start(tmp_path, [], event="left")
    assert notify(tmp_path).exit_code == 1
    assert is_alive(process.pid)


def test_a_worker_that_never_was(start: Start, tmp_path: Path) -> None:
    process = start(**supervised())
    record_start(tmp_path, [process.pid])
    assert notify(tmp_path, "--worker", "7").exit_code == 1
    assert is_alive(process.pid)


# --- options -------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["ckpt", "--file", "stop"]])
def test_one_way_has_to_be_named(arguments: list[str]) -> None:
    result = notify(*arguments)
    assert result.exit_code == 2
    assert "Give one of" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic", "preempted", "ckpt"], "--topic means nothing with DIRECTORY"),
        (["--hold", "0", "ckpt"], "it belongs to --file and --metadata"),
        (["--worker", "0", "--file", "x"], "--worker means nothing with --file"),
        (["--signal", "TERM", "--serve", "gce"], "--signal means nothing"),
        (["--follow", "5", "--metadata", "http://x"], "--follow means nothing"),
        (["--port", "80", "--metadata", "http://x"], "--port means nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    arguments: list[str], message: str
) -> None:
    result = notify(*arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output


# --- what follows --------------------------------------------------------------------


def test_follow_ends_in_time(start: Start, tmp_path: Path) -> None:
    journal = journal_directory(tmp_path)
    journal.mkdir()
    start(str(journal / "worker-0.jsonl"))
    result = notify(tmp_path, "--signal", "USR2", "--follow", "0.05")
    assert result.exit_code == 1
    assert "Nobody has left within 0.05 s." in result.output
    assert "--follow more than that" in result.output


@pytest.mark.parametrize(("number", "watch"), [("TERM", ""), ("USR1", "SIGUSR1")])
def test_follow_ends_with_a_worker_whose_journal_says_nothing(
    number: str, watch: str, start: Start, tmp_path: Path
) -> None:
    """It commits elsewhere, or was killed: nothing can come any more."""
    process = start(**supervised())
    record_start(tmp_path, [process.pid])
    result = notify(tmp_path, "--signal", number, "--follow", "60")
    assert result.exit_code == 1
    assert f"worker 0 (process {process.pid}) has ended, and nothing" in result.output
    assert "keeps its checkpoints in another directory" in result.output
    assert (f"does not watch {watch}" in result.output) is bool(watch)
    assert "has the notice" not in result.output
