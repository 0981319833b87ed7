"""`tfpreempt simulate` with real processes: the right one is signalled, or none."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import is_alive, wait_until
from tfpreempt.cli import main
from tfpreempt.cli.simulate.workers import NothingRunsError, RunningWorker, held_workers
from tfpreempt.core.events import Commit, Exit, Notice, Outcome
from tfpreempt.core.journal import Journal, journal_directory
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    _pack,
    read_worker_status,
    status_path,
)

pytestmark = pytest.mark.slow  # starts interpreters

# A worker for this command: its journal is open. At SIGTERM it writes the records of
# its last argument, and exits. At SIGUSR2 it writes the records, and continues.
_WORKER = """
import os, signal, sys, threading
def record(*_):
    os.write(journal.fileno(), sys.argv[-1].encode())
def leave(*_):
    record()
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR2, record)
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

    def begin(index: int, *how: str, says: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _WORKER),
                *(str(journal / f"worker-{index}.jsonl"), *how, says),
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        now = WorkerStatus(
            at=1.0,
            worker=index,
            num_workers=1,
            host="host",
            pid=process.pid,
            doing=WorkerActivity.TRAINING,
            step=1,
            stepped_at=1.0,
        )
        status_path(journal, index).write_bytes(_pack(now))
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its forked child too
        process.communicate()


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


# --- the right process ---------------------------------------------------------------


def test_the_worker_that_is_named_is_signalled(start: Start, tmp_path: Path) -> None:
    processes = [start(index) for index in range(3)]
    result = simulate(tmp_path, "--worker", "1")
    assert result.exit_code == 0, result.output
    assert f"sent SIGTERM to worker 1, process {processes[1].pid}" in result.output
    assert processes[1].wait(10) == 143
    assert [each.poll() for each in processes] == [None, 143, None]
    assert simulate(tmp_path).exit_code == 0
    assert processes[0].wait(10) == 143


def test_many_may_be_named(start: Start, tmp_path: Path) -> None:
    processes = [start(index) for index in range(2)]
    assert simulate(tmp_path, "--worker", "1", "--worker", "0").exit_code == 0
    assert [each.wait(10) for each in processes] == [143] * 2


def test_forks_of_a_worker_are_not_the_worker(start: Start, tmp_path: Path) -> None:
    process = start(0, "fork")
    with held_workers(tmp_path, [0]) as (worker,):
        assert worker.pid == process.pid


def test_readers_of_a_journal_are_not_the_worker(start: Start, tmp_path: Path) -> None:
    """`tail -F` may be older than the worker, and has a lower process id then."""
    journal = journal_directory(tmp_path) / "worker-0.jsonl"
    journal.touch()
    with subprocess.Popen(["tail", "-F", journal], stdout=subprocess.DEVNULL) as reader:
        try:
            opened = f"/proc/{reader.pid}/fd/3"
            wait_until(lambda: os.path.exists(opened), "tail to open the journal")
            result = simulate(tmp_path)
            assert "Running workers: none." in result.output
            process = start(0)
            assert simulate(tmp_path).exit_code == 0
            assert process.wait(10) == 143
            assert reader.poll() is None
        finally:
            reader.kill()


def test_forks_of_the_worker_before_are_not_the_worker(
    start: Start, tmp_path: Path
) -> None:
    """A data loader that outlives its worker has the lower process id."""
    earlier = start(0, "fork")
    earlier.kill()
    earlier.wait()
    assert "Running workers: none." in simulate(tmp_path).output
    worker = start(0)
    with held_workers(tmp_path, [0]) as (found,):
        assert found.pid == worker.pid


