"""Sizes and seconds: as people read them, and as they write them in an option."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def size_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


class Size(click.ParamType[int]):
    """A number of bytes, such as 1GiB; a letter alone is as in `du -h`: G is GiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(value).strip())
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or float(match[1]) * unit < 1:
            self.fail(
                f"{value!r} is no size. Write it like 256MiB, 2G (GiB) or 1.5GB.", param
            )
        return int(float(match[1]) * unit)


class Seconds(click.FloatRange):
    """A finite number of seconds, 0 or more: a range alone lets NaN through."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds.", param, ctx)
        return seconds
