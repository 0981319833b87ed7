"""Notices from Azure's Scheduled Events.

Azure sends events to every machine of a group, so only events naming this machine
count. The first request turns the service on, which may take two minutes; only the
thread of the sources waits for that request.

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
    Poller,
    Report,
    WatchOptions,
)
from tfpreempt.notice.polling import FailureLog

HOST_VARIABLE = "TFPREEMPT_AZURE_METADATA"
EVENTS_TARGET = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_TARGET = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}

KINDS = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
DEFAULT_KINDS = KINDS[:-1]
# A Spot machine has 30 s from its event on: Microsoft recommends a poll each second.
INTERVAL_SECONDS = 1.0
FIRST_REQUEST_SECONDS = 150.0
REQUEST_SECONDS = 10.0
# Timeout of each of three requests, within a grace period of 30 s.
ACKNOWLEDGE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """An event that is scheduled, or has started.

    Attributes:
        id: the id for acknowledging the event.
        kind: the kind of event, such as "Preempt".
        is_started: whether the event has started.
        machines: the machines affected by the event, case-folded: Azure's names ignore
            case.
        detail: one line for people.
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
    """Returns the scheduled and the started events of an answer.

    Returns:
        The events, and an error about the first event that could not be read, or None.

    Raises:
        NoticeError: the answer is no list of events.
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
        ConfigurationError: the variable holds no host.
    """
    return url_from((HOST_VARIABLE,), environment)


class AzureWatch(MetadataWatch):
    """Watches the events scheduled for this machine. Each kind of event is a source.

    Each event is a notice of its own, even during another event: a preemption in 30 s
    may follow a reboot in 15 min. The sources are called "azure:Preempt" and so on.

    Args:
        kinds: the kinds of events that are notices, from Preempt, Terminate, Reboot,
            Redeploy and Freeze. A freeze is a pause of seconds that keeps the memory,
            so Freeze is not a default.
        vm_name: name of this machine in the events; by default the name from the
            service.
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

    def poller(self) -> AzurePoller:
        return AzurePoller(self, self._vm_name)

    def acknowledge(self) -> tuple[str, ...]:
        """Acknowledges the scheduled events, so that Azure starts the events at once.

        The call requests the list of events again, so no source has to be open. An
        acknowledgement counts for every machine named by the event, so only the first
        named machine sends the acknowledgement. Each worker may call this method after
        the commit agreed by the workers, and only if the user wants it. Any thread;
        takes at most 10 s.

        Returns:
            The ids of the acknowledged events: events of the watched kinds that name
            this machine first and have not started.

        Raises:
            NoticeError: the service did not accept the acknowledgement; the events
                start at the scheduled time.
        """
        return self.poller().acknowledge()


class AzurePoller(Poller):
    """Polls the events of one machine. The topics are the kinds of events.

    Args:
        watch: the watch with the address and the kinds.
        vm_name: name of this machine, or None to request the name from the service.
    """

    def __init__(self, watch: MetadataWatch, vm_name: str | None) -> None:
        super().__init__(watch)
        self._kinds = watch.topics
        self._vm_name = vm_name
        # An unreadable event must neither hide other events nor slow down the polls.
        self._oddities = FailureLog("azure:events")
        self._seconds = FIRST_REQUEST_SECONDS
        self._known: set[str] = set()

    def poll(self, report: Report) -> float:
        """Requests the events once, and reports the events of this machine."""
        listed = self._ask_events(self._seconds)
        self._seconds = REQUEST_SECONDS
        now = self._clock.wall()
        for kind in self._kinds:
            events = [event for event in listed if event.kind == kind]
            if not events or any(event.id not in self._known for event in events):
                # A new event during an older event is another change from quiet to
                # notice.
                report(kind, None)
            if events:
                detail = "; ".join(event.detail for event in events[:5])
                # A started event has no time left.
                times = [
                    now if event.is_started else event.starts_at for event in events
                ]
                known = [time for time in times if time is not None]
                report(kind, ActiveNotice(detail, min(known, default=None)))
        self._known = {event.id for event in listed}
        return self._interval

    def acknowledge(self) -> tuple[str, ...]:
        """Acknowledges events; see `AzureWatch.acknowledge`."""
        seconds = ACKNOWLEDGE_SECONDS
        ids = tuple(
            event.id
            for event in self._ask_events(seconds)
            if event.machines[0] == self._machine(seconds) and not event.is_started
        )
        if ids:
            body = {"StartRequests": [{"EventId": each} for each in ids]}
            self._request(EVENTS_TARGET, seconds, json.dumps(body).encode())
        return ids

    def _ask_events(self, seconds: float) -> list[ScheduledEvent]:
        """Returns the events of the watched kinds for this machine."""
        machine = self._machine(seconds)
        listed, odd = read_events(self._request(EVENTS_TARGET, seconds))
        if odd is not None:
            self._oddities.note_failure(odd, self._interval)
        else:
            self._oddities.note_success()
        return [
            event
            for event in listed
            if event.kind in self._kinds and machine in event.machines
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
        """Sends a POST with the body if a body is given, else a GET."""
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
    """Whether the text can be the service's answer to `NAME_TARGET`."""
    return re.fullmatch(r"[\w.()-]{1,128}", text) is not None


def _refused(answer: Answer, expected: str) -> errors.NoticeError:
    return answer.refused(
        f"{expected}; if this machine is not an Azure VM, remove the source or set "
        f"{HOST_VARIABLE}"
    )