def test_a_process_that_a_status_file_names_is_not_the_worker(
    start: Start, tmp_path: Path
) -> None:
    """Any process with write access may have written the file."""
    process = start(0)
    journal = journal_directory(tmp_path)
    status = read_worker_status(status_path(journal, 0))
    assert status is not None
    status_path(journal, 1).write_bytes(_pack(dataclasses.replace(status, worker=1)))
    assert simulate(tmp_path, "--worker", "1").exit_code == 1
    status_path(journal, 0).write_bytes(
        _pack(dataclasses.replace(status, pid=os.getpid()))
    )
    assert simulate(tmp_path).exit_code == 1
    assert is_alive(process.pid)


def test_a_worker_that_opens_and_closes_files_is_found(
    start: Start, tmp_path: Path
) -> None:
    process = start(0, "busy")
    for _ in range(20):
        with held_workers(tmp_path, [0]) as (worker,):
            assert worker.pid == process.pid


def test_another_signal(start: Start, tmp_path: Path) -> None:
    process = start(0)
    assert simulate(tmp_path, "--signal", "usr1").exit_code == 0
    assert process.wait(10) == -signal.SIGUSR1


@pytest.mark.parametrize("name", ["SIGKILL", "NOPE"])
def test_signals_that_are_no_notice_are_refused(name: str, tmp_path: Path) -> None:
    result = simulate(tmp_path, "--signal", name)
    assert result.exit_code == 1
    assert f"signal '{name}': expected one of TERM" in result.output


def test_a_worker_that_ends_before_its_signal_is_reported(
    start: Start, tmp_path: Path
) -> None:
    """Its process id may be reused by then; a pidfd is not."""
    process = start(0)
    with held_workers(tmp_path, [0]) as (worker,):
        process.kill()
        process.wait()
        with pytest.raises(NothingRunsError, match="exited before the signal"):
            worker.send(signal.SIGTERM)


# --- nothing runs there --------------------------------------------------------------


def test_a_directory_without_a_journal(tmp_path: Path) -> None:
    result = simulate(tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} has no journal" in result.output


@pytest.mark.parametrize("name", ["journal", "12"])
def test_a_directory_within_the_job_s(name: str, tmp_path: Path) -> None:
    journal_directory(tmp_path).mkdir()
    (tmp_path / name).mkdir(exist_ok=True)
    result = simulate(tmp_path / name)
    assert f"{tmp_path} has a journal: name" in result.output


def test_all_workers_are_found_before_one_is_signalled(
    start: Start, tmp_path: Path
) -> None:
    processes = [start(index) for index in range(2)]
    result = simulate(tmp_path, "--worker", "0", "--worker", "5")
    assert result.exit_code == 1
    assert "worker 5 of" in result.output
    assert "Running workers: 0, 1." in result.output
    assert [each.poll() for each in processes] == [None, None]
    assert "sent" not in result.output


def test_workers_that_have_ended(start: Start, tmp_path: Path) -> None:
    process = start(0)
    process.kill()
    process.wait()
    result = simulate(tmp_path)
    assert result.exit_code == 1
    assert "is not running on this machine" in result.output
    assert "Running workers: none." in result.output


def test_the_worker_of_another_job_gets_no_signal(start: Start, tmp_path: Path) -> None:
    process = start(0)
    journal_directory(tmp_path / "other").mkdir(parents=True)
    assert simulate(tmp_path / "other").exit_code == 1
    assert is_alive(process.pid)


