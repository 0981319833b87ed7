"""The file of a CSVLogger: its whole text is kept, and written back on restore.

So rows written after the commit go away, and it makes no difference whether the file is
there, on which disk, or whether the logger appends.
"""

from __future__ import annotations

import csv
import io
import os
from typing import Any

from tfpreempt.keras.callbacks import known
from tfpreempt.storage import reading
from tfpreempt.storage.files import files_for


def is_log(callback: Any) -> bool:
    """Whether the callback is a CSVLogger."""
    return known.kind(callback) == "CSVLogger"


def capture(logger: Any) -> tuple[dict[str, Any], bytes | None]:
    """The state of a CSVLogger.

    It may be in any state, also before the training begins.

    Returns:
        What it remembers, and the text of its file; None if that has been deleted.

    Raises:
        OSError: the file cannot be read.
    """
    has_writer = logger.writer is not None
    state = {
        "keys": logger.keys,
        "append_header": logger.append_header,
        "has_writer": has_writer,
    }
    text = _read(logger.filename)
    if text is None and not has_writer:
        text = b""  # made with the first row
    return state, text


def restore(
    logger: Any, state: dict[str, Any], text: bytes | None, *, extends: bool
) -> None:
    """Makes the logger, and its file, what they were.

    A logger that is closed stays closed: the training is over.

    Args:
        logger: its `on_train_begin` has run.
        state: what it remembered.
        text: of the file; None leaves the file as it is.
        extends: the state is that of the end of a fit, and more epochs follow.

    Raises:
        OSError: the file cannot be written.
    """
    if text is None:
        return
    handle = logger.csv_file
    was_open = not getattr(handle, "closed", False)  # a GFile does not tell
    handle.close()
    _write(logger.filename, text)
    logger.keys = state["keys"]
    logger.append_header = state["append_header"]
    has_header = extends and bool(text) and logger.keys is not None
    has_rows = state["has_writer"] or has_header
    if was_open:
        logger.csv_file = _reopened(handle, logger.filename, has_rows)
    logger.writer = _writer(logger) if has_rows else None


def _writer(logger: Any) -> Any:
    """The writer that Keras makes with the first row, which wrote the header."""

    class Dialect(csv.excel):
        delimiter = logger.sep

    fieldnames = ["epoch", *(logger.keys or [])]
    return csv.DictWriter(logger.csv_file, fieldnames=fieldnames, dialect=Dialect)


def _reopened(handle: Any, path: str, has_rows: bool) -> Any:
    """A handle of the kind that this Keras uses, which adds to the file.

    A GFile that is open for writing empties the file with the first row, no sooner.
    """
    if isinstance(handle, io.IOBase):
        return open(path, "a")
    return type(handle)(path, "a" if has_rows else handle.mode)


def _read(path: str) -> bytes | None:
    try:
        with reading.open_file(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _write(path: str, text: bytes) -> None:
    files = files_for(path)
    files.make_dirs(os.path.dirname(path) or ".")
    files.write(path, text)
