"""A cloud's metadata server on this machine, which says what it is told to say.

It is the public fake with one more entry, by which another process tells it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode

from tfpreempt.errors import ConfigurationError, NoticeError
from tfpreempt.notice.metadata import MetadataSession, checked_base_url
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce, Reply, Request
from tfpreempt.testing.metadata._server import FakeServer

_CONTROL = "/tfpreempt/notice"

TakeBack = Callable[[], object]
Topic = tuple[Callable[[Any], TakeBack], str]
"""Has a server give the notice, and a regular expression that is found in the answers
which carry it, and in no others."""


class Rehearsal(FakeServer):
    """Before a cloud's fake among the bases: it obeys, and else answers as that.

    Args:
        port: where to listen; 0: any free one.

    Raises:
        ConfigurationError: nobody can listen there.
    """

    topics: ClassVar[Mapping[str, Topic]]
    """What it can be told to say, the usual one first."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._carried: re.Pattern[bytes] | None = None
        self._is_heard = False
        self._take_back: TakeBack | None = None
        try:
            super().__init__()
        except OSError as error:
            raise ConfigurationError(
                f"--port {port}: cannot listen there ({error.strerror}). Name another "
                "one, or leave it out for any that is free"
            ) from error

    def answer(self, request: Request) -> Reply:
        """As the fake, and obeys."""
        if request.path == _CONTROL:
            return self._obey(request)
        reply = super().answer(request)
        if self._carried is not None and self._carried.search(reply.body):
            self._is_heard = True
        return reply

    def _obey(self, request: Request) -> Reply:
        if request.method == "GET":
            return Reply(body=b"1" if self._is_heard else b"0")
        topic = request.query.get("topic", next(iter(self.topics)))
        if topic not in self.topics:
            known = ", ".join(self.topics)
            text = f"--topic {json.dumps(topic)}: expected one of {known}"
            return Reply(status=400, body=text.encode())
        if self._take_back is not None:
            self._take_back()
        self._take_back, self._carried, self._is_heard = None, None, False
        if request.query.get("is_up") == "1":
            give, mark = self.topics[topic]
            self._carried = re.compile(mark.encode())
            self._take_back = give(self)
        return Reply(body=topic.encode())


def _entry(
    path: str, notice: object, mark: str = "", quiet: str | None = None
) -> Topic:
    """An entry of the server; without a quiet value it is not there in quiet times.

    The mark of a text is that text.
    """

    def give(fake: FakeGce | FakeAws) -> TakeBack:
        fake.set(path, notice() if callable(notice) else notice)
        return lambda: fake.remove(path) if quiet is None else fake.set(path, quiet)

    return give, mark or str(notice)


def _event(kind: str) -> Topic:
    """A scheduled event of Azure."""

    def give(fake: FakeAzure) -> TakeBack:
        identity = fake.schedule(kind)
        return lambda: fake.withdraw(identity)

    return give, f'"EventType": "{kind}"'


def _in(minutes: int) -> str:
    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _window() -> dict[str, str]:
    return {
        "maintenance_type": "SCHEDULED",
        "maintenance_status": "PENDING",
        "can_reschedule": "FALSE",
        "window_start_time": _in(minutes=1),
        "window_end_time": _in(minutes=60),
    }


class RehearsalGce(Rehearsal, FakeGce):
    """GCE's, quiet until it is told otherwise."""

    topics = {
        "preempted": _entry(
            "instance/preempted", "TRUE", '^"?TRUE"?$|"preempted": "TRUE"', "FALSE"
        ),
        "maintenance-event": _entry(
            "instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "", "NONE"
        ),
        "upcoming-maintenance": _entry(
            "instance/upcoming-maintenance", _window, "window_start_time"
        ),
        "stop-state": _entry("instance/shutdown-details/stop-state", "PENDING_STOP"),
    }


class RehearsalAws(Rehearsal, FakeAws):
    """EC2's, quiet until it is told otherwise."""

    topics = {
        "spot-interruption": _entry(
            "spot/instance-action",
            lambda: {"action": "terminate", "time": _in(minutes=2)},
            '"action"',
        ),
        "rebalance": _entry(
            "events/recommendations/rebalance",
            lambda: {"noticeTime": _in(minutes=0)},
            "noticeTime",
        ),
        "lifecycle": _entry("autoscaling/target-lifecycle-state", "Terminated"),
    }


class RehearsalAzure(Rehearsal, FakeAzure):
    """Azure's, quiet until it is told otherwise."""

    topics = {
        kind: _event(kind)
        for kind in ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
    }


SERVERS: Mapping[str, type[Rehearsal]] = {
    "gce": RehearsalGce,
    "aws": RehearsalAws,
    "azure": RehearsalAzure,
}


def control(url: str, **fields: object) -> str:
    """Talks to a server of another process.

    Args:
        url: where it listens, as it has printed it.
        **fields: `is_up`, 1 or 0, has it say a notice or take it back, `topic` which
            one; without any it is asked whether an answer has carried what is up.

    Returns:
        The topic, or "1" or "0".

    Raises:
        ConfigurationError: nothing listens there, or it does not obey.
    """
    method = "POST" if fields else "GET"
    told = {name: value for name, value in fields.items() if value is not None}
    target = f"{_CONTROL}?{urlencode(told)}"
    session = MetadataSession(checked_base_url(url, "--metadata"))
    try:
        answer = session.request(target, method=method)
    except NoticeError as error:
        raise ConfigurationError(
            f"no rehearsal server listens at --metadata {url} ({error}). Start one "
            "with `tfpreempt notify --serve gce` and take the address that it prints"
        ) from error
    finally:
        session.close()
    if answer.status == 400:
        raise ConfigurationError(answer.text())
    if answer.status != 200:
        raise ConfigurationError(
            f"--metadata {url} answered with status {answer.status}; expected a server "
            "of `tfpreempt notify --serve`. A real metadata server cannot be told to "
            "give a notice"
        )
    return answer.text()
