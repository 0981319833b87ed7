"""Measures the cost of snapshots in memory, and the steps that they save after SIGKILL.

`cost` is the part of the time that snapshots take from steps that wait for a device, as
on an accelerator: the stall of training, and the slowdown of the steps until a snapshot
is written, divided by the time to the next snapshot. `intervals` are these times. The
first two snapshots of each process are not counted, because the second snapshot always
follows soon.

`lost steps` are the steps that a worker under `tfpreempt run` repeats after SIGKILL at
a random moment, with snapshots, and with periodic commits alone.

Rounds are interleaved.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import alone, compare
from tests.journals import read_journal
from tfpreempt.core.snapshot_memory import VARIABLES, SnapshotMemory

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 180.0
COST_BAR = 1.0  # percent
LOST_BAR = 0.5
STEP_SECONDS = 0.02
KILLED_WITHIN = 8.0, 30.0  # seconds of training
COMMIT_SECONDS = 60.0  # between two commits; network file systems are slow


def rows(
    rounds: int = 5, mebibytes: int = 512, seconds: float = 120.0
) -> Iterator[dict[str, Any]]:
    """Yields a row of the cost, and a row of the lost steps.

    Args:
        rounds: number of rounds of each row.
        mebibytes: size of the state.
        seconds: seconds of training in each round of the first row.
    """
    yield cost(rounds, mebibytes, seconds)
    yield lost(rounds, mebibytes)


def cost(rounds: int, mebibytes: int, seconds: float) -> dict[str, Any]:
    """Returns the row of the cost of snapshots."""
    shares: list[float] = []
    intervals: list[float] = []
    for _ in range(rounds):
        for share, interval in train(mebibytes, seconds):
            shares.append(share)
            intervals.append(interval)
    return alone(
        "snapshot",
        shares,
        unit="%",
        bar=COST_BAR,
        of="cost",
        mebibytes=mebibytes,
        step_seconds=STEP_SECONDS,
        intervals=[round(each, 1) for each in intervals],
    )


def train(mebibytes: int, seconds: float) -> list[tuple[float, float]]:
    """Returns the cost of each snapshot, in percent of the time to the next snapshot.

    The cost is the additional time of all steps from the beginning of a snapshot to the
    end of the first step after the snapshot was written.

    Returns:
        The shares, and the seconds to the next snapshot; without the first two
        snapshots.
    """
    import tensorflow as tf

    from tests.fakes.process import new_process
    from tfpreempt import PreemptionCheckpointHandler, TerminationConfig
    from tfpreempt.handler.snapshots import Snapshots

    root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir="/dev/shm"))
    memory = SnapshotMemory(directory=str(root / "memory"), bytes=1 << 50)
    os.mkdir(memory.directory)
    counter = tf.Variable(0.0)
    state = [tf.Variable(tf.zeros([mebibytes << 15])) for _ in range(8)]
    begun, ended, steps = [], [], []
    capture, complete = Snapshots.capture, Snapshots._complete

    def seen_capture(*args: Any) -> None:
        begun.append(time.perf_counter())
        capture(*args)

    def seen_complete(*args: Any) -> None:
        complete(*args)
        ended.append(time.perf_counter())

    def step() -> None:
        time.sleep(STEP_SECONDS)
        counter.assign_add(1.0)

    Snapshots.capture = seen_capture  # type: ignore[method-assign]
    Snapshots._complete = seen_complete  # type: ignore[method-assign]
    try:
        with new_process(), told(memory):
            handler = PreemptionCheckpointHandler(
                None,
                tf.train.Checkpoint(state=state, counter=counter),
                root / "checkpoints",
                TerminationConfig(signals=()),
            )
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                handler.run(step)
                steps.append(time.perf_counter())
    finally:
        Snapshots.capture = capture  # type: ignore[method-assign]
        Snapshots._complete = complete  # type: ignore[method-assign]
        shutil.rmtree(root)
    return shares(begun, ended, steps)


def shares(
    begun: list[float], ended: list[float], steps: list[float]
) -> list[tuple[float, float]]:
    """See `train`.

    Args:
        begun: start times of the snapshots.
        ended: times at which the snapshots were written.
        steps: end times of the steps.
    """
    found = []
    for start, written, following in list(zip(begun, ended, begun[1:], strict=False))[
        2:
    ]:
        first = bisect.bisect_left(steps, start)  # during which the snapshot began
        last = min(bisect.bisect_left(steps, written), len(steps) - 1)
        quiet = [b - a for a, b in itertools.pairwise(steps[last:]) if b < following]
        if not first or not quiet:
            continue
        usual = statistics.median(quiet)
        lost = steps[last] - steps[first - 1] - (last - first + 1) * usual
        interval = following - start
        found.append((100 * lost / interval, interval))
    return found


@contextlib.contextmanager
def told(memory: SnapshotMemory | None) -> Iterator[None]:
    """Context manager: gives this process memory for snapshots, or no memory."""
    before = {name: os.environ.pop(name, None) for name in VARIABLES}
    os.environ.update(memory.to_environment() if memory else {})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def lost(rounds: int, mebibytes: int) -> dict[str, Any]:
    """Returns the row of the steps lost by SIGKILL, with and without snapshots."""
    found: dict[str, list[float]] = {"auto": [], "off": []}
    tiers: list[str] = []
    for _ in range(rounds):
        after = random.uniform(*KILLED_WITHIN)
        for way in found:
            steps, tier = kill(mebibytes, way, after)
            found[way].append(steps)
            tiers += [tier] if way == "auto" else []
    return compare(
        "snapshot",
        found["auto"],
        found["off"],
        unit="steps",
        bar=LOST_BAR,
        of="lost steps",
        digits=0,
        mebibytes=mebibytes,
        step_seconds=STEP_SECONDS,
        commit_seconds=COMMIT_SECONDS,
        lost_seconds=round(statistics.median(found["auto"]) * STEP_SECONDS, 1),
        tiers=tiers,
    )


def kill(mebibytes: int, way: str, after: float) -> tuple[int, str]:
    """Kills a worker once.

    Returns:
        The number of lost steps, and the source of the next process's state.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        program = ROOT / "benchmarks" / "snapshot_program.py"
        command = [
            *(sys.executable, "-m", "tfpreempt", "run", "--backoff=0"),
            *(f"--snapshots={way}", f"--checkpoint-dir={name}/checkpoints", "--"),
            *(sys.executable, str(program), f"{mebibytes}", f"{STEP_SECONDS}"),
            f"{COMMIT_SECONDS}",
        ]
        log = directory / "log"
        with log.open("wb") as output:
            supervisor = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        journal = directory / "checkpoints" / "journal"
        try:
            await_text(supervisor, log, "step 1\n")
            time.sleep(after)
            started = [r for r in read_journal(journal) if r["event"] == "started"]
            os.kill(started[0]["pids"][0], signal.SIGKILL)
            await_text(supervisor, log, "begins, restart 1")
        finally:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
        text = log.read_text(errors="replace")
        before = text[: text.index("begins, restart 1")].splitlines()
        made = [int(line.split()[-1]) for line in before if "] step " in line]
        restored = [r for r in read_journal(journal) if r["event"] == "restored"][-1]
        return made[-1] - int(restored["step"]), restored["tier"] or "nothing"


def environment() -> dict[str, str]:
    """Returns the environment of the supervisor, and so of its worker."""
    fixed = {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "GCE_METADATA_IP": "127.0.0.1:9",  # no metadata server, on any machine
    }
    given = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return {**given, **fixed}


def await_text(supervisor: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Waits until the log of the supervisor and its worker contains the text."""
    limit = time.monotonic() + LIMIT_SECONDS
    while text not in log.read_text(errors="replace"):
        if supervisor.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"no {text!r}:\n{log.read_text()[-2000:]}")
        time.sleep(0.01)
