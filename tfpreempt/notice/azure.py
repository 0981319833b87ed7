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
import threading
from collections.abc import Callable, Iterable, Mapping

from tfpreempt import errors
from tfpreempt.clock import Clock, SystemClock
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
TOPIC = "scheduled-events"
# A Spot machine has 30 s from its event on: Microsoft recommends to look each second.
INTERVAL_SECONDS = 1.0
FIRST_LIMITS = Limits(total_seconds=150.0)
LIMITS = Limits(total_seconds=10.0)


def metadata_url(environment: Mapping[str, str] | None = None) -> str:
    """The service's address: that in TFPREEMPT_AZURE_METADATA, or the usual one.

    Raises:
        ConfigurationError: the variable holds no host.
    """
    variables = os.environ if environment is None else environment
    text = variables.get(HOST_VARIABLE, "").strip()
    return checked_base_url(text, HOST_VARIABLE) if text else DEFAULT_URL


class AzureWatch:
    """Watches the events that are scheduled for this machine.

    Each event is a notice of its own, also while another is up: a preemption in 30 s
    follows a reboot in 15 min.

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
        self._base = metadata_url() if url is None else checked_base_url(url, "url")
        seconds = checked_interval("AzureWatch", interval)
        asking_clock = SystemClock() if clock is None else clock
        self._lock = threading.Lock()
        self._led: tuple[Event, ...] = ()
        self._shared = SharedWatch(
            "azure",
            {TOPIC: f"azure:{TOPIC}"},
            lambda: AzureAsker(
                MetadataSession(self._base),
                chosen,
                vm_name,
                asking_clock,
                seconds,
                self._keep,
            ),
            clock=asking_clock,
            wait=wait,
            jitter=jitter,
            close_limit=close_limit,
        )

    def source(self) -> NoticeSource:
        """A new source."""
        return self._shared.source(TOPIC)

    def acknowledge(self) -> tuple[str, ...]:
        """Tells Azure not to wait any longer with the events that were reported.

        It counts for all machines that an event names, so only the first of them does
        it: each worker may call this, after the commit that all have agreed on, and
        only if its owner wants to. Any thread; it takes at most 10 s.

        Returns:
            The ids that were acknowledged: those that name this machine first and have
            not started yet.

        Raises:
            NoticeError: the service has not accepted it; the events come anyway.
        """
        with self._lock:
            ids = tuple(each.id for each in self._led if not each.is_started)
        if not ids:
            return ()
        body = json.dumps({"StartRequests": [{"EventId": each} for each in ids]})
        session = MetadataSession(self._base)
        try:
            answer = session.request(
                EVENTS_TARGET,
                method="POST",
                headers={**HEADERS, "Content-Type": "application/json"},
                body=body.encode(),
                limits=LIMITS,
            )
        finally:
            session.close()
        if answer.status != 200:
            raise _refused(self._base, EVENTS_TARGET, answer, "200 for StartRequests")
        return ids

    def _keep(self, led: tuple[Event, ...]) -> None:
        with self._lock:
            self._led = led


class AzureAsker:
    """Asks for the events of one machine.

    Args:
        session: its own, closed with it.
        kinds: which events count.
        vm_name: this machine, or None to ask who it is.
        clock: where times come from.
        interval: seconds between two looks.
        keep: called with the events that are up and name this machine first, before
            they are reported.
    """

    def __init__(
        self,
        session: MetadataSession,
        kinds: Iterable[str],
        vm_name: str | None,
        clock: Clock,
        interval: float,
        keep: Callable[[tuple[Event, ...]], None],
    ) -> None:
        self._session = session
        self._kinds = frozenset(kinds)
        self._vm_name = vm_name
        self._clock = clock
        self._interval = interval
        self._keep = keep
        self._limits = FIRST_LIMITS
        # One event that can't be read must not hide the others, nor slow the looks.
        self._oddities = FaultLog(f"azure:{TOPIC}", lambda failures: interval)
        self._known: frozenset[str] = frozenset()

    def ask(self, report: Report) -> float:
        """Asks once, and reports what is scheduled for this machine."""
        name = self._name()
        answer = self._get(EVENTS_TARGET)
        self._limits = LIMITS
        url = f"{self._session.base_url}{EVENTS_TARGET.partition('?')[0]}"
        listed, odd = read_events(answer.json(url), url)
        if odd is not None:
            self._oddities.note_failure(odd)
        else:
            self._oddities.note_success()
        events = tuple(
            event for event in listed if event.kind in self._kinds and event.names(name)
        )
        new = [event for event in events if event.id not in self._known]
        self._known = frozenset(event.id for event in events)
        self._keep(tuple(event for event in events if event.is_led_by(name)))
        if new or not events:
            # Another event while one is up is another change from quiet to notice.
            report(TOPIC, None)
        if new:
            told = "; ".join(event.describe() for event in new[:5])
            now = self._clock.wall()
            times = [at for each in new if (at := each.goes_at(now)) is not None]
            report(TOPIC, Told(told, min(times, default=None)))
        return self._interval

    def fault(self, topic: str) -> str:
        return ""  # all that keeps it from being seen is raised

    def close(self) -> None:
        self._session.close()

    def _name(self) -> str:
        if self._vm_name is None:
            answer = self._get(NAME_TARGET)
            name = answer.text()
            if not is_vm_name(name):
                expected = "this machine's name"
                raise _refused(self._session.base_url, NAME_TARGET, answer, expected)
            self._vm_name = name
        return self._vm_name

    def _get(self, target: str) -> Answer:
        answer = self._session.request(target, headers=HEADERS, limits=self._limits)
        if answer.status != 200:
            raise _refused(self._session.base_url, target, answer, "200")
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
