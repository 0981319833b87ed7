"""Formats sizes and durations, and parses them in command-line options."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_TOO_LARGE = 1 << 63
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?")


def size_text(count: float) -> str:
    """Returns a number of bytes as text, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds_text(seconds: float) -> str:
    """Returns a duration as text, such as "34.2 s" or "2 h 5 min"."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.3g} s" if seconds < 99.5 else age_text(seconds)


def age_text(seconds: float) -> str:
    """Returns a duration in whole seconds as text, such as "34 s" or "2 h 5 min"."""
    left, words = max(0, round(seconds)), []
    for unit, name in _UNITS:
        if left >= unit:
            words.append(f"{left // unit} {name}")
            left %= unit
    return " ".join([*words, f"{left} s"][:2])


class Size(click.ParamType[int]):
    """Type of an option for a number of bytes, such as 1GiB.

    A unit of one letter is a power of 1024, as in `du -h`: G is GiB.
    """

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        match, size = _SIZE.fullmatch(str(value).strip().upper()), 0.0
        if match:
            base = 1000 if match[3] == "B" else 1024
            size = float(match[1]) * base ** " KMGT".index(match[2] or " ")
        if not 1 <= size < _TOO_LARGE:
            self.fail(
                f"{value!r} is not a size. Expected, for example, 256MiB, 2G or 1.5GB.",
                param,
            )
        return int(size)


class Seconds(click.FloatRange):
    """Type of an option for a finite number of seconds.

    (The number type of click would accept NaN.)

    Args:
        least: smallest valid number of seconds.
    """

    name = "seconds"

    def __init__(self, least: float = 0) -> None:
        super().__init__(min=least)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds.", param, ctx)
        return seconds
