"""The log lines of this package on stderr, in programs without logging of their own.

Python shows no INFO record of a program that does not configure `logging`. TensorFlow's
calls of absl's `logging.info()`, as in `tf.train.Checkpoint.save()`, give the root
logger a handler, and the root logger keeps the level WARNING.
"""

from __future__ import annotations

import logging
import sys

PACKAGE = logging.getLogger("tfpreempt")


class LineFormatter(logging.Formatter):
    """Formats a record as "tfpreempt: message".

    The level name is in front of the message from WARNING on.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"tfpreempt: {level}{record.message}"


class FallbackHandler(logging.Handler):
    """Handles a record exactly if Python's `logging.lastResort` would.

    A root logger with this handler acts like a root logger without handlers, but absl
    does not configure this root logger. Any thread.
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


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to `sys.stderr`, unless the root logger has a handler. Any thread.

    The handlers of the root logger get the records too, possibly from a later
    `logging.basicConfig()`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if all(isinstance(each, FallbackHandler) for each in logging.root.handlers):
            self.stream = sys.stderr  # notebooks and tests replace it
            super().emit(record)


def show_log_lines() -> None:
    """Shows the records of this package from INFO on, if the program configures none.

    The logger `tfpreempt` gets the level INFO, if neither this logger nor the root
    logger has a level other than the default. The logger gets a handler that writes to
    stderr, if the logger has no handler. Idempotent.
    """
    if PACKAGE.level == logging.NOTSET and logging.root.level == logging.WARNING:
        PACKAGE.setLevel(logging.INFO)
    if not PACKAGE.handlers:
        handler = _StderrHandler()
        handler.setFormatter(LineFormatter())
        PACKAGE.addHandler(handler)
