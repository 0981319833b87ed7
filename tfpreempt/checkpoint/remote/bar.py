"""A progress bar for bytes, on a terminal only."""

from __future__ import annotations

import sys
from typing import Any


class Bar:
    """A bar that appears when something is first shown; nothing without a terminal.

    Args:
        title: what is under way.
        total: bytes.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._shown: Any = None
        self._task: Any = None

    def show(self, done: int) -> None:
        """Shows how many bytes are done. One thread."""
        if not sys.stderr.isatty():
            return
        if self._shown is None:
            from rich import progress
            from rich.console import Console
            from rich.markup import escape

            self._shown = progress.Progress(
                progress.TextColumn(escape(self._title)),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._shown.add_task("", total=self._total)
            self._shown.start()
        self._shown.update(self._task, completed=done)

    def close(self) -> None:
        """Takes it off the screen."""
        if self._shown is not None:
            self._shown.stop()
