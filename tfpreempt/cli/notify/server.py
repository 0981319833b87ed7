"""A cloud's metadata server on this machine, which says what it is told to say.

It is the public fake with one more entry, by which another process tells it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlencode

from tfpreempt.errors import ConfigurationError, NoticeError
from tfpreempt.notice.metadata import MetadataSession, checked_base_url
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce, Reply, Request
from tfpreempt.testing.metadata._server import FakeServer

_CONTROL = "/tfpreempt/notice"


class Rehearsal(FakeServer):
    """Before a cloud's fake among the bases: it obeys, and else answers as that.

    Args:
        port: where to listen; 0: any free one.

    Raises:
        ConfigurationError: nobody can listen there.
    """

    topics: ClassVar[Mapping[str, str]]
    """What it can be told to say, the usual one first; each with a regular expression
    that is found in the answers which carry it, and in no others."""

    _carried: re.Pattern[bytes] | None = None
    _is_heard = False

    def __init__(self, port: int = 0) -> None:
        self._port = port
        try:
            super().__init__()
        except OSError as error:
            raise ConfigurationError(
                f"--port {port}: cannot listen there ({error.strerror}). Name another "
                "one, or leave it out for any that is free"
            ) from error

    def say(self, topic: str, is_up: bool) -> None:
        """Makes a notice come, or takes it back."""
        raise NotImplementedError

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
        is_up = request.query.get("is_up") == "1"
        self._is_heard = False
        self._carried = re.compile(self.topics[topic].encode()) if is_up else None
        self.say(topic, is_up)
        return Reply(body=topic.encode())


class RehearsalGce(Rehearsal, FakeGce):
    """GCE's, quiet until it is told otherwise."""

    topics: ClassVar[Mapping[str, str]] = {
        "preempted": '^"?TRUE"?$|"preempted": "TRUE"',
        "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
        "upcoming-maintenance": "window_start_time",
        "stop-state": "PENDING_STOP",
    }

    def say(self, topic: str, is_up: bool) -> None:
        if topic == "upcoming-maintenance":
            self.set(f"instance/{topic}", _maintenance() if is_up else {})
        elif topic == "stop-state":
            word = "PENDING_STOP" if is_up else "UNSPECIFIED"
            self.set(f"instance/shutdown-details/{topic}", word)
        elif topic == "preempted":
            self.set(f"instance/{topic}", "TRUE" if is_up else "FALSE")
        else:
            word = "TERMINATE_ON_HOST_MAINTENANCE" if is_up else "NONE"
            self.set(f"instance/{topic}", word)


class RehearsalAws(Rehearsal, FakeAws):
    """EC2's, quiet until it is told otherwise."""

    topics: ClassVar[Mapping[str, str]] = {
        "spot-interruption": '"action"',
        "rebalance": "noticeTime",
        "lifecycle": "^Terminated$",
    }

    def say(self, topic: str, is_up: bool) -> None:
        if topic == "lifecycle":
            self.set_lifecycle("Terminated" if is_up else "InService")
        elif not is_up:
            for path in ("spot/instance-action", "spot/termination-time"):
                self.remove(path)
            self.remove("events/recommendations/rebalance")
        elif topic == "rebalance":
            self.recommend_rebalance()
        else:
            self.interrupt()


class RehearsalAzure(Rehearsal, FakeAzure):
    """Azure's, quiet until it is told otherwise."""

    topics: ClassVar[Mapping[str, str]] = {
        kind: f'"EventType": "{kind}"'
        for kind in ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
    }

    def __init__(self, port: int = 0) -> None:
        self._scheduled: list[str] = []
        super().__init__(port)

    def say(self, topic: str, is_up: bool) -> None:
        if is_up:
            self._scheduled.append(self.schedule(topic))
        while self._scheduled and not is_up:
            self.withdraw(self._scheduled.pop())


SERVERS: Mapping[str, type[Rehearsal]] = {
    "gce": RehearsalGce,
    "aws": RehearsalAws,
    "azure": RehearsalAzure,
}


def tell(url: str, topic: str | None, *, is_up: bool) -> str:
    """Has a server of another process say a notice, or take it back.

    Args:
        url: where it listens, as it has printed it.
        topic: one of its topics; None for the usual one.
        is_up: whether the notice comes or goes.

    Returns:
        The topic.

    Raises:
        ConfigurationError: nothing listens there, or it does not obey.
    """
    fields = {"is_up": int(is_up), **({"topic": topic} if topic else {})}
    return _control(url, f"{_CONTROL}?{urlencode(fields)}", "POST")


def is_heard(url: str) -> bool:
    """Whether an answer of such a server has carried the notice that is up.

    Raises:
        ConfigurationError: as `tell`.
    """
    return _control(url, _CONTROL, "GET") == "1"


def _control(url: str, target: str, method: str) -> str:
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


def _maintenance() -> dict[str, str]:
    """One whose window begins in a minute, as the server spells it."""
    now = datetime.datetime.now(datetime.UTC)
    minute, hour = datetime.timedelta(minutes=1), datetime.timedelta(hours=1)
    return {
        "maintenance_type": "SCHEDULED",
        "maintenance_status": "PENDING",
        "can_reschedule": "FALSE",
        "window_start_time": (now + minute).isoformat(timespec="seconds"),
        "window_end_time": (now + hour).isoformat(timespec="seconds"),
    }
