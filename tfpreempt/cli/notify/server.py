"""A cloud's metadata server on this machine, which says what it is told to say.

It is the public fake with one more entry, by which another process tells it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from tfpreempt.errors import ConfigurationError, NoticeError
from tfpreempt.notice.metadata import MetadataSession
from tfpreempt.testing._server import FakeServer
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce, Reply, Request

_CONTROL = "/tfpreempt/notice"
ASK_SECONDS = 30.0  # the slowest client looks every 5 s
_ANSWER_SECONDS = 5.0


class Rehearsal(FakeServer):
    """Before a cloud's fake among the bases: it obeys, and else answers as that.

    Args:
        port: where to listen; 0: any free one.

    Raises:
        ConfigurationError: nobody can listen there.
    """

    mark: ClassVar[bytes]
    """A regular expression, found in the answers that carry the notice alone."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._is_heard = False
        try:
            super().__init__()
        except OSError as error:
            raise ConfigurationError(
                f"--port {port}: cannot listen there ({error.strerror}). Name another "
                "one, or leave it out for any that is free"
            ) from error

    def announce(self, is_up: bool) -> None:
        """Gives the notice, or takes it back."""
        raise NotImplementedError

    def answer(self, request: Request) -> Reply:
        """As the fake; or it gives a notice until a client has heard it."""
        if request.path == _CONTROL:
            self._is_heard = False
            self.announce(True)
            with self.changed:
                self.wait(lambda: self._is_heard, ASK_SECONDS)
            self.announce(False)
            return Reply(body=b"heard" if self._is_heard else b"")
        reply = super().answer(request)
        if re.search(self.mark, reply.body):
            with self.changed:
                self._is_heard = True
                self.changed.notify_all()
        return reply


class RehearsalGce(Rehearsal, FakeGce):
    """GCE's, quiet until it is told otherwise."""

    mark = rb'^"?TRUE"?$|"preempted": "TRUE"'

    def announce(self, is_up: bool) -> None:
        self.set("instance/preempted", "TRUE" if is_up else "FALSE")


class RehearsalAws(Rehearsal, FakeAws):
    """EC2's, quiet until it is told otherwise."""

    mark = rb'"action"'

    def announce(self, is_up: bool) -> None:
        if is_up:
            self.interrupt()
        else:
            self.remove("spot/instance-action")
            self.remove("spot/termination-time")


class RehearsalAzure(Rehearsal, FakeAzure):
    """Azure's, quiet until it is told otherwise."""

    mark = rb'"EventType": "Preempt"'
    _event = ""  # that is scheduled

    def announce(self, is_up: bool) -> None:
        self.withdraw(self._event)
        if is_up:
            self._event = self.schedule()


SERVERS: Mapping[str, type[Rehearsal]] = {
    "gce": RehearsalGce,
    "aws": RehearsalAws,
    "azure": RehearsalAzure,
}


def announce(url: str) -> None:
    """Has a server of another process give its notice until a client has heard it.

    Args:
        url: the server's address, as `checked_base_url()` returns it.

    Raises:
        ConfigurationError: no rehearsal server listens there, or no client asks it.
    """
    session = MetadataSession(url)
    seconds = ASK_SECONDS + _ANSWER_SECONDS
    try:
        answer = session.request(_CONTROL, method="POST", seconds=seconds)
        fault = "" if answer.status == 200 else f"it answers {answer.status}"
    except NoticeError as error:
        fault = str(error)
    finally:
        session.close()
    if fault:
        raise ConfigurationError(
            f"no rehearsal server listens at --metadata {url} ({fault}). Start one "
            "with `tfpreempt notify --serve gce` and take the address that it prints; "
            "a real metadata server cannot be told to give a notice"
        )
    if not answer.text():
        raise ConfigurationError(
            f"nobody has asked {url} within {ASK_SECONDS:g} s, and it is quiet again. "
            "Start the job with the variables that `tfpreempt notify --serve` printed, "
            "and with a config that watches this cloud"
        )
