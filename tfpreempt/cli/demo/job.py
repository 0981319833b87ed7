"""One training job of the demo: the supervisor as a process, watched and struck."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tfpreempt.cli.demo.plan import Progress, Striker
from tfpreempt.errors import TfpreemptError

_POLL_SECONDS = 0.02
_STALL_SECONDS = 120.0  # importing TensorFlow on a busy machine takes tens of seconds
_STOP_SECONDS = 20.0
_TAIL_LINES = 30


class DemoFailedError(TfpreemptError, RuntimeError):
    """A job of the demo did not come to its end."""


class Job:
    """A supervisor's process whose workers record their progress in a directory.

    Leaving the context ends whatever still runs.

    Args:
        directory: where the workers write, and where the supervisor's output goes.
        command: starts the supervisor.
        workers: number of workers.
    """

    def __init__(self, directory: Path, command: Sequence[str], workers: int) -> None:
        self.directory = directory
        self._latest: dict[int, Progress] = {}
        self._offsets = dict.fromkeys(range(workers), 0)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "supervisor.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                # Ctrl-C reaches the demo alone, which then ends the supervisor.
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def watch(
        self,
        striker: Striker,
        show: Callable[[Progress], None],
        *,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        """Follows the job to its end, striking where the striker says so.

        Args:
            striker: decides whom to signal.
            show: gets each new progress of the worker that is furthest on.
            stall_seconds: give up when no worker trained a step for so long.

        Raises:
            DemoFailedError: the supervisor failed, or nothing moved any more.
        """
        moved = time.monotonic()
        ended = False
        while not ended:
            ended = self._has_ended()  # first: what was written last is read below
            if self._read_progress():
                moved = time.monotonic()
                show(max(self._latest.values(), key=lambda each: each.step))
                for pid in () if ended else striker.due(self._latest):
                    _terminate(pid)
            elif time.monotonic() - moved > stall_seconds:
                raise DemoFailedError(
                    f"No worker trained a step for {stall_seconds:.0f} s. "
                    f"The logs are in {self.directory / 'logs'}."
                )
        if self._process.returncode != 0:
            raise DemoFailedError(self._failure())

    def _has_ended(self) -> bool:
        try:
            self._process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_progress(self) -> bool:
        """Reads what the workers added; says whether there was anything."""
        moved = False
        for worker, offset in self._offsets.items():
            path = progress_path(self.directory, worker)
            for line, end in _complete_lines(path, offset):
                self._latest[worker] = parse_progress(worker, line)
                self._offsets[worker] = end
                moved = True
        return moved

    def _failure(self) -> str:
        log = self.directory / "supervisor.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(
            [
                f"The supervisor ended with status {self._process.returncode}, 0 was "
                f"expected. The workers' logs are in {self.directory / 'logs'}; its "
                "own last lines:",
                *lines[-_TAIL_LINES:],
            ]
        )

    def stop(self) -> None:
        """Ends the supervisor, which ends its workers; a deaf one is killed."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for each in self._latest.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            self._process.wait(_STOP_SECONDS)


def demo_command(
    directory: Path,
    *,
    workers: int,
    steps: int,
    seed: int,
    preemptions: int,
    keras: bool = False,
) -> list[str]:
    """The demo's training program under the supervisor; no failure is forgiven."""
    checkpoints = str(directory / "checkpoints")
    supervisor = [sys.executable, "-m", "tfpreempt", "run"]
    supervisor += ["--workers", str(workers)]
    supervisor += ["--max-preemptions", str(preemptions), "--max-failures", "0"]
    supervisor += ["--checkpoint-dir", checkpoints]
    supervisor += ["--log-dir", str(directory / "logs")]
    module = "keras_worker" if keras else "worker"
    program = [sys.executable, "-m", f"tfpreempt.cli.demo.{module}"]
    program += ["--steps", str(steps), "--seed", str(seed)]
    program += ["--checkpoint-dir", checkpoints, "--out", str(directory)]
    return [*supervisor, "--", *program]


def progress_path(directory: Path, worker: int) -> Path:
    """Where a worker of the job records its steps."""
    return directory / f"progress-{worker}.jsonl"


def parse_progress(worker: int, line: str) -> Progress:
    """Reads one line of a worker's record."""
    record = json.loads(line)
    return Progress(
        worker=worker,
        step=record["step"],
        loss=record["loss"],
        pid=record["pid"],
        restart=record["restart"],
    )


def _complete_lines(path: Path, offset: int) -> Iterator[tuple[str, int]]:
    """The lines after an offset that have their end, each with the offset behind it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line.decode("utf-8"), offset


def _terminate(pid: int) -> None:
    """A real SIGTERM; a process that is gone already is counted as not struck."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _environment() -> dict[str, str]:
    """The workers share one machine, so they train on its CPU."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
