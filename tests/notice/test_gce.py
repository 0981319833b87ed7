"""The sources of Google Compute Engine, against a server with its traps."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.notice.rigs import wait_until
from tfpreempt import errors
from tfpreempt.notice._gce_topics import TOPICS, pick, read_upcoming_maintenance
from tfpreempt.notice.gce import GceWatch, is_excluded, metadata_url
from tfpreempt.notice.source import NoticeSource
from tfpreempt.testing.clock import FakeClock
from tfpreempt.testing.metadata import FakeGce, Reply, Request
from tfpreempt.testing.metadata._server import FakeServer

UPCOMING = "instance/upcoming-maintenance"
STOP = "instance/shutdown-details/stop-state"
PENDING = {"maintenance_status": "PENDING", "maintenance_type": "SCHEDULED"}


@pytest.fixture
def fake() -> Iterator[FakeGce]:
    with FakeGce() as server:
        # All topics are there, so one hanging GET carries them all.
        server.set(UPCOMING, {})
        server.set(STOP, "UNSPECIFIED")
        yield server


class Heard:
    """All topics of a watch, and what each has said, with the time."""

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


def is_hanging(fake: FakeGce) -> bool:
    return wait_until(lambda: fake.hanging == 1)


def gce_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "tfpreempt-gce" in each.name]


def test_every_topic_is_seen_at_once_by_one_thread(fake: FakeGce) -> None:
    changes: list[tuple[str, object]] = [
        ("instance/preempted", "TRUE"),
        ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
        (UPCOMING, PENDING),
        (STOP, "PENDING_STOP"),
    ]
    with Heard(GceWatch(url=fake.url)) as heard:
        for number, (path, value) in enumerate(changes, start=1):
            assert is_hanging(fake)
            changed = time.monotonic()
            fake.set(path, value)
            assert wait_until(lambda number=number: len(heard.said) == number)
            assert heard.said[-1][2] - changed < 0.2
        assert len(gce_threads()) == 1
    assert heard.names == [
        "gce:preempted",
        "gce:maintenance-event",
        "gce:upcoming-maintenance",
        "gce:stop-state",
    ]
    assert heard.said[0][1] == "preempted is TRUE"
    assert gce_threads() == []


def test_while_all_is_quiet_one_request_waits(fake: FakeGce) -> None:
    with Heard(GceWatch(url=fake.url)) as heard:
        assert is_hanging(fake)
        asked = len(fake.requests)
        assert asked == 2  # what is there, then the wait for a change of it
        waiting = fake.requests[-1].query
        fake.set("instance/attributes/colour", "blue")
        assert wait_until(lambda: len(fake.requests) == asked + 1)
        assert is_hanging(fake)
        assert heard.said == []
    assert waiting["wait_for_change"] == "true"
    assert waiting["timeout_sec"] == "60"
    assert waiting["last_etag"]
    assert fake.requests[-1].query["last_etag"] != waiting["last_etag"]


def test_closing_while_it_hangs_is_quick(fake: FakeGce) -> None:
    with Heard(GceWatch(url=fake.url)):
        assert is_hanging(fake)
        began = time.monotonic()
    assert time.monotonic() - began < 0.5


def test_one_topic_alone_is_asked_for_alone(fake: FakeGce) -> None:
    watch = GceWatch(["preempted"], url=fake.url)
    with Heard(watch, ("preempted",)) as heard:
        assert is_hanging(fake)
        fake.preempt()
        assert wait_until(lambda: heard.names == ["gce:preempted"])
    paths = {request.path for request in fake.requests}
    assert paths == {"/computeMetadata/v1/instance/preempted"}


def test_a_late_source_hears_of_a_notice_that_is_up(fake: FakeGce) -> None:
    watch = GceWatch(url=fake.url)
    with Heard(watch, ("maintenance-event",)):
        assert is_hanging(fake)
        fake.preempt()
        assert wait_until(lambda: len(fake.requests) == 3)
        assert is_hanging(fake)
        with Heard(watch, ("preempted",)) as late:
            assert late.names == ["gce:preempted"]
        assert len(gce_threads()) == 1
    assert gce_threads() == []


def test_two_sources_of_one_topic_hear_the_same(fake: FakeGce) -> None:
    with Heard(GceWatch(url=fake.url), ("preempted", "preempted")) as heard:
        assert is_hanging(fake)
        fake.preempt()
        assert wait_until(lambda: len(heard.said) == 2)
    assert heard.names == ["gce:preempted"] * 2


def test_a_maintenance_is_a_notice_when_its_lead_is_reached() -> None:
    clock = FakeClock(wall=1_795_305_000.0)  # 70 min before
    with FakeGce(longest_hang=0.02) as fake:
        fake.set(UPCOMING, {**PENDING, "window_start_time": "2026-11-22T01:00:00Z"})
        watch = GceWatch(
            url=fake.url, wait=clock.wait, clock=clock, maintenance_lead_seconds=3600
        )
        with Heard(watch) as heard:
            for seconds, expected in [(60.0, 0), (60.0, 0), (600.0, 1), (60.0, 1)]:
                clock.wait_for_waiters()
                clock.advance(seconds)
                clock.wait_for_waiters()
                assert len(heard.said) == expected


def test_no_get_hangs_past_the_time_of_an_announced_notice() -> None:
    clock = FakeClock(wall=BEGINS - 67.5)
    with FakeGce(longest_hang=0.02) as fake:
        fake.set(UPCOMING, {**PENDING, **WINDOW})
        fake.set(STOP, "UNSPECIFIED")
        watch = GceWatch(
            url=fake.url, wait=clock.wait, clock=clock, maintenance_lead_seconds=60
        )
        with Heard(watch) as heard:
            for seconds, asked in [(0.1, "8"), (6.0, "8"), (1.0, "2"), (1.0, "1")]:
                assert heard.said == []
                clock.wait_for_waiters()
                clock.advance(seconds)
                clock.wait_for_waiters()
                assert fake.requests[-1].query["timeout_sec"] == asked
            assert heard.names == ["gce:upcoming-maintenance"]
            clock.advance(1.0)
            clock.wait_for_waiters()
            assert fake.requests[-1].query["timeout_sec"] == "60"


def test_a_watch_can_be_used_again(fake: FakeGce) -> None:
    watch = GceWatch(url=fake.url)
    for requests in (2, 4):
        with Heard(watch, ("preempted",)):
            assert wait_until(lambda requests=requests: len(fake.requests) == requests)
        assert gce_threads() == []


def test_a_migration_is_no_end(fake: FakeGce) -> None:
    with Heard(GceWatch(url=fake.url)) as heard:
        for value in ("MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"):
            assert is_hanging(fake)
            asked = len(fake.requests)
            fake.set("instance/maintenance-event", value)
            assert wait_until(lambda asked=asked: len(fake.requests) > asked)
        assert wait_until(lambda: heard.names == ["gce:maintenance-event"])
        assert "TERMINATE" in heard.said[0][1]


def test_an_entry_that_the_directory_does_not_carry_is_asked_for() -> None:
    clock = FakeClock()
    with FakeGce(longest_hang=0.02) as fake:
        watch = GceWatch(url=fake.url, wait=clock.wait, clock=clock)
        with Heard(watch) as heard:
            clock.wait_for_waiters()
            clock.advance(1.0)
            clock.wait_for_waiters()
            assert heard.said == []
        waits = [each for each in fake.requests if "wait_for_change" in each.query]
        assert waits[0].query["timeout_sec"] == "5"
        singles = {each.path for each in fake.requests if "stop-state" in each.path}
        assert singles == {"/computeMetadata/v1/instance/shutdown-details/stop-state"}


def test_a_hidden_directory_leaves_the_first_topic_and_polls() -> None:
    with (
        FakeGce(hides_directory=True) as fake,
        Heard(GceWatch(url=fake.url)) as heard,
    ):
        assert is_hanging(fake)
        fake.preempt()
        assert wait_until(lambda: heard.names == ["gce:preempted"])
        assert heard.said[0][1] == "preempted is TRUE"


@pytest.mark.parametrize("hides_directory", [False, True])
@pytest.mark.parametrize("name", ["preempted", "maintenance-event"])
def test_an_entry_that_is_hidden_is_a_fault_of_its_own(
    name: str, hides_directory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every machine has these two; without them nothing would ever be heard."""
    clock, path = FakeClock(), f"instance/{name}"
    with FakeGce(longest_hang=0.02, hides_directory=hides_directory) as fake:

        def look() -> list[str]:
            clock.wait_for_waiters()
            clock.advance(5.0)
            clock.wait_for_waiters()
            return [record.getMessage() for record in caplog.records]

        watch = GceWatch(url=fake.url, wait=clock.wait, clock=clock)
        with Heard(watch) as heard:
            assert look() == []
            fake.remove(path)
            for _ in range(3):
                (told,) = look()
            assert f"gce:{name} failed" in told
            assert "status 404" in told
            assert "let it through" in told
            fake.set(STOP, "PENDING_STOP")
            look()
            assert heard.names == ["gce:stop-state"]
            fake.set(path, "NONE")
            assert f"gce:{name} works again" in look()[-1]


