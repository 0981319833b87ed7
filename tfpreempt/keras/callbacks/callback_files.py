"""Saves the log file of a CSVLogger: a commit contains the text of the file.

A restore writes the text to the file, so rows written after the commit disappear. The
restore also works if the file is missing, as on a new machine, and if the logger was
made without `append=True`.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tfpreempt.checkpoint.directory import layout
from tfpreempt.core import contained
from tfpreempt.core.scratch import is_url
from tfpreempt.storage import paths
from tfpreempt.storage.files import LocalFiles

KIND = "CSVLogger"

_roots: dict[int, str] = {}
"""Checkpoint directory of the fit, by the id of a CSVLogger in a body of `resolved`."""


@contextlib.contextmanager
def resolved(loggers: Sequence[Any], root: str) -> Iterator[None]:
    """Context manager: in the body, each CSVLogger has the absolute name of its file.

    A relative name would refer to a different file if the program changed the working
    directory during the fit. The name begins with `root` if the file is inside, also if
    the program names `root` by another path, through a link or a mount.

    Args:
        loggers: the CSVLoggers of a fit, before the fit opens their files.
        root: absolute path of the checkpoint directory. Other users may be able to
            create links there, so no link inside leads to a log file.
    """
    given = [logger.filename for logger in loggers]
    for logger in loggers:
        logger.filename = _by_root(paths.absolute(logger.filename), root)
        _roots[id(logger)] = root
    try:
        yield
    finally:
        for logger, name in zip(loggers, given, strict=True):
            logger.filename = name
            _roots.pop(id(logger), None)


def _by_root(path: str, root: str) -> str:
    for folder in () if is_url(path) else reversed(pathlib.PurePath(path).parents):
        if layout.is_same(os.path.realpath(folder), os.path.realpath(root)):
            return os.path.join(root, os.path.relpath(path, folder))
    return path


def capture(logger: Any) -> dict[str, Any]:
    """Returns the state of a CSVLogger, with the text of its file.

    May be called at any time, also before training begins. The text is None if the file
    has been deleted.

    Args:
        logger: the CSVLogger.

    Raises:
        OSError: the file cannot be read.
    """
    has_writer = logger.writer is not None
    try:
        text: bytes | None = _read(logger)
    except FileNotFoundError:
        # With a writer, the file was deleted. Without a writer, no row was written yet:
        # the first row will create the file.
        text = None if has_writer else b""
    return {
        "keys": logger.keys,
        "append_header": logger.append_header,
        "has_writer": has_writer,
        "text": text,
    }


def restore(logger: Any, state: dict[str, Any], *, extends: bool) -> None:
    """Restores the state of a CSVLogger and its file.

    A closed logger stays closed, because training is complete.

    Args:
        logger: the CSVLogger, after its `on_train_begin`.
        state: result of `capture`; if its text is None, the file does not change.
        extends: whether the state was saved at the end of a fit that now continues with
            more epochs.

    Raises:
        OSError: the file cannot be written.
    """
    if (text := state["text"]) is None:
        return
    handle = logger.csv_file
    was_open = not getattr(handle, "closed", False)  # a GFile has no `closed`
    handle.close()
    _overwrite(logger, text)
    logger.keys = state["keys"]
    logger.append_header = state["append_header"]
    has_header = extends and bool(text) and logger.keys is not None
    has_rows = state["has_writer"] or has_header
    if was_open:
        logger.csv_file = _reopened(logger, handle, has_rows)
    logger.writer = None
    # Make the writer as Keras does at the first row, but write no header, because the
    # file already has the header.
    if has_rows:
        names = ["epoch", *(logger.keys or [])]
        logger.writer = csv.DictWriter(logger.csv_file, names, delimiter=logger.sep)


def _read(logger: Any) -> bytes:
    if is_url(path := logger.filename):
        with _as_keras(path, "rb") as file:
            text: bytes = file.read()
            return text
    path, root = _located(logger)
    with open(contained.open_file(path, os.O_RDONLY, root=root), "rb") as file:
        return file.read()


def _located(logger: Any) -> tuple[str, str]:
    """Returns the path of a log file, and the directory inside which no link is
    followed.

    Outside of the checkpoint directory, links are followed, as Keras does.
    """
    path, root = logger.filename, _roots.get(id(logger), "")
    is_inside = bool(root) and path.startswith(os.path.join(root, ""))
    return path if is_inside else os.path.realpath(path), root


@contextlib.contextmanager
def _as_keras(url: str, mode: str) -> Iterator[Any]:
    """Context manager: opens the file at a URL with tf.io.gfile, as Keras does.

    Raises:
        OSError: the file cannot be opened or read.
    """
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(url, mode) as file:
            yield file
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, error.message, url) from error
    except tf.errors.OpError as error:
        raise OSError(errno.EREMOTEIO, error.message, url) from error


def _overwrite(logger: Any, text: bytes) -> None:
    """Replaces the content of a log file; its owner and mode do not change."""
    if is_url(path := logger.filename):
        with _as_keras(path, "wb") as file:
            file.write(text)
        return
    path, root = _located(logger)
    LocalFiles(root).make_dirs(os.path.dirname(path))
    with open(_opened(logger, os.O_TRUNC), "wb") as file:
        file.write(text)


def _opened(logger: Any, flag: int) -> int:
    """Opens or creates a log file for writing, with a further flag of `os.open`."""
    path, root = _located(logger)
    flags = os.O_WRONLY | os.O_CREAT | flag
    return contained.open_file(path, flags, root=root, copies=True)


def _reopened(logger: Any, handle: Any, has_rows: bool) -> Any:
    """Returns a handle that appends to the file, of the same class as `handle`.

    A GFile that is opened for writing truncates the file only at the first row.
    """
    if isinstance(handle, io.IOBase):
        return open(_opened(logger, os.O_APPEND), "a")
    return type(handle)(logger.filename, "a" if has_rows else handle.mode)
