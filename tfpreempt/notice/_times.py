"""Times as the clouds write them."""

from __future__ import annotations

import datetime
import email.utils


def epoch_seconds(text: object) -> float | None:
    """Seconds since the Unix epoch of a time in RFC 3339 or RFC 1123; None if none.

    A time without a zone is one of UTC.
    """
    if not isinstance(text, str):
        return None
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return when.timestamp()


def readable(seconds: float) -> str:
    """In UTC, as in RFC 3339.

    Raises:
        ValueError: before the year 1, or after 9999.
    """
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    try:
        when = epoch + datetime.timedelta(seconds=seconds)
    except OverflowError as error:
        raise ValueError(f"{seconds} s is not within the calendar") from error
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
