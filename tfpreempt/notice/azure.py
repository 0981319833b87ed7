"""Notices from Azure's Scheduled Events.

Every machine of a group receives every event, but an event concerns only the machines
that it names. The first request turns the service on, which may take two minutes. Only
the polling thread waits for the service; training never waits.

Protocol: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping

from typing_extensions import Unpack

from tfpreempt import errors
from tfpreempt.notice.metadata_session import (
    Answer,
    epoch_seconds,
    readable,
    url_from,
)
from tfpreempt.notice.metadata_watch import (
    ActiveNotice,
    MetadataWatch,
    WatchOptions,
)
from tfpreempt.notice.polling import FailureLog

HOST_VARIABLE = "TFPREEMPT_AZURE_METADATA"
EVENTS_TARGET = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_TARGET = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}

KINDS = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
DEFAULT_KINDS = KINDS[:-1]
# Microsoft recommends a poll each second, because a Spot machine has only 30 s.
INTERVAL_SECONDS = 1.0
FIRST_REQUEST_SECONDS = 150.0
REQUEST_SECONDS = 10.0
# Timeout of an acknowledgement, which is up to three requests.
ACKNOWLEDGE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """An event, such as a preemption, that is scheduled or has started.

    Attributes:
        id: id of the event, needed to acknowledge the event.
        kind: the kind of event, such as "Preempt".
        is_started: whether the event has started.
        machines: names of the affected machines, in the order of the event;
            case-folded, because Azure ignores case.
        detail: description in one line, for messages.
        starts_at: earliest start of the event, in seconds since the Unix epoch; None if
            unknown.
    """

    id: str
    kind: str
    is_started: bool
    machines: tuple[str, ...]
    detail: str
    starts_at: float | None


def read_events(
    answer: Answer,
) -> tuple[list[ScheduledEvent], errors.NoticeError | None]:
    """Parses the events in an answer; skips events that have ended.

    Returns:
        The valid events, and an error that describes the first malformed event; None if
        all events are valid.

    Raises:
        NoticeError: the answer contains no list of events.
    """
    expected = "an object with a list of Events"
    listed = answer.fields(expected).get("Events")
    if not isinstance(listed, list):
        raise answer.refused(expected)
    events: list[ScheduledEvent] = []
    odd: errors.NoticeError | None = None
    for fields in listed:
        match fields:
            case {
                "EventStatus": "Scheduled" | "Started" as status,
                "EventId": str(identity),
                "EventType": str(kind),
                "Resources": [*resources],
            }:
                starts_at = epoch_seconds(fields.get("NotBefore"))
                state = "has started" if status == "Started" else "is scheduled"
                ahead = f", not before {readable(starts_at)}" if starts_at else ""
                shown = identity if re.fullmatch(r"[\w-]{1,64}", identity) else "?"
                event = ScheduledEvent(
                    id=identity,
                    kind=kind,
                    is_started=status == "Started",
                    machines=tuple(str(each).casefold() for each in resources),
                    detail=f"{kind} {state}{ahead} (event {shown})",
                    starts_at=starts_at,
                )
                events.append(event)
            case dict() if fields.get("EventStatus") not in ("Scheduled", "Started"):
                pass  # the event is over
            case _:
                odd = odd or errors.NoticeError(
                    f"{answer.url} lists an event without EventId, EventType or "
                    "Resources; the event counts as no notice. The event is not "
                    "shown, because metadata can hold secrets"
                )
    return events, odd


def metadata_url(environment: Mapping[str, str]) -> str:
    """Returns the address in TFPREEMPT_AZURE_METADATA, or the default address.

    Raises:
        ConfigurationError: the value of the variable is not a host.
    """
    return url_from((HOST_VARIABLE,), environment)


class AzureWatch(MetadataWatch):
    """Watches the events that are scheduled for this machine.

    There is a source for every kind of event, such as "azure:Preempt". Every new event
    is a notice, even if an earlier event is still scheduled: while a reboot in 15 min
    is announced, a preemption in 30 s may be announced.

    Args:
        kinds: kinds of events that are notices: any of Preempt, Terminate, Reboot,
            Redeploy and Freeze. By default all except Freeze, in which the machine only
            pauses for some seconds, and keeps its memory.
        vm_name: name of this machine in the events; None: the watch requests the name
            from the service.
        interval: seconds between two polls.
        **options: url, clock and wait, see `WatchOptions`.

    Raises:
        ConfigurationError: a kind is unknown, the address is invalid, or the interval
            is not positive.
    """

    name = "azure"
    _known = KINDS
    _argument = "kinds"
    _find_url = staticmethod(metadata_url)

    def __init__(
        self,
        kinds: Iterable[str] = DEFAULT_KINDS,
        *,
        vm_name: str | None = None,
        interval: float = INTERVAL_SECONDS,
        **options: Unpack[WatchOptions],
    ) -> None:
        super().__init__(kinds, interval, **options)
        self._vm_name = vm_name
        # Log malformed events separately: an error must not hide valid events, or delay
        # polls.
        self._oddities = FailureLog("azure:events")
        self._seconds = FIRST_REQUEST_SECONDS
        self._seen: set[str] = set()  # ids of the events of the newest poll

    def acknowledge(self) -> tuple[str, ...]:
        """Acknowledges the scheduled events, so that Azure starts them immediately.

        The method requests the events again, so it works without an open source.
        Every worker may call it, on any thread. An acknowledgement is valid for all
        machines of an event, so a machine sends one only for events that name the
        machine first. The method takes at most 10 s. Call it after the commit.

        Returns:
            The ids of the acknowledged events. These are the events of the watched
            kinds that have not started, and that name this machine first.

        Raises:
            NoticeError: the service did not accept the acknowledgement, so the events
                start at the scheduled time.
        """
        deadline = self.clock.monotonic() + ACKNOWLEDGE_SECONDS
        machine = self._machine(self._seconds_until(deadline))
        ids = tuple(
            event.id
            for event in self._ask_events(self._seconds_until(deadline))
            if event.machines[0] == machine and not event.is_started
        )
        if ids:
            body = json.dumps({"StartRequests": [{"EventId": each} for each in ids]})
            seconds = self._seconds_until(deadline)
            self._request(EVENTS_TARGET, seconds, body.encode())
        return ids

    def poll(self) -> float:
        """Requests the events once, and reports the events of this machine."""
        listed = self._ask_events(self._seconds)
        self._seconds = REQUEST_SECONDS
        now = self.clock.wall()
        for kind in self.topics:
            events = [event for event in listed if event.kind == kind]
            if not events or any(event.id not in self._seen for event in events):
                # Report "no notice" before a new event: a source reports a notice only
                # at the change from no notice to a notice.
                self.report(kind, None)
            if events:
                detail = "; ".join(event.detail for event in events[:5])
                # A started event has no time left.
                times = [
                    now if event.is_started else event.starts_at for event in events
                ]
                known = [time for time in times if time is not None]
                self.report(kind, ActiveNotice(detail, min(known, default=None)))
        self._seen = {event.id for event in listed}
        return self.interval

    def _seconds_until(self, deadline: float) -> float:
        """Returns the timeout of a request that must end by a deadline."""
        return max(0.01, deadline - self.clock.monotonic())

    def _ask_events(self, seconds: float) -> list[ScheduledEvent]:
        """Returns the events of the watched kinds for this machine."""
        machine = self._machine(seconds)
        listed, odd = read_events(self._request(EVENTS_TARGET, seconds))
        if odd is not None:
            self._oddities.note_failure(odd, self.interval)
        else:
            self._oddities.note_success()
        return [
            event
            for event in listed
            if event.kind in self.topics and machine in event.machines
        ]

    def _machine(self, seconds: float) -> str:
        """Returns this machine's name, case-folded."""
        if self._vm_name is None:
            answer = self._request(NAME_TARGET, seconds)
            if not is_vm_name(answer.text()):
                raise _refused(answer, "this machine's name")
            self._vm_name = answer.text()
        return self._vm_name.casefold()

    def _request(self, target: str, seconds: float, body: bytes = b"") -> Answer:
        """Sends a request: a POST if there is a body, else a GET.

        Args:
            target: path and query of the request.
            seconds: timeout for the whole answer.
            body: JSON text to post.
        """
        answer = self._session.request(
            target,
            method="POST" if body else "GET",
            headers=HEADERS | ({"Content-Type": "application/json"} if body else {}),
            body=body or None,
            seconds=seconds,
        )
        if answer.status != 200:
            raise _refused(answer, "200 for StartRequests" if body else "200")
        return answer


def is_vm_name(text: str) -> bool:
    """Returns whether a text has the form of an Azure machine name."""
    return re.fullmatch(r"[\w.()-]{1,128}", text) is not None


def _refused(answer: Answer, expected: str) -> errors.NoticeError:
    return answer.refused(
        f"{expected}; if this machine is not an Azure VM, remove the source or set "
        f"{HOST_VARIABLE}"
    )
