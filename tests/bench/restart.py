"""How long a preempted worker takes back to work, with `--standby` and without.

The demo's program is trained by `tfpreempt run`, one worker, and preempted once. Timed
is from its end, as the supervisor has seen it, to the end of its first resumed step:

    supervise   what the supervisor does between the two
    start       the new process, to the program's first line
    import      tensorflow and all else
    strategy    the MultiWorkerMirroredStrategy, with its server
    build       the data, and the model
    restore     the handler, which restores the commit
    step        the first step; tracing it is most of that

Jobs with and without `--standby` take turns.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.row import compare
from tfpreempt.core.journal import read_journal

PHASES = ("supervise", "start", "import", "strategy", "build", "restore", "step")
ROOT = Path(__file__).parents[2]
BAR = 0.5
TRAINED_STEPS = 20  # before the preemption
LIMIT_SECONDS = 180.0


def rows(rounds: int = 5) -> Iterator[dict[str, Any]]:
    """One row, of both ways in turn.

    Args:
        rounds: preemptions of each.
    """
    found: dict[str, list[list[float]]] = {"standby": [], "cold": []}
    for _, way in itertools.product(range(rounds), found):
        options = ["--standby", "--standby-after=1"] if way == "standby" else []
        found[way].append(preempt_once(options))
    totals = {way: [sum(one) for one in all_] for way, all_ in found.items()}
    yield compare(
        "restart",
        totals["standby"],
        totals["cold"],
        unit="s",
        bar=BAR,
        phases=medians(found["standby"]),
        phases_cold=medians(found["cold"]),
    )


def medians(found: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of each phase."""
    phases = zip(PHASES, zip(*found, strict=True), strict=True)
    return {phase: round(statistics.median(all_), 3) for phase, all_ in phases}


def preempt_once(options: Sequence[str]) -> list[float]:
    """The seconds of each phase, of one job that is preempted once."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        directory = Path(name)
        program = ROOT / "tests" / "bench" / "restart_program.py"
        command = [
            *(sys.executable, "-m", "tfpreempt", "run", "--max-failures=0"),
            *(f"--checkpoint-dir={name}/checkpoints", *options, "--"),
            *(sys.executable, str(program), name, "100000", "1"),
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
        try:
            await_text(supervisor, log, f"step {TRAINED_STEPS}, restart 0")
            if options:
                await_text(supervisor, log, "standby: ready")
            os.kill(record(directory, "started")["pids"][0], signal.SIGTERM)
            await_text(supervisor, log, ", restart 1\n")
        finally:
            supervisor.terminate()
            supervisor.wait()
        marks = (directory / "marks.jsonl").read_text().splitlines()[1]
        ended, began = (
            record(directory, event)["wall"] for event in ("worker_ended", "restarted")
        )
        times = [ended, began, *json.loads(marks)]
    return [b - a for a, b in itertools.pairwise(times)]


def environment() -> dict[str, str]:
    """Of the supervisor, and so of its worker."""
    fixed = {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "GCE_METADATA_IP": "127.0.0.1:9",  # "not Google's cloud", whatever this is
    }
    given = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return {**given, **fixed}


def await_text(supervisor: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Waits until the supervisor, or its worker, has said it."""
    limit = time.monotonic() + LIMIT_SECONDS
    while text not in log.read_text(errors="replace"):
        if supervisor.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"no {text!r}:\n{log.read_text()[-2000:]}")
        time.sleep(0.01)


def record(directory: Path, event: str) -> dict[str, Any]:
    """The first of its kind in the supervisor's journal."""
    records = read_journal(directory / "checkpoints" / "journal")
    return next(each for each in records if each["event"] == event)
