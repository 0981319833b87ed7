"""The file of a CSVLogger: its whole text is kept, and written back on restore.

So rows written after the commit go away, and it makes no difference whether the file is
there, on which disk, or whether the logger appends.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tfpreempt.core import contained
from tfpreempt.core.scratch import is_url
from tfpreempt.storage import paths
from tfpreempt.storage.reading import open_file

KIND = "CSVLogger"


@contextlib.contextmanager
def resolved(loggers: Sequence[Any]) -> Iterator[None]:
    """Gives each CSVLogger the absolute name of its file inside.

    A program may change its directory while a fit runs.

    Args:
        loggers: the CSVLoggers of a fit, which has not opened their files yet.
    """
    given = [logger.filename for logger in loggers]
    for logger in loggers:
        logger.filename = paths.absolute(logger.filename)
    try:
        yield
    finally:
        for logger, name in zip(loggers, given, strict=True):
            logger.filename = name


def capture(logger: Any) -> dict[str, Any]:
    """What a CSVLogger remembers, with the text of its file.

    It may be in any state, also before the training begins. The text is None if the
    file has been deleted.

    Raises:
        OSError: the file cannot be read.
    """
    has_writer = logger.writer is not None
    try:
        text: bytes | None = _read(logger.filename)
    except FileNotFoundError:
        text = None if has_writer else b""  # made with the first row
    return {
        "keys": logger.keys,
        "append_header": logger.append_header,
        "has_writer": has_writer,
        "text": text,
    }


def restore(logger: Any, state: dict[str, Any], *, extends: bool) -> None:
    """Makes the logger, and its file, what they were.

    A logger that is closed stays closed: the training is over.

    Args:
        logger: its `on_train_begin` has run.
        state: what `capture` gave; without a text the file is left as it is.
        extends: the state is that of the end of a fit, and more epochs follow.

    Raises:
        OSError: the file cannot be written.
    """
    if (text := state["text"]) is None:
        return
    handle = logger.csv_file
    was_open = not getattr(handle, "closed", False)  # a GFile does not tell
    handle.close()
    _overwrite(logger.filename, text)
    logger.keys = state["keys"]
    logger.append_header = state["append_header"]
    has_header = extends and bool(text) and logger.keys is not None
    has_rows = state["has_writer"] or has_header
    if was_open:
        logger.csv_file = _reopened(handle, logger.filename, has_rows)
    logger.writer = None
    if has_rows:  # the writer that Keras makes with the first row, which has the header
        names = ["epoch", *(logger.keys or [])]
        logger.writer = csv.DictWriter(logger.csv_file, names, delimiter=logger.sep)


def _read(path: str) -> bytes:
    with _as_keras(path, "rb") if is_url(path) else open_file(path) as file:
        text: bytes = file.read()
        return text


@contextlib.contextmanager
def _as_keras(url: str, mode: str) -> Iterator[Any]:
    """Opens a URL as Keras does; raises OSError."""
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(url, mode) as file:
            yield file
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, error.message, url) from error
    except tf.errors.OpError as error:
        raise OSError(errno.EREMOTEIO, error.message, url) from error


def _overwrite(path: str, text: bytes) -> None:
    """Writes the file of a log in place, so that its owner and its mode stay.

    The path is the user's own: Keras follows a link there too.
    """
    if is_url(path):
        with _as_keras(path, "wb") as file:
            file.write(text)
        return
    path = os.path.realpath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(contained.open_file(path, flags, copies=True), "wb") as file:
        file.write(text)


def _reopened(handle: Any, path: str, has_rows: bool) -> Any:
    """A handle of the kind that this Keras uses, which adds to the file.

    A GFile that is open for writing empties the file with the first row, no sooner.
    """
    if isinstance(handle, io.IOBase):
        return open(path, "a")
    return type(handle)(path, "a" if has_rows else handle.mode)
