"""A fake of Azure's instance metadata service, with Scheduled Events."""

from __future__ import annotations

import datetime
import email.utils
import itertools
import json
from collections.abc import Sequence

from tfpreempt.testing._server import FakeServer, Reply, Request

EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"
LEAST_SECONDS = {
    "Preempt": 30,
    "Terminate": 300,
    "Reboot": 900,
    "Redeploy": 600,
    "Freeze": 900,
}


class FakeAzure(FakeServer):
    """Fake of Azure's metadata service: serves the VM's name and Scheduled Events.

    Like the real service, the fake answers 400 to requests without `Metadata: true` or
    without an api-version, and to requests that a proxy has forwarded. It also sends
    events of other machines. If a client acknowledges an event, the event starts.

    Args:
        vm_name: name of this machine.
        first_call_seconds: seconds until the first request for events is answered; the
            real service takes up to two minutes.

    Attributes:
        vm_name: name of this machine, in the spelling that events use.
    """

    headers = {"Content-Type": "application/json; charset=utf-8"}

    def __init__(
        self, *, vm_name: str = "trainer_0", first_call_seconds: float = 0.0
    ) -> None:
        self.vm_name = vm_name
        self._first_call_seconds = first_call_seconds
        self._events: dict[str, dict[str, object]] = {}
        self._numbers = itertools.count(1)
        self._incarnation = 1
        self._document: str | None = None
        super().__init__()

    def environment(self) -> dict[str, str]:
        return {"TFPREEMPT_AZURE_METADATA": self.host}

    def schedule(
        self,
        kind: str = "Preempt",
        *,
        resources: Sequence[str] | None = None,
        not_before: str | None = None,
        status: str = "Scheduled",
    ) -> str:
        """Schedules an event.

        Args:
            kind: Preempt, Terminate, Reboot, Redeploy or Freeze.
            resources: names of the affected machines; by default this machine.
            not_before: start time as text (RFC 1123 or ISO 8601); "" for none; None:
                the earliest time that Azure allows for the kind of event.
            status: Scheduled or Started.

        Returns:
            The id of the event.
        """
        identity = f"00000000-0000-4000-8000-{next(self._numbers):012d}"
        event: dict[str, object] = {
            "EventId": identity,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [self.vm_name] if resources is None else list(resources),
            "EventStatus": status,
            "NotBefore": _earliest(kind) if not_before is None else not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        with self.changed:
            self._events[identity] = event
            self._incarnation += 1
        return identity

    def withdraw(self, identity: str) -> None:
        """Removes an event that has ended or was cancelled.

        Args:
            identity: id of the event.
        """
        with self.changed:
            self._events.pop(identity, None)
            self._incarnation += 1

    def status(self, identity: str) -> str:
        """Returns the status of an event; "" for an unknown event."""
        with self.changed:
            return str(self._events.get(identity, {}).get("EventStatus", ""))

    def set_document(self, text: str | None) -> None:
        """Sets the text that the server sends in place of the events.

        Args:
            text: the text; None: the server sends the events again.
        """
        with self.changed:
            self._document = text

    def answer(self, request: Request) -> Reply:
        is_asked = request.headers.get("metadata", "").lower() == "true"
        if not is_asked or "x-forwarded-for" in request.headers:
            return self.reply(400, {"error": "Bad request. Required metadata header"})
        if not request.query.get("api-version"):
            return self.reply(
                400, {"error": "Bad request. api-version was not specified"}
            )
        if request.path == NAME and request.query.get("format") == "text":
            return Reply(body=self.vm_name.encode())
        if request.path != EVENTS:
            return self.reply(404, {"error": "Not found"})
        seconds, self._first_call_seconds = self._first_call_seconds, 0.0
        self.pause(seconds)
        with self.changed:
            if request.method == "POST":
                return self._start(request)
            if self._document is not None:
                return Reply(body=self._document.encode())
            events = list(self._events.values())
            document = {"DocumentIncarnation": self._incarnation, "Events": events}
            return self.reply(200, document)

    def _start(self, request: Request) -> Reply:
        try:
            asked = json.loads(request.body)["StartRequests"]
            chosen = [self._events[each["EventId"]] for each in asked]
        except (ValueError, KeyError, TypeError):
            return self.reply(400, {"error": "Bad request. StartRequests"})
        for event in chosen:
            event.update(EventStatus="Started", NotBefore="")
        self._incarnation += 1
        return Reply()


def _earliest(kind: str) -> str:
    ahead = datetime.timedelta(seconds=LEAST_SECONDS[kind])
    when = datetime.datetime.now(datetime.timezone.utc) + ahead
    return email.utils.format_datetime(when, usegmt=True)
