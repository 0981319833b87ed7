"""Defines the names of the keys, and the text that is stored under every key.

A name is `tfpreempt/<incarnation>/<round>/<key>[/<worker>]`; the incarnation names one
start of all workers. A value is a JSON object: it has the fields of the agreement, and
extra fields, such as the seconds until a deadline, or a reason for people.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tfpreempt.coordination.protocol_types import (
    CommitKind,
    DecidedStep,
    Key,
    NoticeKind,
    StepCount,
    Tombstone,
)
from tfpreempt.errors import CoordinationError

Extra = dict[str, Any]
_SECONDS = ("age", "remaining", "save_seconds")  # extra fields that must be finite


def name(incarnation: str, round: int, key: Key, worker: int | None = None) -> str:
    """Returns the name of a key.

    Args:
        incarnation: name of this start of all workers.
        round: number of the round.
        key: kind of the key.
        worker: index of the worker, for a key that exists once per worker.
    """
    tail = "" if worker is None else f"/{worker}"
    return f"tfpreempt/{incarnation}/{round}/{key.value}{tail}"


def encode(value: Any, extra: Extra | None = None) -> str:
    """Returns the text to store for a value of the agreement.

    Args:
        value: a NoticeKind, CommitKind, StepCount, Tombstone, DecidedStep or bool.
        extra: extra fields.
    """
    match value:
        case NoticeKind() | CommitKind():
            fields: Extra = {"kind": value.value}
        case StepCount(count, final):
            fields = {"count": count, "final": final}
        case Tombstone():
            fields = {"tombstone": True}
        case DecidedStep(boundary):
            fields = {"boundary": boundary}
        case bool():
            fields = {"ok": value}
        case _:
            raise TypeError(f"no encoding for {value!r}")
    return json.dumps({**(extra or {}), **fields})


def decode(key: Key, text: str) -> tuple[Any, Extra]:
    """Returns the value of the agreement in a stored text, and all fields of the text.

    Args:
        key: kind of the key.
        text: text that is stored under the key.

    Raises:
        CoordinationError: the text is not a value that this version can write.
    """
    try:
        fields: Extra = json.loads(text)
        for what in _SECONDS:
            if fields.get(what) is not None and not math.isfinite(fields[what]):
                raise ValueError(f"{what} is {fields[what]}")
        if fields.get("tombstone"):
            return Tombstone(), fields
        match key:
            case Key.NOTICE:
                return NoticeKind(fields["kind"]), fields
            case Key.COMMIT:
                return CommitKind(fields["kind"]), fields
            case Key.COUNT:
                return StepCount(int(fields["count"]), bool(fields["final"])), fields
            case Key.DECISION:
                at = fields["boundary"]
                return DecidedStep(None if at is None else int(at)), fields
            case _:
                return bool(fields["ok"]), fields
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise CoordinationError(
            f"the key {key.value!r} holds {text[:200]!r}, which is not a value of the "
            "agreement; do all workers run the same version of tfpreempt?"
        ) from error
