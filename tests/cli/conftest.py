"""Runs `tfpreempt run` as a process, with small programs as its workers."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.supervised import supervise

_ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS = 30.0

# Beginning of every worker program. `me` and `restart` identify the process; `tell`
# creates a file that a test waits for; `until_told` exits with the restart code on
# SIGTERM.
_PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
restart = int(os.environ["TFPREEMPT_NUM_RESTARTS"])
def tell(name, text=""):
    part = pathlib.Path(f"{name}.part")
    part.write_text(text or str(os.getpid()))
    part.rename(name)
def until_told(code=143):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    tell(f"ready-{me}-{restart}")
    while True:
        time.sleep(0.02)  # pause() could miss a signal just before it
"""


# A process that has imported a supervisor's modules, and forks supervisors.
_ZYGOTE = multiprocessing.get_context("forkserver")
_ZYGOTE.set_forkserver_preload(["tfpreempt.cli.run.command", "tests.cli.supervised"])


class Forked:
    """A supervisor that is forked, not started: in a tenth of the time."""

    def __init__(
        self, directory: Path, variables: dict[str, str], arguments: Sequence[str]
    ) -> None:
        self._directory = directory
        self._process = _ZYGOTE.Process(
            target=supervise, args=(str(directory), variables, arguments)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"runs after {timeout} s"
        out, err = ((self._directory / name).read_text() for name in ("out", "err"))
        return out, err

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        # Like subprocess: the process may have ended since the last poll.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)


def _hear_stops() -> None:
    """Undoes the effect of nohup, or of a shell's background, on the tests."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """A supervisor process in its own directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[str] | Forked | None = None

    def start(
        self,
        program: str,
        *options: str,
        environment: dict[str, str] | None = None,
        command: Sequence[str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> subprocess.Popen[str] | None:
        """Starts the supervisor; `program` follows the prelude in every worker.

        Returns:
            With a wrapper, which makes it a process from the start, that; its output is
            in pipes then.
        """
        (self.directory / "worker.py").write_text(_PRELUDE + program)
        worker = command or [sys.executable, "-I", "-S", "worker.py"]
        inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        here = {
            "PYTHONPATH": str(_ROOT),
            "TFPREEMPT_SCRATCH_DIR": str(self.directory / "scratch"),
        }
        variables = {**inherited, **here, **(environment or {})}
        arguments = ["--backoff", "0.01", "--log-dir", "logs"]
        arguments += ["--checkpoint-dir", "ckpt", *options, "--", *worker]
        if not wrapper:
            self.process = Forked(self.directory, variables, arguments)
            return None
        self.process = process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tfpreempt", "run", *arguments],
            cwd=self.directory,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_stops,
        )
        return process

    def finish(self) -> tuple[int, str, str]:
        """The exit status, stdout and stderr of the supervisor."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=_LIMIT_SECONDS)
        assert self.process.returncode is not None
        return self.process.returncode, out, err

    def run(self, program: str, *options: str, **more: Any) -> tuple[int, str, str]:
        """Starts and finishes."""
        self.start(program, *options, **more)
        return self.finish()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_told(self, name: str) -> str:
        """Waits for the text of a worker, often a process id; returns the text."""
        path = self.directory / name
        wait_until(path.exists, name)
        return path.read_text()

    def records(self) -> list[dict[str, Any]]:
        journal = self.directory / "ckpt" / "journal" / "supervisor.jsonl"
        return [json.loads(line) for line in journal.read_text().splitlines()]

    def wait_recorded(self, event: str) -> None:
        """Waits for an event in the supervisor's journal."""
        journal = self.directory / "ckpt" / "journal" / "supervisor.jsonl"
        said = f'"event": "{event}"'
        wait_until(lambda: journal.exists() and said in journal.read_text(), event)

    def err(self) -> str:
        """The stderr of the supervisor so far."""
        return (self.directory / "err").read_text()

    def log(self, worker: int) -> str:
        return (self.directory / "logs" / f"worker-{worker}.log").read_text()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Looks again and again at something in another process, up to a limit."""
    limit = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"waited {_LIMIT_SECONDS} s for {what}"
        time.sleep(0.005)


def is_alive(pid: int | str) -> bool:
    """Returns whether the process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.send_signal(signal.SIGKILL)  # the guard ends its workers
        run.process.communicate()
