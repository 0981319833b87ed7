"""A training job of the demo: a supervisor's process, preempted as planned."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tfpreempt.errors import ConfigurationError, TfpreemptError

EPOCH_STEPS = 50  # of `model.fit`
_GAP = 20  # steps between two preemptions: who is started again trains before the next
_LAST = 0.8  # share of the steps after which nobody is preempted: a notice needs time
_POLL_SECONDS = 0.02
_STALL_SECONDS = 120.0  # importing TensorFlow on a busy machine takes tens of seconds
_STOP_SECONDS = 20.0
_TAIL_LINES = 30


class DemoFailedError(TfpreemptError, RuntimeError):
    """A job of the demo did not come to its end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """SIGTERM goes to these workers as soon as this step is trained."""

    step: int
    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and when it is preempted.

    Attributes:
        way: "loop" or "fit".
        preemptions: in the order of their steps.
    """

    way: str
    workers: int
    steps: int
    seed: int
    preemptions: tuple[Preemption, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A line of a worker's record: this process has trained this step."""

    worker: int
    step: int
    loss: float
    pid: int
    restart: int


def draw_plan(
    *, way: str, workers: int, steps: int, seed: int, preemptions: int
) -> Plan:
    """Draws the steps of the preemptions, and their workers, from the seed.

    Raises:
        ConfigurationError: so many preemptions do not fit into the steps, or the steps
            into epochs.
    """
    if way == "fit" and steps % EPOCH_STEPS:
        raise ConfigurationError(
            f"--steps {steps} with --keras: model.fit trains whole epochs, of "
            f"{EPOCH_STEPS} steps here. Give a multiple of {EPOCH_STEPS}."
        )
    slots = range(_GAP, int(steps * _LAST), _GAP)
    if preemptions > len(slots):
        raise ConfigurationError(
            f"--preemptions {preemptions} does not fit: at most {len(slots)} fit into "
            f"{steps} steps, {_GAP} steps apart and none after step "
            f"{int(steps * _LAST)}. Ask for fewer, or for more --steps."
        )
    rng = random.Random(seed)
    choices = [*((worker,) for worker in range(workers)), tuple(range(workers))]
    drawn = tuple(
        Preemption(step=slot + rng.randrange(_GAP // 2), workers=rng.choice(choices))
        for slot in sorted(rng.sample(slots, preemptions))
    )
    return Plan(way=way, workers=workers, steps=steps, seed=seed, preemptions=drawn)


def train(
    directory: Path,
    command: Sequence[str],
    workers: int,
    planned: Sequence[Preemption],
    *,
    stall_seconds: float = _STALL_SECONDS,
) -> Generator[list[Trained]]:
    """Runs a job to its end, preempts each of its incarnations as planned.

    Args:
        directory: where the workers record their steps; gets the supervisor's output.
        command: starts the supervisor, see `supervised`.
        workers: number of workers.
        planned: one preemption for each incarnation but the last.
        stall_seconds: give up when no worker trained a step for so long.

    Yields:
        What the workers have added to their records. Close it to end the job.

    Raises:
        DemoFailedError: the supervisor failed, or nothing moved any more.
    """
    directory.mkdir(parents=True, exist_ok=True)
    latest: dict[int, Trained] = {}
    done = 0  # preemptions, so this is the restart to come to as well
    with contextlib.ExitStack() as ends:
        paths = [record_path(directory, worker) for worker in range(workers)]
        files = [ends.enter_context(path.open("ab+")) for path in paths]
        process = ends.enter_context(_supervisor(directory, command))
        moved = time.monotonic()
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)  # first: the last lines are read below
            new = [
                Trained(worker=worker, **json.loads(line))
                for worker, file in enumerate(files)
                for line in _whole_lines(file)
            ]
            if new:
                moved = time.monotonic()
                latest |= {each.worker: each for each in new}
                yield new
            elif time.monotonic() - moved > stall_seconds:
                raise DemoFailedError(
                    f"No worker trained a step for {stall_seconds:.0f} s. "
                    f"The logs are in {directory / 'logs'}."
                )
            if process.returncode is None and done < len(planned):
                pids = pids_to_preempt(planned[done], latest, restart=done)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                done += bool(pids)
    if process.returncode != 0:
        log = (directory / "supervisor.log").read_text(errors="replace")
        raise DemoFailedError(
            f"The supervisor ended with status {process.returncode}, 0 was expected. "
            f"The workers' logs are in {directory / 'logs'}; its own last lines:\n"
            + "\n".join(log.splitlines()[-_TAIL_LINES:])
        )


def pids_to_preempt(
    planned: Preemption, latest: Mapping[int, Trained], restart: int
) -> list[int]:
    """The processes to signal now, if it is time.

    Args:
        planned: whom, and when.
        latest: the newest record of each worker that has any.
        restart: of the incarnation that is meant; its workers may just be starting, and
            one that has trained no step yet has no handler yet either, perhaps.
    """
    alive = {i: each for i, each in latest.items() if each.restart == restart}
    if not alive.keys() >= set(planned.workers):
        return []
    if max(each.step for each in alive.values()) < planned.step:
        return []
    return [alive[worker].pid for worker in planned.workers]


def supervised(directory: Path, plan: Plan, max_preemptions: int) -> list[str]:
    """The demo's training program under the supervisor; no failure is forgiven."""
    checkpoints = f"--checkpoint-dir={directory / 'checkpoints'}"
    return [
        *(sys.executable, "-m", "tfpreempt", "run", checkpoints),
        *(f"--log-dir={directory / 'logs'}", f"--workers={plan.workers}"),
        *(f"--max-preemptions={max_preemptions}", "--max-failures=0", "--"),
        *(sys.executable, "-m", "tfpreempt.cli.demo.worker", plan.way, checkpoints),
        *(f"--steps={plan.steps}", f"--seed={plan.seed}", f"--out={directory}"),
    ]


def record_path(directory: Path, worker: int) -> Path:
    """Where a worker of the job records its steps, over all restarts."""
    return directory / f"progress-{worker}.jsonl"


@contextlib.contextmanager
def _supervisor(
    directory: Path, command: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor's process; whatever still runs at the end is ended."""
    with (directory / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            # The workers share one machine, so they train on its CPU.
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
            # Ctrl-C reaches the demo alone, which then ends the supervisor.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()  # it ends its workers; where it is killed its guard does
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    for line in iter(file.readline, b""):
        if not line.endswith(b"\n"):  # it is still being written
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line
