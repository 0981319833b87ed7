"""The functions that make a cloud's notice source for a config's `sources`."""

from __future__ import annotations

import datetime
import os
import signal
import typing
from collections.abc import Callable
from typing import Any

import pytest

from tests.platforms.configs import notices, watched
from tfpreempt import TerminationConfig, notice
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice import aws, azure, cloud_sources, gce
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce

Fake = FakeGce | FakeAws | FakeAzure


@pytest.mark.parametrize(
    ("make", "fake", "give", "name", "grace"),
    [
        (
            lambda: notice.gce_source("preempted", grace_period=30),
            FakeGce,
            FakeGce.preempt,
            "gce:preempted",
            30.0,
        ),
        (
            lambda: notice.aws_source(
                "lifecycle", grace_period=datetime.timedelta(minutes=2)
            ),
            FakeAws,
            lambda fake: fake.set_lifecycle("Terminated"),
            "aws:lifecycle",
            115.0,  # the service is polled every 5 s
        ),
        (
            lambda: notice.azure_source("Terminate"),
            FakeAzure,
            lambda fake: fake.schedule("Terminate"),
            "azure:Terminate",
            None,
        ),
    ],
)
def test_a_source_of_each_cloud_goes_into_a_config(
    make: Callable[[], Any],
    fake: Callable[[], Fake],
    give: Callable[[Any], object],
    name: str,
    grace: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake() as server:
        for variable, value in server.environment().items():
            monkeypatch.setenv(variable, value)
        config = TerminationConfig(signals=(), sources=[make()])
        assert watched(config) == {name: grace}
        give(server)
        for _ in range(2):  # a config may serve several handlers, one after the other
            (told,) = notices(config, lambda: None)
            assert told.source == name
            assert told.grace_seconds == grace


def test_an_upcoming_maintenance_is_a_notice_one_grace_period_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float | None] = []

    class Watch(gce.GceWatch):
        def __init__(
            self, topics: Any, *, maintenance_lead_seconds: float | None
        ) -> None:
            super().__init__(topics)
            seen.append(maintenance_lead_seconds)

    monkeypatch.setattr(cloud_sources, "GceWatch", Watch)
    notice.gce_source("upcoming-maintenance", grace_period=600)
    notice.gce_source("maintenance-event", grace_period=60)
    assert seen == [600.0, None]


@pytest.mark.slow  # a process
def test_a_forked_process_gets_notices_while_its_parent_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """multiprocessing forks workers, and the parent's polling thread is not in them."""
    with FakeGce() as server:
        for variable, value in server.environment().items():
            monkeypatch.setenv(variable, value)
        config = TerminationConfig(
            signals=(), sources=[notice.gce_source("preempted", grace_period=30)]
        )
        (parent,) = config._notice_sources()
        parent.source.start(lambda _: None)
        if (child := os.fork()) == 0:
            code = 1
            try:
                signal.alarm(20)
                code = 0 if len(notices(config, lambda: None)) == 1 else 2
            finally:
                os._exit(code)
        server.preempt()
        _, status = os.waitpid(child, 0)
        parent.source.close()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("gce_source", "preempted"),
        ("aws_source", "lifecycle"),
        ("azure_source", "Freeze"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_source_is_made(
    name: str, topic: str
) -> None:
    with pytest.raises(ConfigurationError, match="expected some of"):
        getattr(notice, name)("nonsense")
    with pytest.raises(ConfigurationError, match="grace_period is -1"):
        getattr(notice, name)(topic, grace_period=-1)


def test_the_types_name_every_topic() -> None:
    assert {*typing.get_args(cloud_sources.GceTopic)} == {*gce.TOPICS}
    assert {*typing.get_args(cloud_sources.AwsTopic)} == {*aws.TOPICS}
    assert typing.get_args(cloud_sources.AzureKind) == azure.KINDS
