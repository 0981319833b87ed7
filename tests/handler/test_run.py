"""The commits of one run."""

from __future__ import annotations

import pathlib
import types

import pytest

from tests.checkpoint.fakes import open_directory
from tests.fakes.clock import FakeClock
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core.events import Commit
from tfpreempt.handler.restore_agreement import Agreed
from tfpreempt.handler.run import Run
from tfpreempt.platforms.config import TerminationConfig


class InTwoSeconds(Save):
    """A save that commits in two seconds."""

    def publish(self, *_: object, **__: object) -> Commit:
        return Commit(
            step=self.step,
            path=self.staging,
            sequence=1,
            world_size=8,
            save_seconds=2.0,
            bytes=0,
            because="save",
        )


@pytest.mark.parametrize(("share", "planned"), [(0.0, 2.0), (1.5, 12.5), (0.1, 2.7)])
def test_the_next_save_is_planned_as_one_that_the_chief_makes_alone(
    tmp_path: pathlib.Path, share: float, planned: float
) -> None:
    """Eight workers wrote a share each; the commit records the measured duration."""
    deadlines = Deadlines(
        types.SimpleNamespace(),  # type: ignore[arg-type]  # waits for nothing
        FakeClock(),
        30.0,
        lambda: 0.0,
        lambda: None,
        lambda is_told: True,
        8,
    )
    directory = open_directory(tmp_path)
    run = Run(
        TerminationConfig(),
        Agreed(directory=directory, candidate=None, token="token"),
        deadlines,
        types.SimpleNamespace(close=lambda: None),  # type: ignore[arg-type]
    )
    save = InTwoSeconds(directory, 1, "save-1")
    save.is_dealt, save.share_seconds = bool(share), share
    commit = run.commit(save, "save", range(8))
    assert commit is not None
    assert commit.save_seconds == 2.0
    assert deadlines.save_seconds == pytest.approx(planned)
    assert deadlines.second_commit_is_worthwhile(3 * planned)
    assert not deadlines.second_commit_is_worthwhile(2.9 * planned)
