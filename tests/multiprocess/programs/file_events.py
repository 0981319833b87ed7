"""Reports file operations with absolute paths, by Python's audit events."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

# Event -> indices of the paths in its arguments, with the index of the directory.
FOLDERS = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
}

See = Callable[[str, tuple[Any, ...]], None]


def watch(see: See) -> None:
    """Calls a function for each operation on a file, in any thread.

    The event of `os.open` does not have the descriptor of a directory, so `os.open` is
    wrapped. Directories that are opened on the way to a file are not reported.

    Args:
        see: receives the name of the event, and its arguments with absolute paths.
    """

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FOLDERS:
            resolved = list(arguments)
            for path, folder in FOLDERS[event]:
                resolved[path] = absolute(arguments[path], arguments[folder])
            see(event, tuple(resolved))
        elif event == "open" and os.path.isabs(str(arguments[0])):
            see(event, arguments)

    os.open = opened(see, os.open)
    sys.addaudithook(audit)


def opened(see: See, call: Callable[..., int]) -> Callable[..., int]:
    """Returns a wrapper of `os.open` that reports files in an open directory."""

    @functools.wraps(call)
    def opening(
        path: Any, flags: int, *args: Any, dir_fd: int | None = None, **more: Any
    ) -> int:
        if dir_fd is not None and not flags & os.O_DIRECTORY:
            see("open", (absolute(path, dir_fd), None, flags))
        return call(path, flags, *args, dir_fd=dir_fd, **more)

    return opening


def absolute(path: Any, folder: int) -> str:
    """Returns the path of a name in an open directory; -1 is the working directory."""
    text = os.fsdecode(path)
    return (
        text
        if folder < 0
        else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    )
