"""Notices from Azure's Scheduled Events.

Events are sent to all machines of a group, so only those that name this one count. The
service is turned on by the first question, which may take two minutes; nobody waits for
that but this source's own thread.

Protocol: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping

from tfpreempt import errors
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.notice._azure_events import Event, read_events
from tfpreempt.notice._faults import FaultLog
from tfpreempt.notice._http import (
    Answer,
    Limits,
    MetadataSession,
    checked_base_url,
    printable,
)
from tfpreempt.notice._polling import (
    CLOSE_LIMIT_SECONDS,
    Wait,
    checked_interval,
    wait_event,
)
from tfpreempt.notice._shared import Jitter, Report, SharedWatch, checked_topics
from tfpreempt.notice.source import NoticeSource, Told

HOST_VARIABLE = "TFPREEMPT_AZURE_METADATA"
DEFAULT_URL = "http://169.254.169.254"
EVENTS_TARGET = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_TARGET = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}

KINDS = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
DEFAULT_KINDS = KINDS[:-1]
# A Spot machine has 30 s from its event on: Microsoft recommends to look each second.
INTERVAL_SECONDS = 1.0
FIRST_LIMITS = Limits(total_seconds=150.0)
LIMITS = Limits(total_seconds=10.0)
# Three questions, of a grace of 30 s.
ACKNOWLEDGE_LIMITS = Limits(total_seconds=3.0)


def metadata_url(environment: Mapping[str, str] | None = None) -> str:
    """The service's address: that in TFPREEMPT_AZURE_METADATA, or the usual one.

    Raises:
        ConfigurationError: the variable holds no host.
    """
    variables = os.environ if environment is None else environment
    text = variables.get(HOST_VARIABLE, "").strip()
    return checked_base_url(text, HOST_VARIABLE) if text else DEFAULT_URL


class AzureWatch:
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
        clock: where times come from.
        wait: how to wait between looks; tests pass that of a fake clock.
        jitter: spreads the pauses after failures; returns 0 to below 1.
        close_limit: seconds for which the last `close()` waits for the thread.

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
        clock: Clock | None = None,
        wait: Wait = wait_event,
        jitter: Jitter = random.random,
        close_limit: float = CLOSE_LIMIT_SECONDS,
    ) -> None:
        chosen = checked_topics(kinds, KINDS, "AzureWatch", argument="kinds")
        base = metadata_url() if url is None else checked_base_url(url, "url")
        seconds = checked_interval("AzureWatch", interval)
        asking_clock = SystemClock() if clock is None else clock
        self._make_asker: Callable[[], AzureAsker] = lambda: AzureAsker(
            MetadataSession(base), chosen, vm_name, asking_clock, seconds
        )
        self._shared = SharedWatch(
            "azure",
            {kind: f"azure:{kind}" for kind in chosen},
            self._make_asker,
            clock=asking_clock,
            wait=wait,
            jitter=jitter,
            close_limit=close_limit,
        )

    def source(self, kind: str) -> NoticeSource:
        """A new source of one kind.

        Raises:
            ConfigurationError: the watch was made without this kind.
        """
        return self._shared.source(kind)

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
        asker = self._make_asker()
        try:
            return asker.acknowledge()
        finally:
            asker.close()


class AzureAsker:
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
        self._session = session
        self._kinds = tuple(kinds)
        self._vm_name = vm_name
        self._clock = clock
        self._interval = interval
        # One event that can't be read must not hide the others, nor slow the looks.
        self._oddities = FaultLog("azure:events", lambda failures: interval)
        self._limits = FIRST_LIMITS
        self._known: frozenset[str] = frozenset()

    def ask(self, report: Report) -> float:
        """Asks once, and reports what is scheduled for this machine."""
        listed = self._ask_events(self._limits)
        self._limits = LIMITS
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
        limits = ACKNOWLEDGE_LIMITS
        name = self._name(limits)
        ids = tuple(
            event.id
            for event in self._ask_events(limits)
            if event.is_led_by(name) and not event.is_started
        )
        if ids:
            body = {"StartRequests": [{"EventId": each} for each in ids]}
            self._request(EVENTS_TARGET, limits, json.dumps(body).encode())
        return ids

    def fault(self, topic: str) -> str:
        return ""  # all that keeps it from being seen is raised

    def close(self) -> None:
        self._session.close()

    def _ask_events(self, limits: Limits) -> tuple[Event, ...]:
        """The events of these kinds for this machine."""
        name = self._name(limits)
        answer = self._request(EVENTS_TARGET, limits)
        url = f"{self._session.base_url}{EVENTS_TARGET.partition('?')[0]}"
        listed, odd = read_events(answer.json(url), url)
        if odd is not None:
            self._oddities.note_failure(odd)
        else:
            self._oddities.note_success()
        return tuple(
            event for event in listed if event.kind in self._kinds and event.names(name)
        )

    def _name(self, limits: Limits) -> str:
        if self._vm_name is None:
            answer = self._request(NAME_TARGET, limits)
            name = answer.text()
            if not is_vm_name(name):
                expected = "this machine's name"
                raise _refused(self._session.base_url, NAME_TARGET, answer, expected)
            self._vm_name = name
        return self._vm_name

    def _request(
        self, target: str, limits: Limits, body: bytes | None = None
    ) -> Answer:
        """A GET; a POST of a body, if there is one."""
        json_type = {"Content-Type": "application/json"}
        answer = self._session.request(
            target,
            method="GET" if body is None else "POST",
            headers=HEADERS if body is None else {**HEADERS, **json_type},
            body=body,
            limits=limits,
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
