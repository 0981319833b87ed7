"""Simulates the metadata server of a cloud on this machine.

The server is a fake server of `tfpreempt.testing` with an additional URL path, the
control path. A request to this path makes the server announce a preemption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from tfpreempt.errors import ConfigurationError, NoticeError
from tfpreempt.notice.metadata_session import MetadataSession
from tfpreempt.testing._server import FakeServer
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce, Reply, Request

_CONTROL = "/tfpreempt/notice"
ASK_SECONDS = 30.0  # long enough for a client to poll, at least every 5 s
_ANSWER_SECONDS = 5.0


class SimulatedMetadata(FakeServer):
    """Mixin that adds the control path to the fake server of a cloud.

    `tfpreempt simulate --metadata` sends a request to the control path, a URL path, and
    the server announces a preemption. The mixin must come before the fake server in the
    list of base classes.

    Args:
        port: port to listen on; 0: any free port.

    Raises:
        ConfigurationError: the port cannot be used.
    """

    mark: ClassVar[bytes]
    """Regular expression that finds the notice in the body of an answer."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._is_read = False
        try:
            super().__init__()
        except OSError as error:
            raise ConfigurationError(
                f"--port {port}: cannot listen on this port ({error.strerror}). Name "
                "another port, or omit --port to use any free port"
            ) from error

    def announce(self, is_up: bool) -> None:
        """Announces a preemption, or withdraws the announcement if `is_up` is False."""
        raise NotImplementedError

    def answer(self, request: Request) -> Reply:
        """Answers a request.

        A request to the control path makes the server announce a preemption, and is
        answered when a client has read the notice, or after `ASK_SECONDS`. All other
        requests are answered by the fake server.
        """
        if request.path == _CONTROL:
            self._is_read = False
            self.announce(True)
            with self.changed:
                self.wait(lambda: self._is_read, ASK_SECONDS)
            self.announce(False)
            return Reply(body=b"read" if self._is_read else b"")
        reply = super().answer(request)
        if re.search(self.mark, reply.body):
            with self.changed:
                self._is_read = True
                self.changed.notify_all()
        return reply


class SimulatedGceMetadata(SimulatedMetadata, FakeGce):
    """Simulated metadata server of GCE; has no notice before `announce`."""

    mark = rb'^"?TRUE"?$|"preempted": "TRUE"'

    def announce(self, is_up: bool) -> None:
        self.set("instance/preempted", "TRUE" if is_up else "FALSE")


class SimulatedAwsMetadata(SimulatedMetadata, FakeAws):
    """Simulated metadata server of EC2; has no notice before `announce`."""

    mark = rb'"action"'

    def announce(self, is_up: bool) -> None:
        if is_up:
            self.interrupt()
        else:
            self.remove("spot/instance-action")
            self.remove("spot/termination-time")


class SimulatedAzureMetadata(SimulatedMetadata, FakeAzure):
    """Simulated metadata server of Azure; has no notice before `announce`."""

    mark = rb'"EventType": "Preempt"'
    _event = ""  # id of the scheduled event

    def announce(self, is_up: bool) -> None:
        self.withdraw(self._event)
        if is_up:
            self._event = self.schedule()


SERVERS: Mapping[str, type[SimulatedMetadata]] = {
    "gce": SimulatedGceMetadata,
    "aws": SimulatedAwsMetadata,
    "azure": SimulatedAzureMetadata,
}


def announce(url: str) -> None:
    """Makes a simulated server in another process announce a preemption.

    The function returns when a client has read the notice.

    Args:
        url: address of the server, as returned by `checked_base_url()`.

    Raises:
        ConfigurationError: no simulated server listens at the address, or no client has
            read the notice in time.
    """
    session = MetadataSession(url)
    seconds = ASK_SECONDS + _ANSWER_SECONDS
    try:
        answer = session.request(_CONTROL, method="POST", seconds=seconds)
        fault = (
            "" if answer.status == 200 else f"it answers with status {answer.status}"
        )
    except NoticeError as error:
        fault = str(error)
    finally:
        session.close()
    if fault:
        raise ConfigurationError(
            f"no simulated metadata server listens at --metadata {url} ({fault}). "
            "Start a server with `tfpreempt simulate --serve gce` and use the printed "
            "address; a real metadata server cannot simulate a notice"
        )
    if not answer.text():
        raise ConfigurationError(
            f"no job has read the notice of {url} within {ASK_SECONDS:g} s; the notice "
            "is withdrawn. Start the job with the variables printed by `tfpreempt "
            "simulate --serve`, and with a config that watches this cloud"
        )
