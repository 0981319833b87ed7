"""Key names and the text that keys hold.

Names are `tfpreempt/<incarnation>/<round>/<key>[/<worker>]`; values are JSON objects:
what the agreement needs, and beside it what people and deadlines need.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tfpreempt.coordination.events import (
    CommitKind,
    Count,
    Decided,
    Key,
    NoticeKind,
    Tombstone,
)
from tfpreempt.errors import CoordinationError

Extra = dict[str, Any]
_SECONDS = ("age", "remaining", "save_seconds")  # that travel beside a value


def name(incarnation: str, round: int, key: Key, worker: int | None = None) -> str:
    """The name of a key of a round."""
    tail = "" if worker is None else f"/{worker}"
    return f"tfpreempt/{incarnation}/{round}/{key.value}{tail}"


def encode(value: Any, extra: Extra | None = None) -> str:
    """A value of the agreement as text."""
    match value:
        case NoticeKind() | CommitKind():
            fields: Extra = {"kind": value.value}
        case Count(count, final):
            fields = {"count": count, "final": final}
        case Tombstone():
            fields = {"tombstone": True}
        case Decided(boundary):
            fields = {"boundary": boundary}
        case bool():
            fields = {"ok": value}
        case _:
            raise TypeError(f"no encoding for {value!r}")
    return json.dumps({**(extra or {}), **fields})


def decode(key: Key, text: str) -> tuple[Any, Extra]:
    """The value and what travels beside it.

    Raises:
        CoordinationError: the text is not what this version of tfpreempt writes.
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
                return Count(int(fields["count"]), bool(fields["final"])), fields
            case Key.DECISION:
                at = fields["boundary"]
                return Decided(None if at is None else int(at)), fields
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
