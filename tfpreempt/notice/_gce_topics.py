"""What the entries of GCE's metadata server say, and how they say that all is quiet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tfpreempt import errors
from tfpreempt.notice._http import printable
from tfpreempt.notice._times import epoch_seconds
from tfpreempt.notice.source import Told

ABSENT = object()
"""What `pick()` returns for an entry that is not there."""

Read = Callable[[object, float], Told | None]
"""Takes the entry's value and the wall time; returns the notice if any."""

_NO_MAINTENANCE = {"COMPLETED", "CANCELED", "CANCELLED", "NONE", "UNKNOWN", ""}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One entry.

    Attributes:
        path: below the root, with a "/" at its end if it is a directory.
        read: what its value means.
        is_404_normal: whether this status is one of its ways to say nothing; every
            machine has the others.
        is_503_normal: the same of this status.
    """

    path: str
    read: Read
    is_404_normal: bool = False
    is_503_normal: bool = False


def read_preempted(value: object, now: float) -> Told | None:
    """instance/preempted: FALSE, then TRUE for good."""
    return _read_word("preempted", value, up={"TRUE"}, quiet={"FALSE", "NONE", ""})


def read_maintenance_event(value: object, now: float) -> Told | None:
    """instance/maintenance-event: a migration is no end."""
    return _read_word(
        "maintenance-event",
        value,
        up={"TERMINATE_ON_HOST_MAINTENANCE"},
        quiet={"NONE", "MIGRATE_ON_HOST_MAINTENANCE", ""},
    )


def read_stop_state(value: object, now: float) -> Told | None:
    """instance/shutdown-details/stop-state: a graceful shutdown."""
    return _read_word(
        "stop-state",
        value,
        up={"PENDING_STOP", "STOPPING"},
        quiet={"UNSPECIFIED", "STOP_STATE_UNSPECIFIED", "NONE", ""},
    )


def read_upcoming_maintenance(value: object, now: float) -> Told | None:
    """instance/upcoming-maintenance/: an object, in one of two spellings.

    Nothing is said by {}, "NONE", an object with an error, or empty fields; nor by a
    maintenance that is over, by its status or by the end of its window. Without a
    status the window decides alone.

    Raises:
        NoticeError: the status is none that is known.
    """
    if not isinstance(value, dict):
        _read_word("upcoming-maintenance", value, up=set(), quiet={"NONE", ""})
        return None
    fields = {_squash(str(name)): each for name, each in value.items()}
    status = str(fields.get("maintenancestatus") or "").strip().upper()
    start, end = (fields.get(f"window{side}time") for side in ("start", "end"))
    told = _read_word(
        "upcoming-maintenance", status, up={"PENDING", "ONGOING"}, quiet=_NO_MAINTENANCE
    )
    begins, ends = epoch_seconds(start), epoch_seconds(end)
    if told is None:
        if status not in {"UNKNOWN", ""} or not start:
            return None
        ends = begins if ends is None else ends
    if ends is not None and ends <= now:
        return None
    kind = fields.get("maintenancetype") or fields.get("type") or "UNKNOWN"
    detail = (
        f"upcoming-maintenance is {status or 'PENDING'}, type {kind}, "
        f"window {start or '?'} to {end or '?'}"
    )
    return Told(printable(detail), now if status == "ONGOING" else begins)


TOPICS: Mapping[str, Topic] = {
    "preempted": Topic(path="instance/preempted", read=read_preempted),
    "maintenance-event": Topic(
        path="instance/maintenance-event", read=read_maintenance_event
    ),
    "upcoming-maintenance": Topic(
        path="instance/upcoming-maintenance/",
        read=read_upcoming_maintenance,
        is_404_normal=True,
        is_503_normal=True,
    ),
    "stop-state": Topic(
        path="instance/shutdown-details/stop-state",
        read=read_stop_state,
        is_404_normal=True,
    ),
}


def pick(tree: Mapping[str, object], path: str) -> object:
    """An entry of a recursive answer, whose names may be in camelCase.

    Args:
        tree: the answer.
        path: the entry's path below it.

    Returns:
        Its value, or `ABSENT`.
    """
    at: object = tree
    for name in path.strip("/").split("/"):
        if not isinstance(at, Mapping):
            return ABSENT
        spelled = {_squash(str(key)): key for key in at}
        if _squash(name) not in spelled:
            return ABSENT
        at = at[spelled[_squash(name)]]
    return at


def _squash(name: str) -> str:
    """One form of camelCase, snake_case and dashed names."""
    return name.replace("-", "").replace("_", "").lower()


def _read_word(
    topic: str, value: object, *, up: set[str], quiet: set[str]
) -> Told | None:
    """A notice if the word is among `up`.

    Raises:
        NoticeError: it is no word that is known.
    """
    word = "" if value is None else str(value).strip().upper()
    if word in up:
        return Told(f"{topic} is {word}")
    if word not in quiet:
        said = repr(printable(str(value)))
        raise errors.NoticeError(
            f"the metadata server says {said} for {topic}, expected one of "
            f"{sorted(up | quiet - {''})}; it is taken for no notice",
            said=said,
        )
    return None
