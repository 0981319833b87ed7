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
from typing import Unpack

from tfpreempt import errors
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.clock import Clock
from tfpreempt.notice.metadata import (
    Answer,
    MetadataSession,
    checked_base_url,
    epoch_seconds,
    printable,
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

_UP = ("Scheduled", "Started")  # other states are over


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event that is still ahead, or has started.

    Attributes:
        id: by which it is acknowledged.
        kind: such as "Preempt".
        is_started: whether it goes on already.
        resources: the machines that it is for.
        not_before: when it starts at the earliest, for people; "" once it has started.
        starts_at: the same in seconds since the Unix epoch; None if it is not known.
    """

    id: str
    kind: str
    is_started: bool
    resources: tuple[str, ...]
    not_before: str
    starts_at: float | None

    def names(self, machine: str) -> bool:
        """Whether it is for this machine; Azure's names ignore the case."""
        return machine.casefold() in self._folded()

    def is_led_by(self, machine: str) -> bool:
        """Whether this machine is the first of those that it is for."""
        return machine.casefold() in self._folded()[:1]

    def goes_at(self, now: float) -> float | None:
        """When the machine goes; one that has started leaves nothing.

        Args:
            now: in seconds since the Unix epoch, as is what is returned.
        """
        return now if self.is_started else self.starts_at

    def describe(self) -> str:
        """One line for people."""
        state = "has started" if self.is_started else "is scheduled"
        when = f", not before {self.not_before}" if self.not_before else ""
        return printable(f"{self.kind} {state}{when} (event {self.id})")

    def _folded(self) -> tuple[str, ...]:
        return tuple(each.casefold() for each in self.resources)


def read_events(
    document: object, url: str
) -> tuple[tuple[Event, ...], errors.NoticeError | None]:
    """The events of a document that are scheduled or started.

    Args:
        document: as it came from JSON.
        url: where from, for messages.

    Returns:
        The events, and what is wrong with the first one that was passed over, if any.

    Raises:
        NoticeError: it is no such document.
    """
    listed = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        said = printable(repr(document))
        raise errors.NoticeError(
            f"{url} answered {said}, expected an object with a list of Events; it is "
            "taken for no notice",
            said=said,
        )
    events: list[Event] = []
    odd: errors.NoticeError | None = None
    for fields in listed:
        event = _read_event(fields)
        if event is not None:
            events.append(event)
        elif not isinstance(fields, dict) or fields.get("EventStatus") in _UP:
            said = printable(repr(fields))
            odd = odd or errors.NoticeError(
                f"{url} has an event {said}, expected one with EventId, EventType and "
                "Resources; it is taken for no notice",
                said=said,
            )
    return tuple(events), odd


def _read_event(fields: object) -> Event | None:
    if not isinstance(fields, dict) or fields.get("EventStatus") not in _UP:
        return None
    identity, kind = fields.get("EventId"), fields.get("EventType")
    resources = fields.get("Resources")
    if not isinstance(identity, str) or not isinstance(kind, str):
        return None
    if not isinstance(resources, list):
        return None
    told = fields.get("NotBefore")
    starts_at = epoch_seconds(told)
    return Event(
        id=identity,
        kind=kind,
        is_started=fields["EventStatus"] == "Started",
        resources=tuple(str(each) for each in resources),
        not_before=str(told or "") if starts_at is None else readable(starts_at),
        starts_at=starts_at,
    )


def metadata_url(environment: Mapping[str, str] | None = None) -> str:
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
        url: host, host:port or http://host:port of the service; by default from
            the environment variable TFPREEMPT_AZURE_METADATA, or 169.254.169.254.
        interval: seconds between two looks.
        **options: clock, wait, jitter and close_limit, see `WatchOptions`.

    Raises:
        ConfigurationError: a kind is unknown, the address is none, or the interval is
            not positive.
    """

    def __init__(
        self,
        kinds: Iterable[str] = DEFAULT_KINDS,
        *,
        vm_name: str | None = None,
        url: str | None = None,
        interval: float = INTERVAL_SECONDS,
        **options: Unpack[WatchOptions],
    ) -> None:
        super().__init__("azure", kinds, KINDS, argument="kinds", **options)
        self._vm_name = vm_name
        self._url = metadata_url() if url is None else checked_base_url(url, "url")
        self._interval = check_seconds("the interval of AzureWatch", interval)

    def poller(self) -> AzurePoller:
        session = MetadataSession(self._url)
        return AzurePoller(
            session, self.topics, self._vm_name, self.clock, self._interval
        )

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
        session: its own, closed with it.
        kinds: which events count.
        vm_name: this machine, or None to ask who it is.
        clock: where times come from.
        interval: seconds between two looks.
    """

    def __init__(
        self,
        session: MetadataSession,
        kinds: Iterable[str],
        vm_name: str | None,
        clock: Clock,
        interval: float,
    ) -> None:
        super().__init__(session, "azure", kinds, interval)
        self._kinds = tuple(kinds)
        self._vm_name = vm_name
        self._clock = clock
        # One event that can't be read must not hide the others, nor slow the looks.
        self._oddities = FailureLog("azure:events", lambda failures: interval)
        self._seconds = FIRST_REQUEST_SECONDS
        self._known: frozenset[str] = frozenset()

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
                told = "; ".join(event.describe() for event in events[:5])
                times = [at for each in events if (at := each.goes_at(now)) is not None]
                report(kind, Told(told, min(times, default=None)))
        self._known = frozenset(event.id for event in listed)
        return self._interval

    def acknowledge(self) -> tuple[str, ...]:
        """As that of the watch."""
        seconds = ACKNOWLEDGE_SECONDS
        name = self._name(seconds)
        ids = tuple(
            event.id
            for event in self._ask_events(seconds)
            if event.is_led_by(name) and not event.is_started
        )
        if ids:
            body = {"StartRequests": [{"EventId": each} for each in ids]}
            self._request(EVENTS_TARGET, seconds, json.dumps(body).encode())
        return ids

    def _ask_events(self, seconds: float) -> tuple[Event, ...]:
        """The events of these kinds for this machine."""
        name = self._name(seconds)
        answer = self._request(EVENTS_TARGET, seconds)
        url = f"{self._session.base_url}{EVENTS_TARGET.partition('?')[0]}"
        listed, odd = read_events(answer.json(url), url)
        if odd is not None:
            self._oddities.note_failure(odd)
        else:
            self._oddities.note_success()
        return tuple(
            event for event in listed if event.kind in self._kinds and event.names(name)
        )

    def _name(self, seconds: float) -> str:
        if self._vm_name is None:
            answer = self._request(NAME_TARGET, seconds)
            name = answer.text()
            if not is_vm_name(name):
                expected = "this machine's name"
                raise _refused(self._session.base_url, NAME_TARGET, answer, expected)
            self._vm_name = name
        return self._vm_name

    def _request(
        self, target: str, seconds: float, body: bytes | None = None
    ) -> Answer:
        """A GET; a POST of a body, if there is one."""
        json_type = {"Content-Type": "application/json"}
        answer = self._session.request(
            target,
            method="GET" if body is None else "POST",
            headers=HEADERS if body is None else {**HEADERS, **json_type},
            body=body,
            seconds=seconds,
        )
        if answer.status != 200:
            expected = "200" if body is None else "200 for StartRequests"
            raise _refused(self._session.base_url, target, answer, expected)
        return answer


def is_vm_name(text: str) -> bool:
    """Whether the service may have answered `NAME_TARGET` so."""
    return re.fullmatch(r"[\w.()-]{1,128}", text) is not None


def _refused(
    base: str, target: str, answer: Answer, expected: str
) -> errors.NoticeError:
    said = repr(printable(answer.text(), 80))
    return errors.NoticeError(
        f"{base}{target.partition('?')[0]} answered with status {answer.status} and "
        f"{said}, expected {expected}; elsewhere than on Azure leave this source out "
        f"or set {HOST_VARIABLE}",
        said=said,
    )
