"""What is known of remote workers without any."""

from __future__ import annotations

import math
import time

import pytest

from tfpreempt.core.deadline import LATE
from tfpreempt.core.events import Notice
from tfpreempt.handler import remote_cluster


@pytest.mark.parametrize(
    ("ago", "grace", "is_expected"),
    [
        (0.0, None, True),
        (LATE - 60, None, True),
        (LATE + 60, None, False),
        (LATE + 60, 3600.0, True),  # it has an hour
    ],
)
def test_a_worker_is_expected_to_go_for_a_time(
    ago: float, grace: float | None, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cluster, "_expected_until", -math.inf)
    assert not remote_cluster.is_expected_to_go()
    remote_cluster.expect_to_go(
        Notice(
            source="test",
            worker=0,
            grace_seconds=grace,
            received_at=time.monotonic() - ago,
            detail="",
        )
    )
    assert remote_cluster.is_expected_to_go() is is_expected
