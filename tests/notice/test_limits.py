"""How long each request may take, and which failures are the normal state."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.fakes.clock import FakeClock
from tests.notice.rigs import wait_until
from tests.notice.server_rigs import Heard, hurry, is_hanging, quiet_gce
from tfpreempt import errors
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.metadata_session import Answer, MetadataSession
from tfpreempt.testing.metadata import FakeGce, Reply, Request


class Recorder:
    """Answers from a list, without a server; keeps targets and time limits."""

    def __init__(self, *answers: Answer | errors.NoticeError) -> None:
        self.asked: list[tuple[str, float]] = []
        self._answers = iter(answers)

    def request(self, target: str, *, seconds: float, **options: object) -> Answer:
        self.asked.append((target, seconds))
        answer = next(self._answers)
        if isinstance(answer, errors.NoticeError):
            raise answer
        return answer

    def is_asked_in_place_of_servers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MetadataSession, "request", self.request)


def test_a_hanging_get_may_outlast_its_timeout_by_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers = {"metadata-flavor": "Google", "etag": "1"}
    answer = Answer(url="", status=200, headers=headers, body=b'"FALSE"')
    recorder = Recorder(answer, answer)
    recorder.is_asked_in_place_of_servers(monkeypatch)
    watch = GceWatch(["preempted"])
    for _ in range(2):
        watch.poll()
    (_, plain), (target, hanging) = recorder.asked
    assert plain == 3
    assert parse_qs(urlsplit(target).query)["timeout_sec"] == ["60"]
    assert hanging == 70


def test_only_the_first_look_at_azures_events_may_take_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service is turned on by it."""
    late = errors.NoticeError("its answer was not complete in time")
    body = json.dumps({"Events": []}).encode()
    document = Answer(url="", status=200, headers={}, body=body)
    recorder = Recorder(late, document, document)
    recorder.is_asked_in_place_of_servers(monkeypatch)
    watch = AzureWatch(vm_name="trainer_0")
    with pytest.raises(errors.NoticeError):
        watch.poll()
    for _ in range(2):
        watch.poll()
    assert [seconds for _, seconds in recorder.asked] == [150, 150, 10]


@pytest.fixture
def fake() -> Iterator[FakeGce]:
    with quiet_gce() as server:
        yield server


@pytest.mark.slow  # a hanging GET lasts a second at least
def test_a_hanging_get_that_is_never_answered_ends(
    fake: FakeGce, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    answer = fake.answer

    def stall_the_wait(request: Request) -> Reply:
        if "wait_for_change" in request.query:
            fake.pause(30.0)
        return answer(request)

    monkeypatch.setattr(fake, "answer", stall_the_wait)
    with Heard(GceWatch(url=fake.url)) as heard:
        assert wait_until(lambda: "not complete in time" in caplog.text)
        monkeypatch.setattr(fake, "answer", answer)
        fake.preempt()
        assert wait_until(lambda: heard.names == ["gce:preempted"])
        assert is_hanging(fake)


@pytest.mark.parametrize(("status", "warnings"), [(503, 0), (404, 0), (500, 1)])
def test_an_announcement_that_is_not_served_is_normal(
    status: int,
    warnings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    with FakeGce(longest_hang=0.02) as fake, caplog.at_level(logging.WARNING):
        answer = fake.answer

        def refuse(request: Request) -> Reply:
            reply = answer(request)
            if "upcoming-maintenance" in request.path:
                return Reply(status=status, headers=reply.headers)
            return reply

        monkeypatch.setattr(fake, "answer", refuse)
        with Heard(GceWatch(url=fake.url, wait=clock.wait, clock=clock)):
            for _ in range(3):
                clock.wait_for_waiters()
                clock.advance(5.0)
            clock.wait_for_waiters()
        assert any("upcoming-maintenance" in each.path for each in fake.requests)
    assert len(caplog.records) == warnings
