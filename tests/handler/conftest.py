"""One program for each test. TensorFlow is imported with the first program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.process import new_process

if TYPE_CHECKING:
    from tests.handler.program import Program


NEED_NO_TENSORFLOW = {
    "test_bad_steps_in_loops.py",
    "test_bad_variables_in_loops.py",
    "test_collective_save.py",
    "test_early_notice_processes.py",
    "test_memory_agreement.py",
    "test_session.py",
    "test_snapshot_crashes.py",
    "test_snapshot_interval.py",
    "test_snapshot_rounds.py",
    "test_snapshot_scheduler.py",
    "test_status_file.py",
    "test_step_timer.py",
    "test_unsaved_jax.py",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores tests that `make test-fast` does not run, to save their imports."""
    if collection_path.suffix != ".py" or collection_path.name in NEED_NO_TENSORFLOW:
        return None
    return "not tensorflow" in config.option.markexpr or None


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A program that was just started."""
    from tests.handler.program import Program

    with new_process():
        yield Program(tmp_path / "ckpt")
