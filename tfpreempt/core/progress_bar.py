"""A progress bar on the terminal, for the processing of bytes, after two seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

_QUIET_SECONDS = 2.0  # shorter work shows no bar


class ByteBar:
    """A progress bar on stderr; a context manager that removes the bar at the end.

    The bar is shown only on a terminal, after two seconds. One thread may use the bar.

    Args:
        title: description of the work, shown before the bar.
        total: expected number of bytes; with 0 no bar is shown.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._began = time.monotonic()
        self._shown: Any = None

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def show(self, done: int) -> None:
        """Updates the bar.

        Args:
            done: number of bytes processed so far.
        """
        if self._shown is None:
            is_early = time.monotonic() - self._began < _QUIET_SECONDS
            if is_early or not self._total or not sys.stderr.isatty():
                return
            self._shown = _begin(self._title, self._total)
        self._shown.update(self._shown.task_ids[0], completed=done, refresh=True)


def _begin(title: str, total: int) -> Any:
    from rich import progress
    from rich.console import Console
    from rich.markup import escape

    shown = progress.Progress(
        progress.TextColumn(escape(title if title.isprintable() else ascii(title))),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    shown.add_task("", total=total)
    shown.start()
    return shown
