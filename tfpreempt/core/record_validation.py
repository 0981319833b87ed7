"""Validation of values read from a file that any user may have written.

Commands read journals of other machines, long after the journals were written, and
every process with write access can write any value. So every field has a kind, such as
"count", with bounds. If the value is inside the bounds, a command can safely compute
with the value, show it, or use it as a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_WORKERS = 1 << 10
"""Largest valid number of workers of one supervisor, all on one machine."""

_LARGEST = 1e15
"""Largest valid number of steps or bytes."""

_LEAST = 1e-100
"""Smallest valid number above 0: a quotient of two valid numbers is finite."""

_LONGEST = 1e10
"""Largest valid duration in seconds: 300 years."""

_LATEST = 1e11
"""Latest valid time in seconds since the epoch. `datetime` has a date for this time,
even if the duration `_LONGEST` is added."""


def is_number(value: Any) -> bool:
    """Returns whether a value is 0, or a number from `_LEAST` to `_LARGEST`, with
    either sign, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or _LEAST <= abs(value) <= _LARGEST


def is_time(value: Any) -> bool:
    """Returns whether a value is a time in seconds since 1970, from 0 to `_LATEST`."""
    return is_number(value) and 0 <= value <= _LATEST


def is_kind(value: Any, kind: str) -> bool:
    """Returns whether a value is a valid value of a kind.

    Args:
        value: value parsed from JSON.
        kind: "text", "flag" (a bool), "number", "count" (an int from 0 on), "workers"
            (a number of workers), "seconds" (a duration), "time" (since the epoch),
            "object", or "objects" (a list of objects). If the kind ends in "?", such as
            "text?", None is valid too.

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
    """Returns whether the values of a record have the kinds of their fields.

    Args:
        values: values by field name; a missing field counts as None, a further field is
            ignored.
        kinds: kind of every field, see `is_kind`.
    """
    return all(is_kind(values.get(name), kind) for name, kind in kinds.items())
