"""A training job of the demo: `tfpreempt run` of its program, preempted as planned."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from tfpreempt.cli.notify.workers import held_workers
from tfpreempt.cli.terminal import echo
from tfpreempt.errors import ConfigurationError, TfpreemptError

EPOCH_STEPS = 50  # of `model.fit`
_GAP = 20  # steps between two preemptions: who is started again trains before the next
_LAST = 0.8  # share of the steps after which nobody is preempted: a notice needs time
_SHOWN_STEPS = 100
_STALL_SECONDS = 120.0  # importing TensorFlow on a busy machine takes tens of seconds
STEP = re.compile(r"step (\d+), restart (\d+), loss (\S+)$", re.MULTILINE)


class DemoFailedError(TfpreemptError, RuntimeError):
    """A job of the demo did not come to its end."""


def print_step(step: int, restart: int, loss: float) -> None:
    """Prints a step that was trained, as `STEP` finds it again.

    In one write: `print` of an unbuffered Python makes two, and what another thread
    writes into the same pipe may come in between.
    """
    sys.stdout.write(f"step {step}, restart {restart}, loss {loss:.4g}\n")
    sys.stdout.flush()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """SIGTERM goes to these workers as soon as this step is trained."""

    step: int
    workers: tuple[int, ...]


def draw_preemptions(
    count: int, *, workers: int, steps: int, seed: int
) -> tuple[Preemption, ...]:
    """Draws the steps of the preemptions, in order, and their workers.

    Raises:
        ConfigurationError: so many do not fit into the steps.
    """
    last = int(steps * _LAST)
    slots = range(_GAP, last, _GAP)
    if count > len(slots):
        raise ConfigurationError(
            f"--preemptions {count} does not fit: at most {len(slots)} fit into "
            f"{steps} steps, {_GAP} steps apart and none after step {last}. Ask for "
            "fewer, or for more --steps."
        )
    rng = random.Random(seed)
    choices = [*((worker,) for worker in range(workers)), tuple(range(workers))]
    return tuple(
        Preemption(step=slot + rng.randrange(_GAP // 2), workers=rng.choice(choices))
        for slot in sorted(rng.sample(slots, count))
    )


def supervised(
    directory: Path, workers: int, max_preemptions: int, *arguments: object
) -> list[str]:
    """The demo's program with its arguments, supervised; no failure is forgiven."""
    return [
        *(sys.executable, "-m", "tfpreempt", "run", f"--workers={workers}"),
        *(f"--checkpoint-dir={directory}/checkpoints", f"--log-dir={directory}/logs"),
        *(f"--max-preemptions={max_preemptions}", "--max-failures=0"),
        *("--grace=20", "--", sys.executable, "-m", "tfpreempt.cli.demo.worker"),
        *map(str, (directory, *arguments)),
    ]


def train(
    directory: Path, command: Sequence[str], planned: Sequence[Preemption]
) -> None:
    """Runs a job to its end, preempts each of its incarnations as planned.

    Args:
        directory: of the job.
        command: starts the supervisor, see `supervised`; it prints what worker 0 does.
        planned: one preemption for each incarnation but the last.

    Raises:
        DemoFailedError: the supervisor failed, or no step was trained for too long.
        NothingRunsError: a worker has ended before it could be preempted.
    """
    left = list(planned)
    with _supervisor(command) as output:
        for step, restart in _steps(output, directory / "logs"):
            if step % _SHOWN_STEPS == 0:
                echo(f"[{directory.name}] step {step}", err=True)
            # Whose restart trains has a handler, and the others trained the step too.
            if left and step >= left[0].step and restart == len(planned) - len(left):
                told = left.pop(0).workers
                names = ", ".join(map(str, told))
                echo(f"step {step}: SIGTERM to worker(s) {names}", err=True)
                with held_workers(directory / "checkpoints", told) as held:
                    for worker in held:
                        worker.send(signal.SIGTERM)


def _steps(output: IO[bytes], logs: Path) -> Iterator[tuple[int, int]]:
    """Each step as it is trained, and after how many restarts.

    Nothing else ends a job that hangs: a supervisor does not know how long a step is.
    """
    limit = time.monotonic() + _STALL_SECONDS
    while select.select([output], [], [], max(0.0, limit - time.monotonic()))[0]:
        if not (line := output.readline()):
            return
        if match := STEP.search(line.decode(errors="replace")):
            yield int(match[1]), int(match[2])
            limit = time.monotonic() + _STALL_SECONDS
    raise DemoFailedError(
        f"No step was trained for {_STALL_SECONDS:g} s, so the job was ended. What its "
        f"workers said is in {logs}."
    )


@contextlib.contextmanager
def _supervisor(command: Sequence[str]) -> Iterator[IO[bytes]]:
    """Runs it; yields what it prints. Whoever does not read to the end, ends it."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        bufsize=0,  # what a buffer holds, no select would see
        # The workers share one machine, so they train on its CPU.
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
        # Ctrl-C reaches the demo alone, which then ends the supervisor.
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout
        except BaseException:
            process.terminate()  # it ends its workers, within its --grace
            process.wait()
            raise
    if process.returncode != 0:
        code = process.returncode
        raise DemoFailedError(f"The supervisor, above, ended with {code} instead of 0.")
