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


def is_open(stream: object) -> bool:
    """Returns whether a standard stream exists and is open.

    A stream of the program may have no attribute `closed`, and counts as open then.
    """
    return stream is not None and not getattr(stream, "closed", False)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to `sys.stderr`, unless the program has a handler. Any thread.

    A handler of the root logger gets the records too, possibly from a later
    `logging.basicConfig()`. A handler of the program at the logger `tfpreempt` replaces
    this handler.
    """

    def emit(self, record: logging.LogRecord) -> None:
        of_root = all(
            isinstance(each, FallbackHandler) for each in logging.root.handlers
        )
        stream = getattr(sys, "stderr", None)  # notebooks and tests replace it
        # On a closed stream logging could not even report the error.
        if is_open(stream) and of_root and PACKAGE.handlers == [self]:
            self.stream = stream
            super().emit(record)


class _DefaultLevel(int):
    """A level of the package's logger that counts only while the root logger has none.

    `Logger.getEffectiveLevel()` uses the first level that is true, from the logger up
    to the root logger. So a level of the root logger has precedence, also if the
    program sets the level later: `tfpreempt.handle_early_notices()` comes before
    `logging.basicConfig()`. A level WARNING of the root logger cannot be told from the
    default.
    """

    def __bool__(self) -> bool:
        return logging.root.level == logging.WARNING


def show_log_lines() -> None:
    """Shows the records of this package from INFO on, if the program configures none.

    The logger `tfpreempt` has the level INFO, while neither this logger nor the root
    logger has a level other than the default. The logger gets a handler that writes to
    stderr, if the logger has no handler. Idempotent.
    """
    if PACKAGE.level == logging.NOTSET:
        PACKAGE.setLevel(_DefaultLevel(logging.INFO))
    if not PACKAGE.handlers:
        handler = _StderrHandler()
        handler.setFormatter(LineFormatter())
        PACKAGE.addHandler(handler)
