"""One process, or thread, of a node at a time changes what is in a directory.

The lock is on the directory itself: nothing lies beside it, and it goes with whoever
holds it. On a network's file system it holds for the processes of one machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.claims import is_at

_log = logging.getLogger(__name__)
_POLL = 0.02


@contextlib.contextmanager
def locked(directory: str, *, seconds: float, makes: bool = False) -> Iterator[None]:
    """A context that nobody else is in for the same directory.

    Args:
        directory: its path.
        seconds: how long to wait for others.
        makes: makes the directory if there is none, also if it goes meanwhile.

    Raises:
        CheckpointError: somebody else takes longer.
        OSError: the directory cannot be opened, or made.
    """
    limit = time.monotonic() + seconds
    while True:
        if makes:
            os.makedirs(directory, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not _try_lock(descriptor):
                _log.info("waiting for another process that writes to %s", directory)
            while not _try_lock(descriptor):
                if time.monotonic() > limit:
                    raise errors.CheckpointError(
                        f"Another process has been writing to {directory!r} for "
                        f"{seconds:g} s. End it, or try again later."
                    )
                threading.Event().wait(_POLL)
            if not is_at(descriptor, directory):
                continue  # removed, and maybe made anew, while we waited
            yield
            return
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems can't lock a directory; then nobody waits.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
