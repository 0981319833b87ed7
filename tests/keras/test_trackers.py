"""A tracker as a callback of both lines of Keras; no mark in the files drops a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.keras.both_lines import LINES
from tests.keras.small_fit import BATCHES, EPOCHS, machine
from tests.test_trackers import steps_in_files
from tfpreempt import trackers
from tfpreempt.checkpoint.restore.handle import checkpoints_in

pytestmark = [pytest.mark.tensorflow]


@LINES
def test_each_epoch_is_logged_once(line: str, tmp_path: Path) -> None:
    with machine(line) as on:
        errors = [RuntimeError("a callback after the tracker")]

        def fail(epoch: int, logs: object = None) -> None:
            if epoch == 2 and errors:
                raise errors.pop()

        def program() -> None:
            tracker = trackers.tensorboard(tmp_path)
            try:
                on.fit(None, tracker, on.callback(on_epoch_end=fail), verbose=1)
            finally:
                tracker.unregister()

        with pytest.raises(RuntimeError):
            on.run(program, ("begin", 1, 2), ("epoch", 1, 0))
        on.run(program)
    [folder] = tmp_path.iterdir()
    found = steps_in_files(folder, drops=False)
    assert found.pop("tfpreempt/goodput") == [EPOCHS * BATCHES]
    ends = [BATCHES * epoch for epoch in range(1, EPOCHS + 1)]
    assert found == {"epoch": ends, "loss": ends, "mae": ends}


@LINES
def test_a_fit_calls_the_server_after_its_last_commit_only(
    line: str, tmp_path: Path
) -> None:
    """The second start has no further step: the first may have been killed before."""
    with machine(line) as on:
        for _ in range(2):
            steps: list[int | None] = []
            tracker = trackers.tensorboard(tmp_path)
            end = tracker._end

            def look(steps: list[int | None] = steps, end: Any = end) -> None:
                steps += [each.step for each in checkpoints_in(str(on.checkpoints))]
                end()

            tracker._end = look  # type: ignore[method-assign]
            on.run(lambda tracker=tracker: on.fit(None, tracker, verbose=1))
            tracker.unregister()
            assert steps[-1:] == [EPOCHS * BATCHES]
    [_] = tmp_path.iterdir()
