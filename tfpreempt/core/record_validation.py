"""Validation of values read from a file that any user may have written.

Commands read a journal on other machines and long after the journal was written, and
every process with write access can write any value. So every field has a kind, with
bounds: within the bounds a reader can compute with the value, show the value, or use
the value as a count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST_WORKERS = 1 << 10
"""Largest number of workers of one supervisor, all on one machine."""

_LARGEST = 1e15
"""Largest valid number of steps or bytes."""

_LONGEST = 1e10
"""Largest valid duration in seconds: 300 years."""

_LATEST = 1e11
"""Latest valid time in seconds since the epoch: after an added `_LONGEST`, `datetime`
still has a date for the time."""


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and not too large to compute with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST and math.isfinite(value)


def is_time(value: Any) -> bool:
    """Returns whether a value is a time in seconds since 1970 with a calendar date."""
    return is_number(value) and 0 <= value <= _LATEST


def is_kind(value: Any, kind: str) -> bool:
    """Returns whether a value is of a kind.

    Args:
        value: value parsed from JSON.
        kind: "text", "flag", "number", "count", "workers" (a number of workers),
            "seconds" (a duration), "time" (since the epoch), "object", or "objects" (a
            list of objects). With "?" appended, such as "text?", None is valid too.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind.endswith("?"):
        return value is None or is_kind(value, kind[:-1])
    match kind:
        case "text":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "objects":
            return isinstance(value, list) and all(isinstance(e, dict) for e in value)
        case "count":
            return type(value) is int and 0 <= value <= _LARGEST
        case "workers":
            return type(value) is int and 0 <= value <= MOST_WORKERS
        case "seconds":
            return is_number(value) and 0 <= value <= _LONGEST
        case "time":
            return is_time(value)
        case "number":
            return is_number(value)
    raise ValueError(f"{kind!r} is no kind of a field")


def validate_types(values: Mapping[str, Any], kinds: Mapping[str, str]) -> bool:
    """Returns whether every value is of the kind of its field.

    A missing field counts as None.
    """
    return all(is_kind(values.get(name), kind) for name, kind in kinds.items())
