"""Measures the resources that a process keeps: over idle steps, and closed handlers.

Steps and handlers are measured in a separate process each, after a warm-up: resident
memory, threads and open descriptors. Threads and descriptors may not grow at all,
memory not with the number of steps.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import alone

ROOT = Path(__file__).parents[1]
STEPS = 10_000_000
HANDLERS = 1_000
WARM_STEPS = 100_000
WARM_HANDLERS = 50
STEPS_BAR_KIB = 256
HANDLER_BAR_KIB = 16.0
"""Allowed growth for each handler. The keys of its start and of its last save (about
500 bytes) stay in the store until the process ends. TensorFlow and the allocator keep
the rest."""

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024
LIMIT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resources of this process.

    Attributes:
        memory_kib: resident memory, in KiB.
        threads: number of Python threads.
        descriptors: number of open files, sockets and pipes.
    """

    memory_kib: float
    threads: int
    descriptors: int

    @staticmethod
    def now() -> Held:
        """Returns the resources after a garbage collection."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return Held(
            memory_kib=resident * PAGE_KIB,
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
        )


def rows(steps: int = STEPS, handlers: int = HANDLERS) -> Iterator[dict[str, Any]]:
    """Yields a row for the steps, and a row for the handlers."""
    for what, count, bar in (
        ("steps", steps, float(STEPS_BAR_KIB)),
        ("handlers", handlers, HANDLER_BAR_KIB * handlers),
    ):
        done = subprocess.run(
            [sys.executable, "-m", __name__, what, str(count)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{what}: the process has failed:\n{done.stderr}")
        yield row(what, count, json.loads(done.stdout.splitlines()[-1]), bar)


def row(what: str, count: int, found: dict[str, Any], bar: float) -> dict[str, Any]:
    """Returns the row of one kind."""
    is_flat = not (found["threads"] or found["descriptors"])
    made = alone("quiet_memory", [found["memory_kib"]], unit="KiB more", bar=bar)
    return {
        **made,
        "ok": is_flat and made["ok"],
        "over": what,
        "count": count,
        "threads_more": found["threads"],
        "descriptors_more": found["descriptors"],
        "seconds": round(found["seconds"], 1),
    }


# --- the process ---------------------------------------------------------------------


def growth(warm_up: Callable[[], None], work: Callable[[], None]) -> dict[str, float]:
    """Returns the growth of the resources during the work, and its duration."""
    warm_up()
    before, began = Held.now(), time.monotonic()
    work()
    seconds, after = time.monotonic() - began, Held.now()
    more = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("memory_kib", "threads", "descriptors")
    }
    return {**more, "seconds": seconds}


def over_steps(directory: str, count: int) -> dict[str, float]:
    """Runs idle steps of one handler."""
    with make_handler(directory) as handler:

        def steps(number: int) -> None:
            for _ in range(number):
                handler.run(noop)

        return growth(lambda: steps(WARM_STEPS), lambda: steps(count))


def over_handlers(directory: str, count: int) -> dict[str, float]:
    """Creates and closes handlers in sequence, each with a step."""

    def handlers(number: int) -> None:
        for _ in range(number):
            with make_handler(directory) as handler:
                handler.run(noop)

    return growth(lambda: handlers(WARM_HANDLERS), lambda: handlers(count))


def make_handler(directory: str) -> Any:
    """Returns a handler for a small state."""
    import tensorflow as tf

    import tfpreempt

    state = tf.train.Checkpoint(v=tf.Variable(0.0))
    return tfpreempt.PreemptionCheckpointHandler(None, state, directory)


def noop() -> None:
    """The step."""


if __name__ == "__main__":
    over = {"steps": over_steps, "handlers": over_handlers}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(over(made, int(sys.argv[2]))))
