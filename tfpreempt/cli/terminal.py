"""Printing: no text that a command prints can steer a terminal.

Names of directories, journals and errors of others are printed as they come, so the
escaping is done here, where the output is written, and no command prints otherwise.
Tables are printed by `tables.Console`, which escapes too.
"""

from __future__ import annotations

import logging

import click


def plain(text: str) -> str:
    """Text as one line in which unprintable characters are escaped, as repr does.

    A tab stays: log lines have tabs, and a tab steers nothing.
    """
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def plain_lines(text: str) -> str:
    """Text whose line breaks stay; other unprintable characters are escaped."""
    return "\n".join(map(plain, text.split("\n")))


def echo(text: str, *, err: bool = False) -> None:
    """Prints text and a line break.

    Args:
        text: printed with unprintable characters escaped, except line breaks.
        err: print to stderr rather than stdout.
    """
    click.echo(plain_lines(text), err=err)


class LogHandler(logging.Handler):
    """Prints log records of the package to stderr. Any thread."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            echo(self.format(record), err=True)
        except Exception:  # noqa: BLE001 - stderr may be closed, and work continues
            self.handleError(record)
