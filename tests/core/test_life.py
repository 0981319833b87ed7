"""Signs of life, from a process to whoever lends it a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cli.conftest import wait_until
from tfpreempt.core.life import STACKS_SIGNAL, LifeFile, Sign, Stage

pytestmark = pytest.mark.timeout(30)

PROGRAM = """
import os, sys, threading
from tfpreempt.core import life

stage = life.Stage.STEPS

def sign():
    return life.Sign(pid=os.getpid(), boundaries=5, step=1 << 40, stage=stage)

def wait_for_data():
    sys.stdin.read()

life.tell(sign)
"""


@pytest.fixture
def file() -> Iterator[LifeFile]:
    made = LifeFile()
    yield made
    made.close()


def newest(file: LifeFile) -> Sign:
    told = file.read()
    assert told is not None
    return told[1]


def start(file: LifeFile, program: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **file.to_environment()}
    command = [sys.executable, "-c", PROGRAM + program]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


def test_what_a_process_tells_is_read(file: LifeFile) -> None:
    assert file.read() is None
    with start(file, "wait_for_data()") as process:
        wait_until(lambda: file.read() is not None, "a sign")
    told = Sign(pid=process.pid, boundaries=5, step=1 << 40, stage=Stage.STEPS)
    assert newest(file) == told
    file.clear()
    assert file.read() is None


def test_the_last_sign_is_that_of_the_end(file: LifeFile) -> None:
    """The thread is ended by then: what it told before would stand for ever."""
    with start(file, "stage = life.Stage.APART"):
        pass
    assert newest(file).stage is Stage.APART


def test_a_process_writes_its_stacks_though_main_is_stuck(file: LifeFile) -> None:
    with start(file, "wait_for_data()") as process:
        wait_until(lambda: file.read() is not None, "a sign")

        def is_shown() -> bool:
            process.send_signal(STACKS_SIGNAL)
            return "in wait_for_data" in file.stacks()

        wait_until(is_shown, "the stacks")
        assert newest(file).boundaries == 5


def test_a_process_that_is_stopped_writes_none(file: LifeFile) -> None:
    with start(file, "wait_for_data()") as process:
        wait_until(lambda: file.read() is not None, "a sign")
        process.send_signal(signal.SIGSTOP)
        process.send_signal(STACKS_SIGNAL)
        assert file.stacks() == ""
        process.kill()
