"""Heartbeats of a process, in a file lent by the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import wait_until
from tfpreempt.core.heartbeat import (
    STACKS_SIGNAL,
    VARIABLE,
    Heartbeat,
    HeartbeatFile,
    WorkerPhase,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(30)]  # starts interpreters

PROGRAM = """
import os, sys, threading
from tfpreempt.core import heartbeat

stage = heartbeat.WorkerPhase.STEPS

def progress():
    pid = heartbeat.pid_seen_by_supervisor()
    return heartbeat.Heartbeat(pid=pid, boundaries=5, step=1 << 40, stage=stage)

def wait_for_data():
    sys.stdin.read()

heartbeat.start_heartbeat(progress)
"""


@pytest.fixture
def file() -> Iterator[HeartbeatFile]:
    made = HeartbeatFile()
    yield made
    made.close()


def newest(file: HeartbeatFile) -> Heartbeat:
    told = file.read()
    assert told is not None
    return told[1]


def start(file: HeartbeatFile, program: str, *wrapper: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **file.to_environment()}
    command = [*wrapper, sys.executable, "-c", PROGRAM + program]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


def test_the_heartbeat_of_a_process_is_read(file: HeartbeatFile) -> None:
    assert file.read() is None
    with start(file, "wait_for_data()") as process:
        wait_until(lambda: file.read() is not None, "a heartbeat")
    told = Heartbeat(
        pid=process.pid, boundaries=5, step=1 << 40, stage=WorkerPhase.STEPS
    )
    assert newest(file) == told
    file.clear()
    assert file.read() is None


def test_the_last_sign_is_that_of_the_end(file: HeartbeatFile) -> None:
    """The thread has ended by then: its last heartbeat would stay for ever."""
    with start(file, "stage = heartbeat.WorkerPhase.APART"):
        pass
    assert newest(file).stage is WorkerPhase.APART


def test_a_process_writes_its_stacks_though_main_is_stuck(file: HeartbeatFile) -> None:
    with start(file, "wait_for_data()") as process:
        wait_until(lambda: file.read() is not None, "a heartbeat")

        def is_shown() -> bool:
            assert file.ask_for_stacks(process.pid)
            return "in wait_for_data" in file.stacks()

        wait_until(is_shown, "the stacks")
        assert newest(file).boundaries == 5


def test_a_process_that_is_stopped_writes_none(file: HeartbeatFile) -> None:
    with start(file, "wait_for_data()") as process:
        wait_until(lambda: file.read() is not None, "a heartbeat")
        process.send_signal(signal.SIGSTOP)
        process.send_signal(STACKS_SIGNAL)
        assert file.stacks() == ""
        process.kill()


def test_a_worker_in_a_pid_namespace_of_its_own_is_signalled(
    file: HeartbeatFile,
) -> None:
    """The worker has process id 1 there, which is another process outside."""
    wrapper = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*wrapper, "true"], check=False).returncode:
        pytest.skip("a pid namespace needs CAP_SYS_ADMIN")
    with start(file, "wait_for_data()", *wrapper) as process:
        wait_until(lambda: file.read() is not None, "a heartbeat")
        pid = newest(file).pid
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert [pid] == [int(each) for each in children.read_text().split()]

        def is_shown() -> bool:
            assert file.ask_for_stacks(pid)
            return "in wait_for_data" in file.stacks()

        wait_until(is_shown, "the stacks")


def test_a_process_that_is_not_the_worker_is_not_signalled(file: HeartbeatFile) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as stranger:
        assert not file.ask_for_stacks(stranger.pid)
        stranger.communicate(b"\n")
        assert stranger.returncode == 0
    assert not file.ask_for_stacks(stranger.pid)  # it has ended


def test_a_file_of_the_user_s_is_not_written(
    file: HeartbeatFile, tmp_path: Path
) -> None:
    """The path of the supervisor's file leads there in another pid namespace."""
    path = tmp_path / "file"
    path.write_text("precious")
    with path.open("rb+") as other:
        lent = f"/proc/{os.getpid()}/fd/{other.fileno()}"
        environment = {**os.environ, VARIABLE: lent}
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert path.read_text() == "precious"
    assert "--hang-timeout" in ended.stderr
