"""Measures goodput: the useful part of the wall time of an often preempted training.

Two real workers train the same small model in several ways: with tfpreempt's handler,
with TensorFlow's own handler, with periodic saves by CheckpointManager alone (the
process ends at SIGTERM), and with BackupAndRestore in `fit`. After a number of seconds
of training, one of the workers is struck: by SIGTERM, with the loss of its machine
after a grace period, or by SIGKILL without a notice. The chief and the other worker are
struck in turn. Then all workers are restarted, as platforms do.

Without a notice, only the ways with periodic saves are tried (tfpreempt's handler with
`save_freq`). A way that saves only after a notice starts from scratch, which needs no
trial.

The supervisor is a simple supervisor of the bench; no way runs under `tfpreempt run`.
This supervisor starts both workers at once. If one worker exits by itself, the other
worker has the rest of the grace period. If one worker is killed by a signal, the other
worker is killed at once, so that no way waits for TensorFlow to detect a crashed peer.

A new machine is available at once. So a way that ignores SIGTERM trains during the
grace period, and completes more steps per start than a way that exits early. The
difference grows with the ratio of the grace period to the time between strikes. Wasted
steps, and goodput without start-up, depend less on this ratio.

The ways take turns, one life each, so that a load on the machine affects all alike. The
state is small (4 MiB) and in memory. So saves are cheap, which favors the ways that
save often.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput_account import Life, account, disagreements, read_life
from benchmarks.preemption import (
    EXIT_SECONDS,
    ROOT,
    START_SECONDS,
    WORKERS,
    environment,
)
from tests.ports import free_ports

PERIODIC = ("checkpoint_manager", "backup_and_restore")
WAYS = {
    "SIGTERM": ("tfpreempt", "tensorflow_handler", *PERIODIC),
    "SIGKILL": ("tfpreempt_save_every", *PERIODIC),
}
POLL_SECONDS = 0.02


def rows(
    seconds: float = 300, every: float = 30, grace: float = 10, save_steps: int = 50
) -> Iterator[dict[str, Any]]:
    """Yields a row for each strike and way.

    Args:
        seconds: seconds of training for each row.
        every: seconds of training between two strikes.
        grace: seconds from SIGTERM to the machine's end.
        save_steps: steps between two periodic saves.
    """
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=memory))
    trials = [(strike, way) for strike, ways in WAYS.items() for way in ways]
    lives: dict[tuple[str, str], list[Life]] = {trial: [] for trial in trials}
    try:
        rounds = max(1, round(seconds / every))
        for number, (strike, way) in itertools.product(range(rounds), trials):
            place = root / strike / way
            place.mkdir(parents=True, exist_ok=True)
            with workers(way, place, save_steps) as processes:
                life = live(processes, place, number, strike, every, grace)
            lives[strike, way].append(life)
            progress(number, strike, way, life)
            if number == rounds - 1:
                yield {
                    **row(strike, way, lives[strike, way], final_step(place)),
                    "strike_every_seconds": every,
                    "grace_seconds": grace,
                    "save_steps": save_steps,
                }
    finally:
        shutil.rmtree(root, ignore_errors=True)


def final_step(place: Path) -> int:
    """Returns the step of a trial's newest checkpoint; no worker may be running."""
    from benchmarks import goodput_train  # imports TensorFlow

    return goodput_train.final_step(place / "state")


def row(strike: str, way: str, lives: Sequence[Life], final: int) -> dict[str, Any]:
    """Returns the row of a way from its lives.

    Args:
        strike: name of the signal.
        way: name of the way to save.
        lives: the lives in order.
        final: step of the newest checkpoint.
    """
    wrong = list(disagreements(lives, final))
    return {
        "bench": "goodput",
        "strike": strike,
        "way": way,
        **account(lives, final),
        "states_agree": not wrong,
        "disagreements": wrong,
        "codes": sorted({life.codes for life in lives}),
    }


@contextlib.contextmanager
def workers(
    way: str, place: Path, save_steps: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Context manager: starts both workers of one start, and kills them at the end."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(WORKERS):
            lines = place / f"life-{index}"
            lines.unlink(missing_ok=True)
            log = stack.enter_context((place / f"log-{index}").open("wb"))
            arguments = [way, place / "state", lines, save_steps]
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.goodput_train"]
                + [str(argument) for argument in arguments],
                cwd=ROOT,
                env=environment(addresses, index),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def live(
    processes: list[subprocess.Popen[bytes]],
    place: Path,
    number: int,
    strike: str,
    every: float,
    grace: float,
) -> Life:
    """Lets the workers train, strikes one worker, and waits until all have exited.

    Args:
        processes: the started workers.
        place: directory to which the workers write.
        number: number of the start, which determines the worker to strike.
        strike: name of the signal.
        every: seconds of training before the strike.
        grace: seconds from SIGTERM to the machine's end.
    """
    started = time.monotonic()
    await_step(processes, place)
    trained_until = time.monotonic() + every
    while (left := trained_until - time.monotonic()) > 0:
        check_alive(processes, place)
        time.sleep(min(POLL_SECONDS, left))
    processes[number % WORKERS].send_signal(signal.Signals[strike])
    gone = await_end(processes, grace)
    codes = tuple(process.returncode for process in processes)
    return read_life((place / "life-0").read_text(), started, gone, codes)


def await_step(processes: list[subprocess.Popen[bytes]], place: Path) -> None:
    """Waits until the chief has made its first step."""
    lines = place / "life-0"
    limit = time.monotonic() + START_SECONDS
    while not (lines.exists() and '"step"' in lines.read_text()):
        check_alive(processes, place)
        if time.monotonic() > limit:
            fail(f"no step within {START_SECONDS} s", place)
        time.sleep(POLL_SECONDS)


def check_alive(processes: list[subprocess.Popen[bytes]], place: Path) -> None:
    """Raises an error if a worker has exited before the strike."""
    codes = [process.poll() for process in processes]
    if any(code is not None for code in codes):
        fail(f"ended before the strike: {codes}", place)


def fail(what: str, place: Path) -> None:
    """Raises an error with the last lines of the logs."""
    logs = [(place / f"log-{i}").read_text()[-2000:] for i in range(WORKERS)]
    raise RuntimeError(f"{place.name}: {what}: {logs}")


def await_end(processes: list[subprocess.Popen[bytes]], grace: float) -> float:
    """Waits until all workers have exited, kills late workers, and returns the time.

    Args:
        processes: the workers, one of which was struck just now.
        grace: seconds from now to the machine's end.
    """
    struck = time.monotonic()
    killed = False
    while any(code is None for code in [process.poll() for process in processes]):
        died = any((process.returncode or 0) < 0 for process in processes)
        now = time.monotonic()
        if (died or now - struck > grace) and not killed:
            killed = True
            for process in processes:
                process.kill()
        if now - struck > grace + EXIT_SECONDS:
            raise RuntimeError(f"still running {EXIT_SECONDS} s after a kill")
        time.sleep(POLL_SECONDS / 4)
    return time.monotonic()


def progress(number: int, strike: str, way: str, life: Life) -> None:
    """Prints the progress of a long run on stderr."""
    parts = {name: round(value, 1) for name, value in life.parts().items()}
    last = life.steps[-1].number
    print(
        f"life {number} {strike} {way}: {life.restored} to {last}, {parts}",
        file=sys.stderr,
        flush=True,
    )
