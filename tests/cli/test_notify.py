"""`tfpreempt notify` with real processes: the right one is signalled, or none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import is_alive
from tfpreempt.cli import main
from tfpreempt.cli.notify.workers import NothingRunsError, hold_worker
from tfpreempt.core.journal import journal_directory

# A worker as this command sees it: it holds its journal open, and ends by SIGTERM.
_WORKER = """
import os, signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGUSR2, lambda *_: None)
spare = [os.open("/", os.O_RDONLY) for _ in range(200)]
journal = open(sys.argv[1], "a")
for each in spare:
    os.close(each)  # numbers below the journal's for what is opened and closed
if "fork" in sys.argv and os.fork() == 0:  # a data loader
    signal.pause()
def read():
    while True:
        files = [os.open("/", os.O_RDONLY) for _ in spare]
        for each in files:
            os.close(each)
if "busy" in sys.argv:
    threading.Thread(target=read, daemon=True).start()
print("ready", flush=True)
while True:
    signal.pause()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers of a job in `tmp_path`, which are killed at the end."""
    started: list[subprocess.Popen[str]] = []
    journal = journal_directory(tmp_path)
    journal.mkdir()

    def begin(index: int, *how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _WORKER),
                *(str(journal / f"worker-{index}.jsonl"), *how),
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has forked too
        process.communicate()


def notify(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["notify", *map(str, arguments)])


# --- the right process ---------------------------------------------------------------


def test_the_worker_that_is_named_is_signalled(start: Start, tmp_path: Path) -> None:
    processes = [start(index) for index in range(3)]
    result = notify(tmp_path, "--worker", "1")
    assert result.exit_code == 0, result.output
    assert f"sent SIGTERM to worker 1, process {processes[1].pid}" in result.output
    assert processes[1].wait(10) == 143
    assert [each.poll() for each in processes] == [None, 143, None]
    assert notify(tmp_path).exit_code == 0
    assert processes[0].wait(10) == 143


def test_many_may_be_named(start: Start, tmp_path: Path) -> None:
    processes = [start(index) for index in range(2)]
    assert notify(tmp_path, "--worker", "1", "--worker", "0").exit_code == 0
    assert [each.wait(10) for each in processes] == [143] * 2


def test_forks_of_a_worker_are_not_the_worker(start: Start, tmp_path: Path) -> None:
    process = start(0, "fork")
    with hold_worker(tmp_path, 0) as worker:
        assert worker.pid == process.pid


def test_a_worker_that_opens_and_closes_files_is_found(
    start: Start, tmp_path: Path
) -> None:
    process = start(0, "busy")
    for _ in range(20):
        with hold_worker(tmp_path, 0) as worker:
            assert worker.pid == process.pid


def test_another_signal(start: Start, tmp_path: Path) -> None:
    process = start(0)
    assert notify(tmp_path, "--signal", "usr1").exit_code == 0
    assert process.wait(10) == -signal.SIGUSR1


@pytest.mark.parametrize("name", ["SIGKILL", "NOPE"])
def test_signals_that_are_no_notice_are_refused(name: str, tmp_path: Path) -> None:
    result = notify(tmp_path, "--signal", name)
    assert result.exit_code == 1
    assert f"signal '{name}': expected one of TERM" in result.output


def test_a_worker_that_ends_before_its_signal_is_told(
    start: Start, tmp_path: Path
) -> None:
    """Its process id may be a stranger's by then; the pidfd is nobody's."""
    process = start(0)
    with hold_worker(tmp_path, 0) as worker:
        process.kill()
        process.wait()
        with pytest.raises(NothingRunsError, match="has ended just before"):
            worker.send(signal.SIGTERM)


# --- nothing runs there --------------------------------------------------------------


def test_a_directory_without_a_journal(tmp_path: Path) -> None:
    result = notify(tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} has no journal" in result.output


@pytest.mark.parametrize("name", ["journal", "12"])
def test_a_directory_within_the_job_s(name: str, tmp_path: Path) -> None:
    journal_directory(tmp_path).mkdir()
    (tmp_path / name).mkdir(exist_ok=True)
    result = notify(tmp_path / name)
    assert f"{tmp_path} has one: name that" in result.output


def test_all_are_looked_for_before_one_is_signalled(
    start: Start, tmp_path: Path
) -> None:
    processes = [start(index) for index in range(2)]
    result = notify(tmp_path, "--worker", "0", "--worker", "5")
    assert result.exit_code == 1
    assert "worker 5 of" in result.output
    assert "Here runs, by its index: 0, 1." in result.output
    assert [each.poll() for each in processes] == [None, None]
    assert "sent" not in result.output


def test_workers_that_have_ended(start: Start, tmp_path: Path) -> None:
    process = start(0)
    process.kill()
    process.wait()
    result = notify(tmp_path)
    assert result.exit_code == 1
    assert "does not run on this machine" in result.output
    assert "No worker of that job does: it has ended" in result.output


def test_the_worker_of_another_job_is_left_alone(start: Start, tmp_path: Path) -> None:
    process = start(0)
    journal_directory(tmp_path / "other").mkdir(parents=True)
    assert notify(tmp_path / "other").exit_code == 1
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


@pytest.mark.parametrize("option", ["--hold", "--follow"])
@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_seconds_that_are_no_number_are_refused(option: str, seconds: str) -> None:
    result = notify("--file", "stop", option, seconds)
    assert result.exit_code == 2
    assert f"{seconds} is not a finite number of seconds" in result.output


# --- what follows --------------------------------------------------------------------


def test_follow_ends_in_time(start: Start, tmp_path: Path) -> None:
    start(0)
    result = notify(tmp_path, "--signal", "USR2", "--follow", "0.05")
    assert result.exit_code == 1
    assert "Nobody has left within 0.05 s." in result.output
    assert "--follow more than that" in result.output


def test_follow_ends_with_a_worker_whose_journal_says_nothing(
    start: Start, tmp_path: Path
) -> None:
    """Its config does not watch this signal, or it was killed: nothing can come."""
    start(0)
    result = notify(tmp_path, "--signal", "USR1", "--follow", "60")
    assert result.exit_code == 1
    assert "A worker has ended, and nothing of its exit is in" in result.output
    assert "does not watch SIGUSR1" in result.output
    assert "has the notice" not in result.output
