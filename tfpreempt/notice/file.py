"""Notices from the appearance of a file."""

from __future__ import annotations

import os
import stat
import threading

from tfpreempt import errors
from tfpreempt.notice.metadata_session import printable
from tfpreempt.notice.polling import PollingSource, Wait

DETAIL_LIMIT_BYTES = 1024


class FileSource(PollingSource):
    """Reports a notice when a scheduler's hook or a user creates a file.

    A file that exists when the source starts is a notice, too. If the file is deleted,
    the notice is withdrawn; if the file is created again, the source reports a new
    notice. The first line of a regular file is the detail of the notice.

    Args:
        path: path of the file; its directory need not exist yet.
        interval: seconds between two polls.
        wait: function that waits between polls; tests pass the wait of a fake clock.

    Raises:
        ConfigurationError: the path is empty or the interval is not positive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        interval: float = 1.0,
        *,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self._path = checked_path(path)
        super().__init__(f"file:{self._path}", interval, wait)

    def poll_once(self) -> str | None:
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return first_line(self._path) if stat.S_ISREG(status.st_mode) else ""


def checked_path(path: str | os.PathLike[str]) -> str:
    """Returns the path of a notice file as an absolute string.

    Raises:
        ConfigurationError: the value is not a path, is empty or contains a NUL
            character.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise errors.ConfigurationError(
            f"notice file {path!r}: expected the path of a file whose appearance means "
            "that this machine is about to be terminated, such as '/run/preempted'"
        )
    return os.path.abspath(text)


def first_line(path: str) -> str:
    """Returns up to 1 KiB of a file's first line; "" if the file cannot be read.

    Unprintable characters become "?".
    """
    try:
        # O_NONBLOCK: do not wait if the file has become a pipe since the stat.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, DETAIL_LIMIT_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return ""  # the existence of the file is the notice; the detail is only shown
    text = content.partition(b"\n")[0].decode("utf-8", errors="replace").strip()
    return printable(text, DETAIL_LIMIT_BYTES)
