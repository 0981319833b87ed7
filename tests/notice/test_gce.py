"""The sources of Google Compute Engine, against a server with its traps."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.notice.rigs import wait_until
from tests.notice.server_rigs import STOP, UPCOMING, Heard, is_hanging, quiet_gce
from tfpreempt import errors
from tfpreempt.notice.gce import GceWatch, is_excluded, metadata_url
from tfpreempt.testing._server import FakeServer
from tfpreempt.testing.metadata import FakeGce, Reply, Request

pytestmark = pytest.mark.slow  # a real server, with its time-outs

PENDING = {"maintenance_status": "PENDING", "maintenance_type": "SCHEDULED"}


@pytest.fixture
def fake() -> Iterator[FakeGce]:
    with quiet_gce() as server:
        yield server


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
            assert heard.said[-1][2] - changed < 2.0  # it does not poll
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
        assert asked == 2  # the present value, then the wait for its change
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
    assert time.monotonic() - began < 1.5


def test_a_single_topic_is_requested_alone(fake: FakeGce) -> None:
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
    clock = FakeClock(wall=1_795_309_132.5)  # 67.5 s before
    with FakeGce(longest_hang=0.02) as fake:
        fake.set(UPCOMING, {**PENDING, "window_start_time": "2026-11-22T01:00:00Z"})
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


def test_a_watch_after_another_watch_waits_for_changes_again(fake: FakeGce) -> None:
    for requests in (2, 4):
        with Heard(GceWatch(url=fake.url), ("preempted",)):
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


def test_an_entry_that_the_directory_does_not_carry_is_requested() -> None:
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


def test_a_repeated_etag_is_no_change(fake: FakeGce) -> None:
    """Etags are hashes of the content: A, B, A has the first etag again."""
    with Heard(GceWatch(url=fake.url)) as heard:
        for value, expected in [("TRUE", 1), ("FALSE", 1), ("TRUE", 2)]:
            assert is_hanging(fake)
            asked = len(fake.requests)
            fake.set("instance/preempted", value)
            assert wait_until(lambda asked=asked: len(fake.requests) > asked)
            assert is_hanging(fake)
            assert len(heard.said) == expected


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


def test_importing_it_loads_no_requests() -> None:
    code = (
        "import sys, tfpreempt.notice.gce; "
        "sys.exit(sorted({'requests', 'urllib3', 'tensorflow'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
