"""Makes this process a replay, as `tfpreempt verify --replay` makes the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfpreempt.core import replay


@contextlib.contextmanager
def replaying(run: Path, copy: Path, until: int = 5) -> Iterator[None]:
    """Context manager: this process is a replay of a run, in a copy of its directory.

    Args:
        run: checkpoint directory of the run.
        copy: directory to train in.
        until: number of completed steps after which the program exits.
    """
    steps = replay.Replay(directory=str(run), copy=str(copy), until=until)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in steps.to_environment().items():
            patch.setenv(name, value)
        replay.read_replay.cache_clear()
        try:
            yield
        finally:
            patch.undo()
            replay.read_replay.cache_clear()
