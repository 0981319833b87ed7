"""Events, as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from tfpreempt.core.events import Notice


@pytest.mark.parametrize(
    ("source", "detail", "origin"),
    [
        ("signal:SIGTERM", "SIGTERM", "signal:SIGTERM"),
        ("file:/run/stop", "", "file:/run/stop"),
        ("gce", "TERMINATE_ON_HOST_MAINTENANCE", "gce (TERMINATE_ON_HOST_MAINTENANCE)"),
        ("mine", ["of any", "type"], "mine (['of any', 'type'])"),
    ],
)
def test_the_origin_of_a_notice_repeats_nothing(
    source: str, detail: Any, origin: str
) -> None:
    notice = Notice(
        source=source, worker=0, grace_seconds=None, received_at=0.0, detail=detail
    )
    assert notice.origin == origin
