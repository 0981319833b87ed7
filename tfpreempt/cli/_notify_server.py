"""A cloud's metadata server on this machine, which says what it is told to say.

It is the public fake with one more entry, by which another process tells it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlencode

from tfpreempt.errors import ConfigurationError, NoticeError
from tfpreempt.notice._http import MetadataSession, checked_base_url
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce, Reply, Request
from tfpreempt.testing.metadata._server import FakeServer

_CONTROL = "/tfpreempt/notice"


class Rehearsal(FakeServer):
    """Before a cloud's fake among the bases: it obeys, and else answers as that."""

    topics: ClassVar[tuple[str, ...]]
    """What it can be told to say; the first one is the usual one."""

    def say(self, topic: str, is_up: bool) -> None:
        """Makes a notice come, or takes it back."""
        raise NotImplementedError

    def answer(self, request: Request) -> Reply:
        """As the fake, and obeys."""
        if request.path != _CONTROL or request.method != "POST":
            return super().answer(request)
        topic = request.query.get("topic", self.topics[0])
        if topic not in self.topics:
            known = ", ".join(self.topics)
            text = f"--topic {json.dumps(topic)}: expected one of {known}"
            return Reply(status=400, body=text.encode())
        self.say(topic, request.query.get("is_up") == "1")
        return Reply(body=topic.encode())


class RehearsalGce(Rehearsal, FakeGce):
    """GCE's, quiet until it is told otherwise."""

    topics: ClassVar[tuple[str, ...]] = ("preempted", "maintenance-event")

    def say(self, topic: str, is_up: bool) -> None:
        words = {
            "preempted": ("FALSE", "TRUE"),
            "maintenance-event": ("NONE", "TERMINATE_ON_HOST_MAINTENANCE"),
        }
        self.set(f"instance/{topic}", words[topic][is_up])


class RehearsalAws(Rehearsal, FakeAws):
    """EC2's, quiet until it is told otherwise."""

    topics: ClassVar[tuple[str, ...]] = ("spot-interruption", "rebalance")

    def say(self, topic: str, is_up: bool) -> None:
        if not is_up:
            for path in ("instance-action", "termination-time"):
                self.remove(f"spot/{path}")
            self.remove("events/recommendations/rebalance")
        elif topic == "rebalance":
            self.recommend_rebalance()
        else:
            self.interrupt()


class RehearsalAzure(Rehearsal, FakeAzure):
    """Azure's, quiet until it is told otherwise."""

    topics: ClassVar[tuple[str, ...]] = ("Preempt", "Terminate", "Reboot", "Redeploy")

    def __init__(self) -> None:
        self._scheduled: list[str] = []
        super().__init__()

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
    session = MetadataSession(checked_base_url(url, "--metadata"))
    query = urlencode({"is_up": int(is_up), **({"topic": topic} if topic else {})})
    try:
        answer = session.request(f"{_CONTROL}?{query}", method="POST")
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
