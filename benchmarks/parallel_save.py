"""Compares a save with shares of all workers with a save by the chief alone.

The two workers run on this machine, and share its processors and its disk, so several
writers gain little. The sides take turns in one training. The times are those of
`save()` on the chief: from the boundary at which all workers wait to the commit.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.preemption import ROOT, WORKERS, environment
from benchmarks.row import MEMORY, compare, file_system
from benchmarks.states import FEW, MANY, MODELS, SOME
from tests.ports import free_ports

BAR = 1.1
LIMIT = 600.0


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields a row for each state in memory, and a row for the disk.

    Args:
        rounds: number of saves of each side.
        mebibytes: size of a state of tensors.
    """
    in_memory = [(MEMORY, state) for state in (FEW, SOME, MANY, *MODELS)]
    for place, state in (*in_memory, (None, FEW)):
        root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=place))
        try:
            kind = file_system(root)
            found = measure(root, rounds, mebibytes, state)
        finally:
            shutil.rmtree(root)
        yield compare(
            "parallel_save",
            found["seconds"]["all"],
            found["seconds"]["chief"],
            unit="s",
            bar=BAR,
            place=kind,
            state=state,
            mebibytes=found["mebibytes"],
            tensors=found["tensors"],
            workers=WORKERS,
        )


def measure(root: Path, rounds: int, mebibytes: int, state: str) -> dict[str, Any]:
    """Returns the report of `parallel_program`."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
    report = root / "report"
    arguments = [root / "state", state, mebibytes, rounds, report]
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(WORKERS):
            log = stack.enter_context((root / f"log-{index}").open("wb"))
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.parallel_program"),
                    *map(str, arguments),
                ],
                cwd=ROOT,
                env=environment(addresses, index),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(LIMIT) for process in processes]
        if any(codes):
            raise RuntimeError((root / "log-0").read_text()[-4000:])
    found: dict[str, Any] = json.loads(report.read_text())
    return found
