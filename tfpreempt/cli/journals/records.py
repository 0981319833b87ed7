"""Parses and validates the records of a run's journals.

A journal is not trusted: any process with write access may have changed it. Every field
must have the expected type and range; otherwise the record is corrupt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfpreempt.core.journal import parse_record
from tfpreempt.core.record_validation import validate_types

Events = Mapping[str, Mapping[str, str]]
"""The fields of every event, and their kinds (see `fields.is_kind`)."""

OF_WORKERS: Events = {
    "restored": {
        "step": "count",
        "path": "text?",
        "tier": "text?",
        "seconds": "seconds?",
        "process_seconds": "seconds?",
        "start": "text?",
        "reached": "count?",
        "world_size": "count?",
    },
    "firststep": {"step": "count"},
    "metrics": {"step": "count", "values": "object"},
    "notice": {"source": "text", "grace_seconds": "number?", "received_at": "number"},
    "decision": {},
    "commit": {
        "step": "count",
        "save_seconds": "seconds",
        "bytes": "count",
        "because": "text",
        "notice_to_commit_seconds": "seconds?",
        "step_seconds": "seconds?",
        "blocked_seconds": "seconds?",
    },
    "exit": {"outcome": "text", "step": "count", "code": "number?", "detail": "text?"},
    "fault": {"where": "text", "error": "text"},
}
_START = {"incarnation": "text", "workers": "workers", "first_worker": "count?"}
OF_SUPERVISORS: Events = {
    "started": _START,
    "restarted": _START,
    "worker_ended": {"incarnation": "text", "worker": "count", "returncode": "number"},
    "hang": {"incarnation": "text", "workers": "objects"},
    "budget": {"cause": "text", "is_used_up": "flag", "delay": "seconds?"},
    "exited": {"cause": "text", "code": "number"},
    "supervisor_terminated": {},
}
_OF_ALL = {"wall": "time", "monotonic": "seconds"}
_BY_WORKERS = {"worker": "count", "incarnation": "text"}
_BY_SUPERVISORS = {"supervisor": "text"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of a journal.

    Attributes:
        event: name of the event.
        wall: seconds since the epoch, on the clock of the writer's machine.
        monotonic: seconds on the monotonic clock of the writer's machine.
        at: corrected `wall`: differences between the clocks of the machines are
            removed. Equal to `wall` until the clocks have been compared.
        values: the event's known fields, if present.
    """

    event: str
    wall: float
    monotonic: float
    at: float
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a field, or None for a missing field."""
        return self.values.get(name)


def read_record(line: bytes, events: Events) -> Record | None:
    """Parses and validates a line of a journal.

    Args:
        line: text of the line.
        events: `OF_WORKERS` or `OF_SUPERVISORS`.

    Returns:
        The record. None for an unknown event, because newer versions of tfpreempt may
        write more events.

    Raises:
        ValueError: the line is corrupt.
    """
    raw = parse_record(line)
    if raw is None:
        raise ValueError("the line is not a complete record")
    event = raw.get("event")
    if not isinstance(event, str) or event not in events:
        return None
    writer = _BY_WORKERS if events is OF_WORKERS else _BY_SUPERVISORS
    fields = {**events[event], **writer}
    if not validate_types(raw, {**fields, **_OF_ALL}):
        raise ValueError(f"a field of the record {event!r} has an unexpected value")
    values = {name: raw[name] for name in fields if name in raw}
    if event == "commit" and values.get("blocked_seconds") is None:
        # Synchronous save: training waited for all of it.
        values["blocked_seconds"] = values["save_seconds"]
    return Record(
        event=event,
        wall=float(raw["wall"]),
        monotonic=float(raw["monotonic"]),
        at=float(raw["wall"]),
        values=values,
    )
