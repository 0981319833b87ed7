"""What the story takes of a journal's records, checked: they are read from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tfpreempt.core.fields import are_kinds
from tfpreempt.core.journal import JournalFile

_FIELDS: dict[str, dict[str, str]] = {
    "started": {"supervisor": "text", "incarnation": "text", "workers": "workers"},
    "restarted": {"supervisor": "text", "incarnation": "text", "workers": "workers"},
    "worker_ended": {"incarnation": "text", "worker": "count", "code": "number"},
    "budget": {"cause": "text"},
    "hang": {"incarnation": "text", "workers": "objects"},
    "left": {"cause": "text", "code": "number"},
    "supervisor_died": {},
    "restored": {
        "step": "count",
        "path": "text?",
        "tier": "text?",
        "seconds": "seconds?",
        "process_seconds": "seconds?",
        "start": "text?",
        "reached": "count?",
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
    "exit": {"outcome": "text", "step": "count", "code": "number?"},
    "fault": {"where": "text", "error": "text"},
}
_OF_A_WORKER = {"worker": "count", "incarnation": "text"}
_OF_A_SUPERVISOR = {"supervisor": "text"}
_BY_SUPERVISORS = {
    "started",
    "restarted",
    "worker_ended",
    "budget",
    "hang",
    "left",
    "supervisor_died",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record that the story is told by.

    Attributes:
        event: what happened.
        wall: seconds since the epoch, by the writer's clock.
        monotonic: seconds of the writer's machine.
        file: name of the file.
        values: the others, each of the kind that is expected; None where it is missing
            and may be.
    """

    event: str
    wall: float
    monotonic: float
    file: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def supervisor(self) -> str | None:
        """Who wrote it, if it was a supervisor."""
        return self.values.get("supervisor")


def take_records(files: Iterable[JournalFile]) -> tuple[list[Record], list[str]]:
    """The records of all files, each file's in its order, and what is wrong with them.

    Events of other names are passed over: newer versions may have more.
    """
    records, warnings = [], []
    for file in files:
        misfits = 0
        for raw in file.records:
            if str(raw.get("event")) not in _FIELDS:
                continue
            record = _take(raw, file.path.name)
            if record is None:
                misfits += 1
            else:
                records.append(record)
        if bad := file.damaged + misfits:
            warnings.append(
                f"{file.path.name}: {bad} line(s) are damaged, as the end of a file is "
                "after a kill; they are left out"
            )
    return records, warnings


def _take(raw: Mapping[str, Any], file: str) -> Record | None:
    """The record; None where a value is not of its kind."""
    event = raw["event"]
    of_all = _OF_A_SUPERVISOR if event in _BY_SUPERVISORS else _OF_A_WORKER
    fields = _FIELDS[event] | of_all
    values = {name: raw.get(name) for name in fields}
    if not are_kinds(raw, fields | {"wall": "time", "monotonic": "seconds"}):
        return None
    return Record(
        event=event,
        wall=float(raw["wall"]),
        monotonic=float(raw["monotonic"]),
        file=file,
        values=values,
    )
