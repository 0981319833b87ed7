"""The document of Azure's Scheduled Events, as frozen values."""

from __future__ import annotations

import dataclasses

from tfpreempt import errors
from tfpreempt.notice._http import printable
from tfpreempt.notice._times import epoch_seconds, readable

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
    starts_at = epoch_seconds(fields.get("NotBefore"))
    return Event(
        id=identity,
        kind=kind,
        is_started=fields["EventStatus"] == "Started",
        resources=tuple(str(each) for each in resources),
        not_before=_for_people(fields.get("NotBefore"), starts_at),
        starts_at=starts_at,
    )


def _for_people(text: object, seconds: float | None) -> str:
    """A time in one form, whichever of Azure's it came in."""
    try:
        return readable(seconds) if seconds is not None else str(text or "")
    except ValueError:
        return str(text)
