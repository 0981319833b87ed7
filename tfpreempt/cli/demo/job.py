"""Runs a training job of the demo under `tfpreempt run`, and preempts it as planned."""

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

from tfpreempt.cli.simulate.workers import held_workers
from tfpreempt.cli.terminal import echo
from tfpreempt.errors import ConfigurationError, TfpreemptError

EPOCH_STEPS = 50  # steps per epoch of `model.fit`
_GAP = 20  # steps between preemptions, so that restarted workers train in between
_LAST = 0.8  # preempt in the first 80 % of the steps: the agreement takes some steps
_SHOWN_STEPS = 100
_STALL_SECONDS = 120.0  # starting on a busy machine takes tens of seconds
STEP = re.compile(r"step (\d+), restart (\d+), loss (\S+)$", re.MULTILINE)


class DemoFailedError(TfpreemptError, RuntimeError):
    """A job of the demo failed or made no progress."""


def print_step(step: int, restart: int, loss: float) -> None:
    """Prints a trained step in the format that the pattern `STEP` matches.

    The line is written by one call. If the output is unbuffered, `print` would write
    text and newline separately, and another thread's output could come in between.
    """
    sys.stdout.write(f"step {step}, restart {restart}, loss {loss:.4g}\n")
    sys.stdout.flush()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A planned preemption: after step `step`, SIGTERM is sent to `workers`."""

    step: int
    workers: tuple[int, ...]


def draw_preemptions(
    count: int, *, workers: int, steps: int, seed: int
) -> tuple[Preemption, ...]:
    """Chooses the steps and the workers of the preemptions at random.

    Args:
        count: number of preemptions.
        workers: number of workers.
        steps: number of training steps.
        seed: seed of the random numbers.

    Returns:
        The preemptions in order of their steps.

    Raises:
        ConfigurationError: there are too many preemptions for the number of steps.
    """
    last = int(steps * _LAST)
    slots = range(_GAP, last, _GAP)
    if count > len(slots):
        raise ConfigurationError(
            f"--preemptions {count} is too large: at most {len(slots)} fit into "
            f"{steps} steps, {_GAP} steps apart and none after step {last}. Use fewer "
            "preemptions, or more --steps."
        )
    rng = random.Random(seed)
    choices = [*((worker,) for worker in range(workers)), tuple(range(workers))]
    return tuple(
        Preemption(step=slot + rng.randrange(_GAP // 2), workers=rng.choice(choices))
        for slot in sorted(rng.sample(slots, count))
    )


def supervised(
    backend: str, directory: Path, workers: int, max_preemptions: int, *more: object
) -> list[str]:
    """Returns the `tfpreempt run` command that runs the demo's training program.

    Args:
        backend: "tensorflow" or "jax".
        directory: directory of the job.
        workers: number of workers.
        max_preemptions: maximum number of preemptions after which the supervisor
            restarts the workers. (A failure always ends the job.)
        *more: further arguments of the training program: loop|fit, steps, seed.
    """
    return [
        *(sys.executable, "-m", "tfpreempt", "run", f"--workers={workers}"),
        *(f"--checkpoint-dir={directory}/checkpoints", f"--log-dir={directory}/logs"),
        *(f"--max-preemptions={max_preemptions}", "--max-failures=0"),
        *("--grace=20", "--", "env", f"KERAS_BACKEND={backend}"),
        # Two workers can't share a GPU: NCCL refuses a GPU that occurs twice.
        *("JAX_PLATFORMS=cpu", "CUDA_VISIBLE_DEVICES=-1"),
        *(sys.executable, "-m", f"tfpreempt.cli.demo.{backend}_worker"),
        *map(str, (directory, *more)),
    ]


def train(
    directory: Path, command: Sequence[str], planned: Sequence[Preemption]
) -> None:
    """Runs a job to its end, and preempts its workers as planned.

    Args:
        directory: directory of the job.
        command: command that starts the supervisor, see `supervised`. Its output
            contains the output of worker 0.
        planned: preemptions, in order of their steps.

    Raises:
        DemoFailedError: the supervisor failed, or no step was trained for
            `_STALL_SECONDS`.
        NothingRunsError: a worker ended before SIGTERM could be sent.
    """
    left = list(planned)
    with _supervisor(command) as output:
        for step, restart in _steps(output, directory / "logs"):
            if step % _SHOWN_STEPS == 0:
                echo(f"[{directory.name}] step {step}", err=True)
            # Only preempt after the first step of a restarted program: after this step
            # every worker has a handler, because all workers train the same steps.
            if left and step >= left[0].step and restart == len(planned) - len(left):
                preempted = left.pop(0).workers
                names = ", ".join(map(str, preempted))
                echo(f"step {step}: SIGTERM to worker(s) {names}", err=True)
                with held_workers(directory / "checkpoints", preempted) as held:
                    for worker in held:
                        worker.send(signal.SIGTERM)


def _steps(output: IO[bytes], logs: Path) -> Iterator[tuple[int, int]]:
    """Yields (trained step, number of restarts before the step) from a job's output.

    The function also detects a stalled job. The supervisor cannot do so, because it
    does not know how long a step may take.

    Args:
        output: output of the supervisor.
        logs: directory of the workers' logs, for the error message.

    Raises:
        DemoFailedError: no step was trained for `_STALL_SECONDS`.
    """
    limit = time.monotonic() + _STALL_SECONDS
    while select.select([output], [], [], max(0.0, limit - time.monotonic()))[0]:
        if not (line := output.readline()):
            return
        if match := STEP.search(line.decode(errors="replace")):
            yield int(match[1]), int(match[2])
            limit = time.monotonic() + _STALL_SECONDS
    raise DemoFailedError(
        f"No step was trained for {_STALL_SECONDS:g} s, so the job was terminated. See "
        f"the logs of the workers in {logs}."
    )


@contextlib.contextmanager
def _supervisor(command: Sequence[str]) -> Iterator[IO[bytes]]:
    """Context manager: runs the supervisor; an error in the block ends the supervisor.

    Yields:
        The output of the supervisor.

    Raises:
        DemoFailedError: the exit code of the supervisor is not 0.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        bufsize=0,  # select does not see bytes in a buffer
        # Hide GPUs, because the workers share the machine.
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
        # Ctrl-C must reach only the demo, which then ends the supervisor.
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout
        except BaseException:
            process.terminate()  # the supervisor ends its workers within --grace
            process.wait()
            raise
    if process.returncode != 0:
        code = process.returncode
        raise DemoFailedError(
            f"The supervisor exited with code {code}; see the output above."
        )
