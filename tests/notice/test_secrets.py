"""Replies of a metadata server are not quoted, because they may contain passwords."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.notice.server_rigs import Heard, wait_until
from tfpreempt import errors
from tfpreempt.notice import aws, azure, gce
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.metadata_session import Answer, checked_base_url
from tfpreempt.testing.metadata import FakeGce

SECRET = "hunter2"
EVENT = {
    "EventStatus": "Scheduled",
    "EventId": f"1 {SECRET}",
    "EventType": "Preempt",
    "Resources": [SECRET],
    "NotBefore": SECRET,
}


def answer(body: object, status: int = 200) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return Answer(
        url="http://h/x", status=status, headers={"x": SECRET}, body=text.encode()
    )


def azure_details(given: Answer) -> list[str]:
    events, odd = azure.read_events(given)
    return [*(event.detail for event in events), str(odd or "")]


def gce_details(given: Answer) -> list[str]:
    """Returns the text of every topic of GCE for a value."""
    told = []
    with contextlib.suppress(errors.NoticeError):
        for topic in gce.TOPICS.values():
            try:
                read = topic.read(given.json(), 0.0)
            except errors.NoticeError as error:
                told.append(str(error))
            else:
                told.append(read.detail if read else "")
    return told


def detail(read: Callable[[Answer], Any]) -> Callable[[Answer], list[str]]:
    def read_it(given: Answer) -> list[str]:
        told = read(given)
        return [told.detail if told else ""]

    return read_it


def refused(given: Answer) -> list[str]:
    raise given.refused("something else")


READERS: Mapping[str, Callable[[Answer], list[str]]] = {
    "refused": refused,
    "aws interruption": detail(aws.read_interruption),
    "aws rebalance": detail(aws.read_rebalance),
    "aws lifecycle": detail(aws.read_lifecycle),
    "azure": azure_details,
    "gce": gce_details,
}
BODIES = [
    f"password = {SECRET}",
    SECRET,
    [SECRET],
    {SECRET: SECRET},
    {"action": SECRET, "time": SECRET},
    {"action": "terminate", "time": SECRET},
    {"noticeTime": SECRET},
    {"Events": SECRET},
    {"Events": [SECRET, {SECRET: SECRET, "EventStatus": "Started"}]},
    {"Events": [EVENT]},
    {"maintenanceStatus": SECRET},
    {
        "maintenanceStatus": "PENDING",
        "type": SECRET,
        "windowStartTime": SECRET,
        "windowEndTime": SECRET,
    },
]


@pytest.mark.parametrize("body", BODIES, ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_no_answer_is_quoted(reader: str, body: object) -> None:
    try:
        told = READERS[reader](answer(body))
    except errors.NoticeError as error:
        told = [str(error)]
    assert not [text for text in told if SECRET in text]


def test_no_startup_script_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeGce() as fake:
        fake.set("instance/attributes/startup-script", f"mysql -p{SECRET}")
        fake.set("instance/preempted", f"-p{SECRET}")
        with Heard(GceWatch(url=fake.url)):
            assert wait_until(lambda: bool(caplog.records))
            fake.fail(1)
            assert wait_until(lambda: len(fake.requests) > 3)
    assert "value of preempted is unknown" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("text", [f"u:{SECRET}@h", f"http://u:{SECRET}@h:80"])
def test_no_password_of_an_address_is_quoted(text: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="without user names") as caught:
        checked_base_url(text, "VARIABLE")
    assert SECRET not in str(caught.value)
