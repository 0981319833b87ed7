"""Records the called Python functions of a package, with their order and threads."""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import itertools
import json
import os
import queue
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function, or one resumption of a generator.

    Attributes:
        thread: number of the thread, because names of threads are not unique.
        name: name of the thread.
        file: path relative to the package.
        line: first line of the function.
        function: qualified name of the function.
    """

    thread: int
    name: str
    file: str
    line: int
    function: str


class Tracer:
    """Records this process's calls from `start` on; writes them when the process ends.

    Create the tracer before the package starts a thread: threads that already run are
    not traced. Lambdas and comprehensions are part of the enclosing function. Code that
    runs at the import of a file is not a call.

    Args:
        package: directory whose functions are recorded.
        path: file to which the calls are written.
    """

    def __init__(self, package: Path, path: Path) -> None:
        self._package = f"{package}{os.sep}"
        self._path = path
        # The traced package searches the values that a program can reach, also the
        # items of lists: a list would grow by each call of this search.
        self._calls = queue.SimpleQueue[tuple[threading.Thread, CodeType]]()
        self._is_recording = False
        self._leave = os._exit
        os._exit = self.leave
        atexit.register(self._write)
        threading.setprofile(self._see)

    def start(self) -> None:
        """Starts to record calls of this thread and of threads that start later."""
        self._is_recording = True
        sys.setprofile(self._see)

    def leave(self, code: int) -> Any:
        """Writes the calls and ends the process; replaces `os._exit`."""
        self._write()
        self._leave(code)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self._is_recording:
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._package):
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not a module or class body
        if is_function and not code.co_name.startswith("<"):
            self._calls.put((threading.current_thread(), code))

    def _write(self) -> None:
        self._is_recording = False
        numbers: dict[threading.Thread, int] = {}
        calls = [
            Call(
                thread=numbers.setdefault(thread, len(numbers)),
                name=thread.name,
                file=code.co_filename.removeprefix(self._package),
                line=code.co_firstlineno,
                function=code.co_qualname,
            )
            for thread, code in itertools.islice(
                iter(self._calls.get_nowait, None), self._calls.qsize()
            )
        ]
        self._path.write_text(json.dumps([dataclasses.asdict(call) for call in calls]))


def read(path: Path) -> list[Call]:
    """Reads the calls from a tracer's file."""
    return [Call(**fields) for fields in json.loads(path.read_text())]
