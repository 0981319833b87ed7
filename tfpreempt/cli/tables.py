"""A console of the package rich that escapes control characters; see `terminal`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from tfpreempt.core.log_output import plain_lines


class Console(rich.console.Console):
    """A console on stdout that escapes unprintable characters, except line breaks.

    Args:
        width: number of columns; None: the width of the terminal.
    """

    def __init__(self, *, width: int | None = None) -> None:
        super().__init__(highlight=False, width=width)

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            if segment.control:  # control codes made by rich itself
                yield segment
            else:
                yield Segment(plain_lines(segment.text), segment.style)
