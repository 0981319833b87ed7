"""What one handler makes of its commits."""

from __future__ import annotations

import pathlib
import types

import pytest

from tfpreempt.checkpoint.contents import Staged
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core.cluster import LOCAL
from tfpreempt.core.events import Commit
from tfpreempt.handler.member import Member
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.testing.clock import FakeClock


class Commits:
    """One that commits in two seconds, whatever it is given."""

    token = "token"
    cluster = LOCAL
    mirror = snapshots = candidate = None

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = str(directory)

    def commit(self, staged: Staged, *others: object) -> Commit:
        return Commit(
            step=staged.step,
            path=staged.staging,
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
    """Eight workers wrote a share each; what the commit says is what was measured."""
    deadlines = Deadlines(
        types.SimpleNamespace(),  # type: ignore[arg-type]  # waits for nothing
        FakeClock(),
        30.0,
        lambda: 0.0,
        lambda: None,
        lambda is_told: True,
        8,
    )
    member = Member(
        TerminationConfig(),
        Commits(tmp_path),  # type: ignore[arg-type]
        deadlines,
        types.SimpleNamespace(close=lambda: None),  # type: ignore[arg-type]
    )
    staged = Staged(
        step=1,
        attempt="save-1",
        staging="staged",
        started_at=0.0,
        is_dealt=bool(share),
        share_seconds=share,
    )
    commit = member.commit(staged, "save", range(8))
    assert commit is not None
    assert commit.save_seconds == 2.0
    assert deadlines.save_seconds == pytest.approx(planned)
    assert deadlines.pays_twice(3 * planned)
    assert not deadlines.pays_twice(2.9 * planned)
