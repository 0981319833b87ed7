"""Idle steps use no additional memory, threads or descriptors."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc

import pytest

from tests.handler.program import Program, wait_until

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

STEPS = 20_000
HANDLERS = 15


def noop() -> None:
    """The step."""


def test_quiet_steps_keep_no_memory(program: Program) -> None:
    """A byte for each would be 20 KB; other threads may have allocated some."""
    with program.handler() as handler:

        def steps(count: int) -> None:
            for _ in range(count):
                handler.run(noop)

        steps(1000)
        tracemalloc.start()
        try:
            steps(1000)
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            steps(STEPS)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < STEPS / 4


def test_handlers_leave_no_threads_and_no_descriptors(program: Program) -> None:
    """Each handler watches a signal, and has the lease of its directory."""

    def handlers(count: int) -> None:
        for _ in range(count):
            config = {"signals": ("USR1",), "sources": ()}
            with program.handler(config=config) as handler:
                handler.run(program.step)

    handlers(2)
    threads, descriptors = threading.active_count(), open_descriptors()
    handlers(HANDLERS)
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: open_descriptors() <= descriptors)


def open_descriptors() -> int:
    """Returns the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
