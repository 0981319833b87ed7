"""The log lines of this package on stderr, in programs that do not configure logging.

Python shows no INFO record in such programs. The module checks the handlers of the root
logger with care: calls of absl's `logging.info()` in TensorFlow, as in
`tf.train.Checkpoint.save()`, give the root logger a handler, and keep its level at
WARNING.
"""

from __future__ import annotations

import logging
import sys

PACKAGE = logging.getLogger("tfpreempt")


class LineFormatter(logging.Formatter):
    """Formats a record as "tfpreempt: message".

    From the level WARNING on, the level comes before the message: "tfpreempt: WARNING:
    message".
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"tfpreempt: {level}{record.message}"


class FallbackHandler(logging.Handler):
    """A handler for the root logger that changes no output, but keeps absl from it.

    absl adds its handler only to a root logger without handlers. A record is handled by
    Python's `logging.lastResort`, as if the root logger had no handler.
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
    """Writes to `sys.stderr`, unless the root logger has a handler.

    The root logger's handlers, perhaps from a later `logging.basicConfig()`, get the
    records too, so a record would be written twice.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if all(isinstance(each, FallbackHandler) for each in logging.root.handlers):
            self.stream = sys.stderr  # now: notebooks and tests replace sys.stderr
            super().emit(record)


def show_log_lines() -> None:
    """Shows INFO records of this package, if the program does not configure logging.

    The logger `tfpreempt` gets the level INFO, unless the program has set a level for
    this logger or the root logger; and a handler that writes to stderr, unless the
    logger has a handler. Further calls have no effect.
    """
    if PACKAGE.level == logging.NOTSET and logging.root.level == logging.WARNING:
        PACKAGE.setLevel(logging.INFO)
    if not PACKAGE.handlers:
        handler = _StderrHandler()
        handler.setFormatter(LineFormatter())
        PACKAGE.addHandler(handler)
