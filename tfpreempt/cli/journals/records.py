"""Parses and validates the records of a run's journals.

A journal is not trusted, because any process with write access may have changed it. If
a field has an unexpected type or is out of range, the record counts as corrupt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfpreempt.core.journal import parse_record
from tfpreempt.core.record_validation import validate_types

Events = Mapping[str, Mapping[str, str]]
"""For every event: the kind of every field (see `record_validation.is_kind`)."""

_EXIT = {"code": "number?", "detail": "text?", "is_permanent": "flag?"}
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
    "exit": {"outcome": "text", "step": "count", **_EXIT},
    "fault": {"where": "text", "error": "text"},
    "badstep": {
        "fit": "count",
        "epoch": "count",
        "batch": "count",
        "reason": "text",
        "is_crash": "flag",
        "is_sought": "flag?",
        "replaces": "time?",
        "found_at": "time?",
    },
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
        wall: time of the record in seconds since the epoch, on the wall clock of the
            machine that wrote the record.
        monotonic: time of the record on the monotonic clock of this machine.
        at: time of the record in seconds since the epoch, after a correction for the
            differences between the machines' clocks; before the correction, `wall`.
        values: values of the record's known fields.
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
        The record; None for an unknown event, which a newer version of tfpreempt may
        have written.

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
        # A synchronous save: training waited for the complete save.
        values["blocked_seconds"] = values["save_seconds"]
    return Record(
        event=event,
        wall=float(raw["wall"]),
        monotonic=float(raw["monotonic"]),
        at=float(raw["wall"]),
        values=values,
    )
