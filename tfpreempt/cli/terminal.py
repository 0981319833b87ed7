"""Prints text, with control characters escaped.

Directory names, journals and error messages come from other programs, and may contain
characters that control the terminal. So every command prints with the functions of this
module, or with `tables.Console`; both escape the text.
"""

from __future__ import annotations

import logging

import click

from tfpreempt.core.log_output import plain_lines


def echo(text: str, *, err: bool = False) -> None:
    """Prints text and a line break.

    Args:
        text: text to print; unprintable characters are escaped, except line breaks.
        err: whether to print to stderr; if False, to stdout.
    """
    click.echo(plain_lines(text), err=err)


class LogHandler(logging.Handler):
    """Log handler that prints to stderr, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            echo(self.format(record), err=True)
        except Exception:  # noqa: BLE001 - stderr may be closed, and work continues
            self.handleError(record)
