"""Checks of arguments; an error message has the received and the expected value."""

from __future__ import annotations

import datetime
import math
import numbers
from typing import Any

from tfpreempt import errors

Grace = float | datetime.timedelta | None
"""A grace period: seconds or a timedelta; None or 0: unknown."""


def is_period(value: Any) -> bool:
    """Returns whether a value is a valid period: an int from 1 on, a positive
    timedelta, or None."""
    if isinstance(value, datetime.timedelta):
        return value.total_seconds() > 0
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value is None or (is_count and value >= 1)


def check_save_freq(value: Any) -> int | datetime.timedelta | None:
    """Returns `value` if it is a valid `save_freq`.

    Raises:
        ConfigurationError: the value is invalid.
    """
    if not is_period(value):
        raise errors.ConfigurationError(
            f"save_freq is {value!r}; expected a number of steps (an int from 1 on), a "
            "positive datetime.timedelta, or None for notices only"
        )
    period: int | datetime.timedelta | None = value
    return period


def is_seconds(value: Any) -> bool:
    """Returns whether a value is a finite number of seconds, 0 or more.

    NumPy scalars are accepted, True and False are not.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def check_seconds(name: str, value: Any) -> float:
    """Checks a duration in seconds, such as a timeout, and returns it as a float.

    Args:
        name: name of the user's argument, for the error message.
        value: value of the user's argument.

    Raises:
        ConfigurationError: the value is not a positive, finite number.
    """
    if not is_seconds(value) or not value:
        raise errors.ConfigurationError(
            f"{name} is {value!r}; expected a positive, finite number of seconds"
        )
    return float(value)


def check_timeout(value: Any) -> None:
    """Checks the argument `timeout` of a method that waits.

    Raises:
        ConfigurationError: the value is neither None nor a finite number of seconds, 0
            or more.
    """
    if value is not None and not is_seconds(value):
        raise errors.ConfigurationError(
            f"timeout is {value!r}; expected a finite number of seconds, 0 or more, "
            "or None for no timeout"
        )


def check_metrics(metrics: Any) -> dict[str, float]:
    """Returns the metrics of a step as floats, by name.

    Raises:
        ConfigurationError: the argument is no mapping from names to numbers.
    """
    try:
        found = dict(metrics)
        if all(isinstance(name, str) for name in found) and not any(
            isinstance(value, bool | str | bytes) for value in found.values()
        ):
            return {name: float(value) for name, value in found.items()}
        raise TypeError("a name is no text, or a value is no number")
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.ConfigurationError(
            f"metrics is {metrics!r:.200}; expected a dict of numbers by name, such as "
            '{"val_loss": 0.3}'
        ) from error


def check_grace(grace: Any, name: str = "grace_period") -> float | None:
    """Returns a grace period in seconds; None for 0 and None, which mean unknown.

    Args:
        grace: seconds, a timedelta or None.
        name: name of the user's argument, for the error message.

    Raises:
        ConfigurationError: the grace period is negative, not finite, or no number.
    """
    if isinstance(grace, datetime.timedelta):
        grace = grace.total_seconds()
    if grace is not None and not is_seconds(grace):
        raise errors.ConfigurationError(
            f"{name} is {grace!r}; expected a finite number of seconds from 0 on, a "
            "datetime.timedelta, or None if unknown"
        )
    return float(grace) if grace else None
