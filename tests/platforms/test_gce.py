"""The variants of Google Compute Engine, on its fake metadata server."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.platforms.configs import left_with, notices, watched
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.platforms.gce import (
    GceCpuTerminationConfig,
    GceGpuTerminationConfig,
    GceSpotTerminationConfig,
    GceTpuTerminationConfig,
)
from tfpreempt.testing.metadata import FakeGce

GCE: list[type[TerminationConfig]] = [
    GceCpuTerminationConfig,
    GceGpuTerminationConfig,
    GceSpotTerminationConfig,
    GceTpuTerminationConfig,
]


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGce]:
    with FakeGce() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.mark.parametrize(
    ("variant", "maintenance"),
    [
        (GceCpuTerminationConfig, 60.0),
        (GceGpuTerminationConfig, 3600.0),
        (GceTpuTerminationConfig, 60.0),
        (GceSpotTerminationConfig, None),
    ],
)
def test_gce_variants_differ_in_maintenance(
    variant: type[TerminationConfig], maintenance: float | None
) -> None:
    expected = {"signal:SIGTERM": 30.0, "gce:preempted": 30.0}
    if maintenance is not None:
        expected["gce:maintenance-event"] = maintenance
    assert watched(variant()) == expected
    assert left_with(variant()) == 143


@pytest.mark.parametrize("variant", GCE)
def test_gce_has_a_grace_for_each_topic(variant: Any) -> None:
    config = variant(
        grace_period=120,
        maintenance_grace_period=0,
        graceful_shutdown_period=600,
        upcoming_maintenance_period=300,
    )
    # The longer notice of a preemption comes from the metadata server alone.
    assert watched(config) == {
        "signal:SIGTERM": 30.0,
        "gce:preempted": 120.0,
        "gce:maintenance-event": None,
        "gce:stop-state": 595.0,  # it may be seen so late
        "gce:upcoming-maintenance": 300.0,
    }


@pytest.mark.parametrize("grace", [None, 0])
def test_gce_without_a_known_grace_period(grace: float | None) -> None:
    config = GceSpotTerminationConfig(grace_period=grace)
    assert watched(config) == {"signal:SIGTERM": None, "gce:preempted": None}


def test_a_short_notice_shortens_that_of_sigterm() -> None:
    config = GceSpotTerminationConfig(grace_period=15)
    assert watched(config) == {"signal:SIGTERM": 15.0, "gce:preempted": 15.0}


@pytest.mark.parametrize(
    "name",
    [
        "maintenance_grace_period",
        "graceful_shutdown_period",
        "upcoming_maintenance_period",
    ],
)
def test_gce_names_a_grace_that_cannot_be(name: str) -> None:
    arguments: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigurationError, match=f"{name} is -1"):
        GceCpuTerminationConfig(**arguments)


@pytest.mark.parametrize("period", [0, 0.0, datetime.timedelta(0)])
def test_gce_refuses_to_leave_as_soon_as_a_maintenance_is_announced(
    period: float | datetime.timedelta,
) -> None:
    """Up to seven days ahead."""
    with pytest.raises(ConfigurationError, match="upcoming_maintenance_period is"):
        GceTpuTerminationConfig(upcoming_maintenance_period=period)


def test_gce_hears_of_a_preemption(gce: FakeGce) -> None:
    config = GceSpotTerminationConfig(grace_period=120)
    (notice,) = notices(config, gce.preempt)
    assert (notice.source, notice.grace_seconds) == ("gce:preempted", 120.0)


def test_gce_hears_of_a_maintenance(gce: FakeGce) -> None:
    def give() -> None:
        event = "TERMINATE_ON_HOST_MAINTENANCE"
        gce.set("instance/maintenance-event", event)

    (notice,) = notices(GceGpuTerminationConfig(), give)
    assert (notice.source, notice.grace_seconds) == ("gce:maintenance-event", 3600.0)


def test_the_topics_of_gce_share_one_connection(gce: FakeGce) -> None:
    config = GceGpuTerminationConfig(graceful_shutdown_period=60)
    notices(config, gce.preempt)
    watcher = Watcher(config._notice_sources(), 0, lambda notice: None)
    watcher.start()
    started = [each.name for each in threading.enumerate()]
    watcher.close()
    assert started.count("tfpreempt-gce") == 1
