"""The log lines of this package on stderr, in programs that do not configure logging.

Python itself shows no INFO record in such programs. A handler of the root logger does
not prove that the program configures logging: a call of absl's `logging.info()` inside
TensorFlow, as in `tf.train.Checkpoint.save()`, adds a handler to the root logger, too.
The level of the root logger stays at WARNING then.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

PACKAGE = logging.getLogger("tfpreempt")


def plain(text: str) -> str:
    """Returns the text as one line with unprintable characters escaped as in repr().

    Tabs are not escaped: log lines contain tabs, and a tab cannot control the terminal.
    """
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def plain_lines(text: str) -> str:
    """Returns the text with unprintable characters escaped, except line breaks."""
    return "\n".join(map(plain, text.split("\n")))


class LineFormatter(logging.Formatter):
    """Formats a log record as "tfpreempt: message", with control characters escaped.

    A record of the level WARNING or higher is formatted as "tfpreempt: WARNING:
    message", with its level. The further lines of a message are indented: a name from a
    commit of another user, with a line break, cannot look like another record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        text = plain_lines(record.message).replace("\n", "\n  ")
        return f"tfpreempt: {level}{text}"

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's
        return plain_lines(super().formatException(ei)).replace("\n", "\n  ")


class FallbackHandler(logging.Handler):
    """A handler for the root logger that keeps absl from adding absl's handler.

    absl adds its handler only to a root logger without handlers. This handler changes
    no output: it passes records to Python's `logging.lastResort`, as Python does if the
    root logger has no handler.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger is not logging.root:
            if logger.handlers:
                return
            logger = logger.parent
        last = logging.lastResort
        if last is not None and record.levelno >= last.level:
            last.handle(record)


def is_open(stream: object) -> bool:
    """Returns whether a standard stream exists and is open.

    A stream object without the attribute `closed` counts as open.
    """
    return stream is not None and not getattr(stream, "closed", False)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to `sys.stderr`, unless the program has added a logging handler.

    The check is made for every record, because the program may call
    `logging.basicConfig()` later. If the program has added a handler to the root logger
    or to the logger `tfpreempt`, that handler shows the record, and this handler shows
    nothing. Any thread may log.
    """

    def emit(self, record: logging.LogRecord) -> None:
        of_root = all(
            isinstance(each, FallbackHandler) for each in logging.root.handlers
        )
        # Notebooks and tests replace `sys.stderr`.
        stream = getattr(sys, "stderr", None)
        # Skip a closed stream: a write would fail, and `logging` prints errors to the
        # same stream.
        if is_open(stream) and of_root and PACKAGE.handlers == [self]:
            self.stream = stream
            super().emit(record)


class _DefaultLevel(int):
    """A level for the package's logger that a level of the root logger overrides.

    `Logger.getEffectiveLevel()` takes the first level that is true, from a logger up to
    the root logger. This level is true only while the root logger has the default level
    WARNING. So the program's level for the root logger counts, even if the program sets
    it later (`tfpreempt.handle_early_notices()` is called before
    `logging.basicConfig()`). A WARNING set by the program looks like the default.
    """

    def __bool__(self) -> bool:
        return logging.root.level == logging.WARNING


def show_log_lines() -> None:
    """Shows this package's records from INFO on, if the program configures no logging.

    If the logger `tfpreempt` has no level, it gets the level INFO, which counts only
    while the root logger has the default level. If the logger has no handler, it gets a
    handler that writes to stderr. A second call changes nothing.
    """
    if PACKAGE.level == logging.NOTSET:
        PACKAGE.setLevel(_DefaultLevel(logging.INFO))
    if not PACKAGE.handlers:
        handler = _StderrHandler()
        handler.setFormatter(LineFormatter())
        PACKAGE.addHandler(handler)
