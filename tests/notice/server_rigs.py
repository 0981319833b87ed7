"""Rigs of sources that query a metadata server; each rig has its own fake server."""

from __future__ import annotations

import time

import pytest

from tests.notice.rigs import PolledRig, wait_until
from tfpreempt.notice import aws, azure, gce
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import TOPICS, GceWatch
from tfpreempt.notice.source import NoticeSource
from tfpreempt.testing._server import FakeServer
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce

UPCOMING = "instance/upcoming-maintenance"
STOP = "instance/shutdown-details/stop-state"
HANG = 0.02  # the fakes' longest wait, so that a test that settles is quick


QUICK_SECONDS = 0.2


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets deadlines that a test can wait for."""
    monkeypatch.setattr(gce, "PLAIN_SECONDS", QUICK_SECONDS)
    # A hanging GET lasts a second at least, by the client's request to the server.
    monkeypatch.setattr(gce, "HANG_SECONDS", 1)
    monkeypatch.setattr(gce, "HANG_BETWEEN_SINGLES_SECONDS", 1)
    monkeypatch.setattr(gce, "HANG_EXTRA_SECONDS", QUICK_SECONDS)
    monkeypatch.setattr(aws, "REQUEST_SECONDS", QUICK_SECONDS)
    monkeypatch.setattr(azure, "REQUEST_SECONDS", QUICK_SECONDS)
    monkeypatch.setattr(azure, "FIRST_REQUEST_SECONDS", QUICK_SECONDS)


class ServerRig(PolledRig):
    trusts_garbage = False
    fake: FakeServer

    def fail(self) -> None:
        self.fake.fail(1_000_000)

    def break_off(self) -> None:
        """Drops connections rather than answering."""
        self.fake.down()

    def stall(self) -> None:
        """Accepts connections and answers nothing."""
        self.fake.stall()

    def recover(self) -> None:
        self.fake.up()
        self.fake.fail(0)

    def stop(self) -> None:
        self.fake.close()


class GceRig(ServerRig):
    """Watches all topics, and controls one topic."""

    topic: str
    path: str
    up: object
    quiet: object = None  # None: the entry is not there

    def __init__(self) -> None:
        super().__init__()
        self.fake: FakeGce = FakeGce(longest_hang=HANG)

    def make(self) -> NoticeSource:
        watch = GceWatch(url=self.fake.url, wait=self.clock.wait, clock=self.clock)
        return watch.source(self.topic)

    def give(self) -> None:
        self.fake.set(self.path, self.up)

    def garbage(self) -> None:
        self.fake.set(self.path, "\x00\x1b[2J" * 2_000)

    def withdraw(self) -> None:
        if self.quiet is None:
            self.fake.remove(self.path)
        else:
            self.fake.set(self.path, self.quiet)


class GcePreemptedRig(GceRig):
    topic, path = "preempted", "instance/preempted"
    up, quiet = "TRUE", "FALSE"


class GceMaintenanceRig(GceRig):
    topic, path = "maintenance-event", "instance/maintenance-event"
    up, quiet = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"


class GceUpcomingRig(GceRig):
    topic, path = "upcoming-maintenance", UPCOMING
    up = {"maintenance_status": "PENDING", "window_start_time": "2026-11-21T20:00:00Z"}


class GceStopRig(GceRig):
    topic, path = "stop-state", STOP
    up = "PENDING_STOP"


def quiet_gce() -> FakeGce:
    """Returns a server with an entry for each topic, so one open request serves all."""
    server = FakeGce()
    server.set(UPCOMING, {})
    server.set(STOP, "UNSPECIFIED")
    return server


def is_hanging(fake: FakeGce) -> bool:
    return wait_until(lambda: fake.hanging == 1)


class Heard:
    """All topics of a watch, with the notices and times of each topic."""

    def __init__(self, watch: GceWatch, topics: tuple[str, ...] = tuple(TOPICS)):
        self.watch = watch
        self.said: list[tuple[str, str, float]] = []
        self.sources: list[NoticeSource] = [watch.source(topic) for topic in topics]

    def __enter__(self) -> Heard:
        for source in self.sources:
            source.start(self.listener(source.name))
        return self

    def __exit__(self, *error: object) -> None:
        for source in self.sources:
            source.close()

    def listener(self, name: str):  # type: ignore[no-untyped-def]  # a closure
        return lambda detail: self.said.append((name, detail, time.monotonic()))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.said]


class AwsRig(ServerRig):
    """Watches all topics, and controls one topic."""

    topic: str
    path: str
    up: object
    quiet: object = None  # None: 404

    def __init__(self) -> None:
        super().__init__()
        self.fake: FakeAws = FakeAws()

    def make(self) -> NoticeSource:
        watch = aws.AwsWatch(
            aws.TOPICS, url=self.fake.url, wait=self.clock.wait, clock=self.clock
        )
        return watch.source(self.topic)

    def give(self) -> None:
        self.fake.set(self.path, self.up)

    def garbage(self) -> None:
        self.fake.set(self.path, "\x00\x1b[2J" * 2_000)

    def withdraw(self) -> None:
        if self.quiet is None:
            self.fake.remove(self.path)
        else:
            self.fake.set(self.path, self.quiet)


class AwsInterruptionRig(AwsRig):
    topic, path = "spot-interruption", "spot/instance-action"
    up = {"action": "terminate", "time": "2026-11-21T20:00:00Z"}


class AwsRebalanceRig(AwsRig):
    topic, path = "rebalance", "events/recommendations/rebalance"
    up = {"noticeTime": "2026-11-21T20:00:00Z"}


class AwsLifecycleRig(AwsRig):
    topic, path = "lifecycle", "autoscaling/target-lifecycle-state"
    up, quiet = "Terminated", "InService"


class AzureRig(ServerRig):
    def __init__(self) -> None:
        super().__init__()
        self.fake: FakeAzure = FakeAzure()
        self.event = ""

    def make(self) -> NoticeSource:
        return AzureWatch(url=self.fake.url, wait=self.clock.wait).source("Preempt")

    def give(self) -> None:
        self.event = self.fake.schedule()

    def garbage(self) -> None:
        self.fake.set_document("\x00\x1b[2J" * 2_000)

    def recover(self) -> None:
        super().recover()
        self.fake.set_document(None)

    def withdraw(self) -> None:
        self.fake.withdraw(self.event)
