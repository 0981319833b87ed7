"""Notices from Azure's Scheduled Events.

Events are sent to all machines of a group, so only those that name this one count. The
service is turned on by the first question, which may take two minutes; nobody waits for
that but this source's own thread.

Protocol: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping

from typing_extensions import Unpack

from tfpreempt import errors
from tfpreempt.notice.metadata import (
    Answer,
    epoch_seconds,
    readable,
    url_from,
)
from tfpreempt.notice.polling import FailureLog
from tfpreempt.notice.topics import Poller, Report, Told, TopicWatch, WatchOptions

HOST_VARIABLE = "TFPREEMPT_AZURE_METADATA"
EVENTS_TARGET = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_TARGET = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}

KINDS = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
DEFAULT_KINDS = KINDS[:-1]
# A Spot machine has 30 s from its event on: Microsoft recommends to look each second.
INTERVAL_SECONDS = 1.0
FIRST_REQUEST_SECONDS = 150.0
REQUEST_SECONDS = 10.0
# Three questions, of a grace of 30 s.
ACKNOWLEDGE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event that is still ahead, or has started.

    Attributes:
        id: by which it is acknowledged.
        kind: such as "Preempt".
        is_started: whether it goes on already.
        machines: those that it is for, case-folded: Azure's names ignore the case.
        detail: one line for people.
        starts_at: when it starts at the earliest, in seconds since the Unix epoch; None
            if it is not known.
    """

    id: str
    kind: str
    is_started: bool
    machines: tuple[str, ...]
    detail: str
    starts_at: float | None


def read_events(answer: Answer) -> tuple[list[Event], errors.NoticeError | None]:
    """The events of an answer that are scheduled or started.

    Returns:
        The events, and what is wrong with the first one that was passed over, if any.

    Raises:
        NoticeError: it is no list of events.
    """
    expected = "an object with a list of Events"
    listed = answer.fields(expected).get("Events")
    if not isinstance(listed, list):
        raise answer.refused(expected)
    events: list[Event] = []
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
                event = Event(
                    id=identity,
                    kind=kind,
                    is_started=status == "Started",
                    machines=tuple(str(each).casefold() for each in resources),
                    detail=f"{kind} {state}{ahead} (event {shown})",
                    starts_at=starts_at,
                )
                events.append(event)
            case dict() if fields.get("EventStatus") not in ("Scheduled", "Started"):
                pass  # it is over
            case _:
                odd = odd or errors.NoticeError(
                    f"{answer.url} lists an event without EventId, EventType or "
                    "Resources; the event is taken for no notice. The event is not "
                    "shown: metadata can hold secrets"
                )
    return events, odd


def metadata_url(environment: Mapping[str, str]) -> str:
    """The service's address: that in TFPREEMPT_AZURE_METADATA, or the usual one.

    Raises:
        ConfigurationError: the variable holds no host.
    """
    return url_from((HOST_VARIABLE,), environment)


class AzureWatch(TopicWatch):
    """Watches the events that are scheduled for this machine, each kind a source.

    Each event is a notice of its own, also while another is up: a preemption in 30 s
    follows a reboot in 15 min. The sources are called "azure:Preempt" and so on.

    Args:
        kinds: which kinds are notices: some of Preempt, Terminate, Reboot, Redeploy and
            Freeze. A freeze is a pause of seconds with memory kept, so it is left out
            by default.
        vm_name: the name by which events mean this machine; by default what the
            service says that it is.
        interval: seconds between two looks.
        **options: url, clock and wait, see `WatchOptions`.

    Raises:
        ConfigurationError: a kind is unknown, the address is none, or the interval is
            not positive.
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
        """Tells Azure not to wait any longer with the events that are scheduled now.

        It asks for them anew, so no source has to be open. It counts for all machines
        that an event names, so only the first of them does it: each worker may call
        this, after the commit that all have agreed on, and only if its owner wants to.
        Any thread; it takes at most 10 s.

        Returns:
            The ids that were acknowledged: those of the watch's kinds that name this
            machine first and have not started yet.

        Raises:
            NoticeError: the service has not accepted it; the events come anyway.
        """
        return self.poller().acknowledge()


class AzurePoller(Poller):
    """Asks for the events of one machine; the kinds are its topics.

    Args:
        watch: says where to ask for what.
        vm_name: this machine, or None to ask who it is.
    """

    def __init__(self, watch: TopicWatch, vm_name: str | None) -> None:
        super().__init__(watch)
        self._kinds = watch.topics
        self._vm_name = vm_name
        # One event that can't be read must not hide the others, nor slow the looks.
        self._oddities = FailureLog("azure:events")
        self._seconds = FIRST_REQUEST_SECONDS
        self._known: set[str] = set()

    def poll(self, report: Report) -> float:
        """Asks once, and reports what is scheduled for this machine."""
        listed = self._ask_events(self._seconds)
        self._seconds = REQUEST_SECONDS
        now = self._clock.wall()
        for kind in self._kinds:
            events = [event for event in listed if event.kind == kind]
            if not events or any(event.id not in self._known for event in events):
                # Another event while one is up is another change from quiet to notice.
                report(kind, None)
            if events:
                told = "; ".join(event.detail for event in events[:5])
                # One that has started leaves nothing.
                times = [
                    now if event.is_started else event.starts_at for event in events
                ]
                known = [time for time in times if time is not None]
                report(kind, Told(told, min(known, default=None)))
        self._known = {event.id for event in listed}
        return self._interval

    def acknowledge(self) -> tuple[str, ...]:
        """As that of the watch."""
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

    def _ask_events(self, seconds: float) -> list[Event]:
        """The events of these kinds for this machine."""
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
        """This machine's name, case-folded."""
        if self._vm_name is None:
            answer = self._request(NAME_TARGET, seconds)
            if not is_vm_name(answer.text()):
                raise _refused(answer, "this machine's name")
            self._vm_name = answer.text()
        return self._vm_name.casefold()

    def _request(self, target: str, seconds: float, body: bytes = b"") -> Answer:
        """A GET; a POST of a body, if there is one."""
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
    """Whether the service may have answered `NAME_TARGET` so."""
    return re.fullmatch(r"[\w.()-]{1,128}", text) is not None


def _refused(answer: Answer, expected: str) -> errors.NoticeError:
    return answer.refused(
        f"{expected}; elsewhere than on Azure leave this source out or set "
        f"{HOST_VARIABLE}"
    )
