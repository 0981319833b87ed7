"""Measures the length of the code path of one real preemption and one real restart.

Two workers train, the first worker receives SIGTERM during a step, and both are
restarted. Rows are of the first worker, for a custom loop and for `model.fit`:

    preemption  from the signal to the end of the process
    restart     from the handler's construction to the end of the first step

The path has each function of the package once, in the order of the first calls;
`functions_without_core` and `files_without_core` leave out the package `core/`, which
every other package uses. `thread_changes` is the number of neighbors in the path that
two threads called. Threads that run at the same time call in a varying order, so a row
is from the round with the median of `thread_changes`; functions and files are the same
in each round. The bench measures the amount of code to read, and no time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.preemption import WORKERS, environment
from benchmarks.tracer import Call, read
from tests.ports import free_ports

ROOT = Path(__file__).parents[1]
KINDS = ("loop", "fit")
CODES = {"preemption": 143, "restart": 0}
LIMIT_SECONDS = 180.0


def rows(
    rounds: int = 5, package: Path = ROOT, route: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind and phase.

    Args:
        rounds: number of preemptions of each kind, each with a restart.
        package: directory of the `tfpreempt` to trace.
        route: file to which the rows are written with their paths; None: no file.
    """
    routes = []
    for kind in KINDS:
        found: dict[str, list[dict[str, Any]]] = {phase: [] for phase in CODES}
        for _ in range(rounds):
            memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.TemporaryDirectory(dir=memory) as root:
                for phase in CODES:
                    calls = trace(kind, phase, package.resolve(), Path(root))
                    found[phase].append(row(kind, phase, calls))
        for each in found.values():
            each.sort(key=lambda row: row["thread_changes"])
            changes = [row["thread_changes"] for row in each]
            middle = {**each[rounds // 2], "thread_changes_all": changes}
            routes.append(middle)
            yield {name: value for name, value in middle.items() if name != "route"}
    if route:
        route.write_text(json.dumps(routes, indent=1) + "\n")


def row(kind: str, phase: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Returns the row of a list of calls."""
    first: dict[tuple[str, str], Call] = {}
    for call in calls:
        first.setdefault((call.file, call.function), call)
    route = list(first.values())
    without_core = [call for call in route if not call.file.startswith("core/")]
    return {
        "bench": "path",
        "kind": kind,
        "phase": phase,
        "functions": len(route),
        "files": len({call.file for call in route}),
        "functions_without_core": len(without_core),
        "files_without_core": len({call.file for call in without_core}),
        "threads": len({call.thread for call in calls}),
        "thread_changes": sum(
            a.thread != b.thread for a, b in itertools.pairwise(route)
        ),
        "calls": len(calls),
        "route": [
            f"{call.name}  {call.file}:{call.line} {call.function}" for call in route
        ],
    }


def trace(kind: str, phase: str, package: Path, root: Path) -> list[Call]:
    """Returns the first worker's calls in one phase; then kills the other processes.

    Calls of the thread that reports the progress are left out.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
        for index in range(WORKERS):
            log = stack.enter_context((root / f"{phase}-log-{index}").open("wb"))
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.path_program"),
                    *(kind, phase if index == 0 else "train"),
                    *(package, root / "state", root / f"{phase}-trace-{index}"),
                ],
                cwd=ROOT,
                env={
                    **environment(addresses, index),
                    "TFPREEMPT_PLATFORM": "generic",  # no server is asked, anywhere
                    "TMPDIR": str(root),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(LIMIT_SECONDS)
    code = processes[0].returncode
    if code != CODES[phase]:
        logs = [(root / f"{phase}-log-{i}").read_text()[-2000:] for i in range(WORKERS)]
        raise RuntimeError(f"{phase} of {kind} left with {code}: {logs}")
    calls = read(root / f"{phase}-trace-0")
    return [call for call in calls if call.name != "tfpreempt-now"]
