"""Printing with terminal control characters escaped.

Directory names, journals and error messages may contain any bytes, written by other
programs. The text is escaped here, where output is written; no command prints in any
other way. Tables are printed by `tables.Console`, which escapes too.
"""

from __future__ import annotations

import logging

import click


def plain(text: str) -> str:
    """Returns the text as one line with unprintable characters escaped as in repr().

    A tab stays, because log lines have tabs and a tab cannot control the terminal.
    """
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def plain_lines(text: str) -> str:
    """Returns the text with unprintable characters escaped, except line breaks."""
    return "\n".join(map(plain, text.split("\n")))


def echo(text: str, *, err: bool = False) -> None:
    """Prints text and a line break.

    Args:
        text: text to print; unprintable characters are escaped, except line breaks.
        err: whether to print to stderr rather than stdout.
    """
    click.echo(plain_lines(text), err=err)


class LogHandler(logging.Handler):
    """Prints the log records of the package to stderr. Any thread."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            echo(self.format(record), err=True)
        except Exception:  # noqa: BLE001 - stderr may be closed, and work continues
            self.handleError(record)
