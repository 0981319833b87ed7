"""Meaning of the entries of GCE's metadata server, and of missing entries."""

from __future__ import annotations

import pytest

from tfpreempt import errors
from tfpreempt.notice.gce import pick, read_upcoming_maintenance

BEGINS = 1_795_309_200.0
WINDOW = {
    "window_start_time": "2026-11-22T01:00:00Z",
    "window_end_time": "2026-11-22T02:00:00Z",
}


@pytest.mark.parametrize(
    "value",
    [
        {},
        "NONE",
        None,
        "",
        {"error": {"code": 404, "message": "no maintenance"}},
        {"maintenanceStatus": "", "windowStartTime": ""},
        {"maintenanceStatus": "UNKNOWN"},
    ],
)
def test_upcoming_maintenance_may_contain_no_notice(value: object) -> None:
    assert read_upcoming_maintenance(value, 0.0) is None


@pytest.mark.parametrize(
    "value",
    [
        {"maintenance_status": "PENDING", "window_start_time": "2026-11-22T01:00:00Z"},
        {"maintenanceStatus": "PENDING", "windowStartTime": "2026-11-22T01:00:00Z"},
        {"maintenanceStatus": "UNKNOWN", "windowStartTime": "2026-11-22T01:00:00Z"},
        {"windowStartTime": "2026-11-22T01:00:00Z"},
        WINDOW,
    ],
)
def test_a_maintenance_has_its_start_time(value: object) -> None:
    told = read_upcoming_maintenance(value, BEGINS - 7 * 86400)
    assert told is not None
    assert "2026-11-22T01:00:00Z" in told.detail
    assert told.shutdown_at == BEGINS


def test_a_maintenance_that_runs_begins_now() -> None:
    told = read_upcoming_maintenance({"maintenance_status": "ONGOING", **WINDOW}, 7.0)
    assert told is not None
    assert told.shutdown_at == 7.0


@pytest.mark.parametrize("status", ["PENDING", "ONGOING", "UNKNOWN", ""])
def test_a_maintenance_whose_window_is_over_is_no_notice(status: str) -> None:
    value = {"maintenance_status": status, **WINDOW}
    assert read_upcoming_maintenance(value, BEGINS + 3599) is not None
    assert read_upcoming_maintenance(value, BEGINS + 3600) is None


@pytest.mark.parametrize("status", ["COMPLETED", "CANCELLED"])
def test_a_canceled_maintenance_is_no_notice(status: str) -> None:
    value = {"maintenance_status": status, **WINDOW}
    assert read_upcoming_maintenance(value, BEGINS - 60) is None


def test_a_maintenance_without_status_and_end_is_over_once_it_began() -> None:
    value = {"windowStartTime": "2026-11-22T01:00:00Z"}
    assert read_upcoming_maintenance(value, BEGINS + 1) is None
    assert read_upcoming_maintenance({"maintenanceStatus": "PENDING", **value}, BEGINS)


def test_an_unknown_status_is_an_error() -> None:
    value = {"maintenance_status": "A_STATE_OF_NEXT_YEAR", **WINDOW}
    with pytest.raises(errors.NoticeError, match="expected one of"):
        read_upcoming_maintenance(value, BEGINS - 60)


def test_pick_finds_either_spelling() -> None:
    assert pick({"shutdownDetails": {"stopState": "X"}}, "shutdown-details/stop-state")
    assert pick({"shutdown-details": 1}, "shutdown-details/stop-state") is not None