# --- options -------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["ckpt", "--file", "stop"]])
def test_one_way_has_to_be_named(arguments: list[str]) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert "Give one of" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "0", "--file", "x"], "need DIRECTORY"),
        (["--signal", "TERM", "--serve", "gce"], "need DIRECTORY"),
        (["--follow", "5", "--metadata", "http://x"], "need DIRECTORY"),
        (["--port", "80", "--metadata", "http://x"], "--port needs --serve"),
        (["--port", "0", "ckpt"], "--port needs --serve"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    arguments: list[str], message: str
) -> None:
    result = simulate(*arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output


@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_seconds_that_are_no_number_are_refused(seconds: str) -> None:
    result = simulate("ckpt", "--follow", seconds)
    assert result.exit_code == 2
    assert f"{seconds} is not a finite number of seconds" in result.output


# --- what follows --------------------------------------------------------------------


def records(outcome: Outcome, worker: int = 1) -> str:
    """Records of a worker of the job during its exit."""
    heard = Notice(
        source="signal:SIGTERM", worker=worker, grace_seconds=None, received_at=0.0
    )
    commit = Commit(
        step=7, path="/ckpt/7", sequence=1, world_size=2, save_seconds=0.1, bytes=10,
        because="preemption",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(folder, worker)
        journal.record(heard)
        if outcome is Outcome.COMMITTED:
            journal.record(commit)
        is_failed = outcome is Outcome.FAILED
        code, detail = (None, "ValueError: why") if is_failed else (143, "")
        journal.record(Exit(outcome=outcome, code=code, step=7, detail=detail))
        journal.close()
        return Path(folder, f"worker-{worker}.jsonl").read_text()


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.LOST])
def test_follow_shows_the_reaction_of_the_worker(
    outcome: Outcome, start: Start, tmp_path: Path
) -> None:
    earlier = journal_directory(tmp_path) / "worker-1.jsonl"
    earlier.write_text(records(Outcome.LOST))
    start(1, says=records(outcome))
    result = simulate(tmp_path, "--worker", "1", "--follow", "30")
    was_committed = outcome is Outcome.COMMITTED
    assert result.exit_code == (0 if was_committed else 1)
    told = result.output
    assert told.count("worker 1 received a notice: signal:SIGTERM") == 1
    assert ("step 7 committed in /ckpt/7" in told) is was_committed
    assert f"worker 1 exits at step 7 with code 143: {outcome.value}" in told
    assert ("worker 1 exited without a commit" in told) is not was_committed


def test_follow_shows_an_error(start: Start, tmp_path: Path) -> None:
    start(1, says=records(Outcome.FAILED))
    result = simulate(tmp_path, "--worker", "1", "--follow", "30")
    assert result.exit_code == 1
    assert "worker 1 failed at step 7: ValueError: why" in result.output


def test_follow_waits_for_each_worker(start: Start, tmp_path: Path) -> None:
    for index in range(2):
        start(index, says=records(Outcome.COMMITTED, index))
    result = simulate(tmp_path, "--worker", "1", "--worker", "0", "--follow", "30")
    assert result.exit_code == 0, result.output
    assert result.output.count(" with code 143: ") == 2


def test_follow_ends_in_time(start: Start, tmp_path: Path) -> None:
    start(0)
    result = simulate(tmp_path, "--signal", "USR2", "--follow", "0.05")
    assert result.exit_code == 1
    assert "worker 0 has not exited within" in result.output
    assert "longer --follow" in result.output


def test_follow_shows_the_records_of_a_worker_that_continues(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user wants to know whether the worker received the notice."""

    def runs_on(worker: RunningWorker, seconds: float) -> bool:
        wait_until(lambda: bool(worker.records()), "the notice")
        return False

    monkeypatch.setattr(RunningWorker, "wait_ended", runs_on)
    heard, _, _ = records(Outcome.COMMITTED).splitlines(keepends=True)
    start(1, says=heard)
    result = simulate(tmp_path, "--worker", "1", "--signal", "USR2", "--follow", "60")
    assert result.exit_code == 1
    assert "worker 1 received a notice: signal:SIGTERM" in result.output
    assert "worker 1 has not exited within" in result.output


def test_follow_ends_with_a_worker_without_records(
    start: Start, tmp_path: Path
) -> None:
    """Its config does not watch this signal, or it was killed: no record follows."""
    start(0)
    result = simulate(tmp_path, "--signal", "USR1", "--follow", "60")
    assert result.exit_code == 1
    assert "worker 0 ended without a record of its exit" in result.output
    assert "does not watch this signal" in result.output
    assert "received a notice" not in result.output