def test_names_with_dashes_are_read_too() -> None:
    with FakeGce(is_camel_case=False) as fake:
        fake.set("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        with Heard(GceWatch(url=fake.url)) as heard:
            assert wait_until(lambda: heard.names == ["gce:maintenance-event"])


def test_a_plain_word_without_an_etag_is_read_and_polled() -> None:
    class Plain(FakeServer):
        def answer(self, request: Request) -> Reply:
            words = [b"FALSE\n", b"TRUE\n"]
            said = words[min(len(self.requests) - 1, 1)]
            return Reply(body=said, headers={"Metadata-Flavor": "Google"})

    clock = FakeClock()
    with Plain() as fake:
        watch = GceWatch(["preempted"], url=fake.url, wait=clock.wait, clock=clock)
        with Heard(watch, ("preempted",)) as heard:
            clock.wait_for_waiters()
            assert heard.said == []
            clock.advance(1.0)
            clock.wait_for_waiters()
            assert heard.names == ["gce:preempted"]


def test_an_etag_that_comes_back_is_no_news(fake: FakeGce) -> None:
    """Etags are hashes of the content: A, B, A has the first etag again."""
    with Heard(GceWatch(url=fake.url)) as heard:
        for value, expected in [("TRUE", 1), ("FALSE", 1), ("TRUE", 2)]:
            assert is_hanging(fake)
            asked = len(fake.requests)
            fake.set("instance/preempted", value)
            assert wait_until(lambda asked=asked: len(fake.requests) > asked)
            assert is_hanging(fake)
            assert len(heard.said) == expected


def test_a_short_burst_of_503_costs_less_than_a_second(
    fake: FakeGce, caplog: pytest.LogCaptureFixture
) -> None:
    with Heard(GceWatch(url=fake.url)) as heard:
        assert is_hanging(fake)
        fake.fail(2)
        began = time.monotonic()
        fake.preempt()  # this answer was under way, the next two fail
        assert wait_until(lambda: len(heard.said) == 1)
        assert is_hanging(fake)
        assert time.monotonic() - began < 1.0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "status 503, expected 200" in told[0]
    assert "works again" in told[1]


def test_a_change_during_a_failure_is_seen(fake: FakeGce) -> None:
    with Heard(GceWatch(url=fake.url)) as heard:
        assert is_hanging(fake)
        fake.down()
        fake.preempt()
        fake.up()
        assert wait_until(lambda: heard.names == ["gce:preempted"])


def test_one_topic_that_is_unreadable_leaves_the_others_alone(
    fake: FakeGce, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set(STOP, "A_STATE_OF_NEXT_YEAR")
    with Heard(GceWatch(url=fake.url)) as heard:
        for value in ("TRUE", "FALSE", "TRUE"):
            assert is_hanging(fake)
            asked = len(fake.requests)
            fake.set("instance/preempted", value)
            assert wait_until(lambda asked=asked: len(fake.requests) > asked)
        assert wait_until(lambda: heard.names == ["gce:preempted"] * 2)
    assert len(caplog.records) == 1
    assert "gce:stop-state" in caplog.records[0].getMessage()
    assert "A_STATE_OF_NEXT_YEAR" in caplog.records[0].getMessage()


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
def test_upcoming_maintenance_says_nothing_in_many_ways(value: object) -> None:
    assert read_upcoming_maintenance(value, 0.0) is None


BEGINS = 1_795_309_200.0
WINDOW = {
    "window_start_time": "2026-11-22T01:00:00Z",
    "window_end_time": "2026-11-22T02:00:00Z",
}


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
def test_a_maintenance_says_when_it_begins(value: object) -> None:
    told = read_upcoming_maintenance(value, BEGINS - 7 * 86400)
    assert told is not None
    assert "2026-11-22T01:00:00Z" in told.detail
    assert told.goes_at == BEGINS


def test_a_maintenance_that_runs_begins_now() -> None:
    told = read_upcoming_maintenance({"maintenance_status": "ONGOING", **WINDOW}, 7.0)
    assert told is not None
    assert told.goes_at == 7.0


@pytest.mark.parametrize("status", ["PENDING", "ONGOING", "UNKNOWN", ""])
def test_a_maintenance_whose_window_is_over_is_no_notice(status: str) -> None:
    value = {"maintenance_status": status, **WINDOW}
    assert read_upcoming_maintenance(value, BEGINS + 3599) is not None
    assert read_upcoming_maintenance(value, BEGINS + 3600) is None


@pytest.mark.parametrize("status", ["COMPLETED", "CANCELLED"])
def test_a_maintenance_that_does_not_come_is_no_notice(status: str) -> None:
    value = {"maintenance_status": status, **WINDOW}
    assert read_upcoming_maintenance(value, BEGINS - 60) is None


def test_a_maintenance_without_status_and_end_is_over_once_it_began() -> None:
    value = {"windowStartTime": "2026-11-22T01:00:00Z"}
    assert read_upcoming_maintenance(value, BEGINS + 1) is None
    assert read_upcoming_maintenance({"maintenanceStatus": "PENDING", **value}, BEGINS)


def test_a_status_that_nobody_knows_is_a_fault() -> None:
    value = {"maintenance_status": "A_STATE_OF_NEXT_YEAR", **WINDOW}
    with pytest.raises(errors.NoticeError, match="expected one of"):
        read_upcoming_maintenance(value, BEGINS - 60)


def test_pick_finds_either_spelling() -> None:
    assert pick({"shutdownDetails": {"stopState": "X"}}, "shutdown-details/stop-state")
    assert pick({"shutdown-details": 1}, "shutdown-details/stop-state") is not None


def test_the_host_comes_from_the_first_variable_that_is_set() -> None:
    variables = {
        "GCE_METADATA_IP": "10.0.0.3",
        "GCE_METADATA_ROOT": "root.example:8080",
        "GCE_METADATA_HOST": "http://host.example:80",
    }
    assert metadata_url(variables) == "http://host.example:80"
    del variables["GCE_METADATA_HOST"]
    assert metadata_url(variables) == "http://root.example:8080"
    del variables["GCE_METADATA_ROOT"]
    assert metadata_url(variables) == "http://10.0.0.3"
    assert metadata_url({}) == "http://169.254.169.254"  # no name to look up


def test_a_variable_without_a_host_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="GCE_METADATA_HOST='https:"):
        metadata_url({"GCE_METADATA_HOST": "https://somewhere"})


def test_no_gce_check() -> None:
    assert is_excluded({"NO_GCE_CHECK": "true"})
    assert not is_excluded({"NO_GCE_CHECK": "false"})
    assert not is_excluded({})


@pytest.mark.parametrize("topics", [[], ["preempted", "instance/preempted"]])
def test_unknown_topics_are_refused(topics: list[str]) -> None:
    with pytest.raises(errors.ConfigurationError, match="expected some of"):
        GceWatch(topics, url="localhost")


def test_a_topic_that_is_not_watched_is_refused() -> None:
    watch = GceWatch(["preempted"], url="localhost")
    with pytest.raises(errors.ConfigurationError, match="stop-state"):
        watch.source("stop-state")


def test_pauses_after_failures_are_short_at_first_and_spread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses: list[float] = []
    enough = threading.Event()

    def wait(stop: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 11:
            enough.set()
            return stop.wait(10.0)
        return False

    with FakeGce() as fake, caplog.at_level(logging.WARNING):
        fake.fail(100)
        watch = GceWatch(url=fake.url, wait=wait, jitter=lambda: 0.5)
        with Heard(watch, ("preempted",)):
            assert enough.wait(10.0)
    assert pauses[:3] == pytest.approx([0.075, 0.15, 0.3])
    assert pauses[-2:] == pytest.approx([1.5, 1.5])
    assert len(caplog.records) == 1


def test_importing_it_loads_no_requests() -> None:
    code = (
        "import sys, tfpreempt.notice.gce; "
        "sys.exit(sorted({'requests', 'urllib3', 'tensorflow'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
