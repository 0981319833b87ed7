"""Processes that wait with TensorFlow imported, one for each worker's next start.

Importing TensorFlow is most of a restart. Each incarnation, once it has been up for a
time, gets one waiting process per worker (`become.py`), which the next start takes over
in place of a new one. It holds no device, no port and no lock, hears of no notice, and
is the first to go where memory runs out. Whatever is amiss with it, the start is cold.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.policy import ReturnCode, describe_end
from tfpreempt.cli.run.processes import Fleet
from tfpreempt.cli.run.reporter import Reporter
from tfpreempt.cli.sizes import size_text
from tfpreempt.core.memory import available_bytes

_SCRIPT = str(Path(__file__).with_name("become.py"))
_LOOK_SECONDS = 0.2  # nobody signals that a standby, or a worker, has made its imports
_TAKE_SECONDS = 2.0  # it has nothing to do but to answer
_MOST_BYTES = 2 << 30  # of one; no import of TensorFlow takes more
_MESSAGE_BYTES = 1 << 16
_PYTHON = re.compile(r"python[\d.]*")
_FLAGS = frozenset("bBdEIOPqsSuv")  # options of the interpreter without a value
_WITH_VALUE = ("-W", "-X")


class UnsuitableError(Exception):
    """There can be no standby; the text says why."""


@dataclasses.dataclass(eq=False)
class _Waiting:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    memory: int | None = None  # bytes; known once it is ready


class Standbys:
    """The waiting processes of one supervisor. Main thread only.

    Args:
        options: what the workers run, and when a standby is due.
        fleet: starts and ends the processes.
        outputs: where each worker writes to.
        reporter: is told.
    """

    def __init__(
        self,
        options: RunOptions,
        fleet: Fleet,
        outputs: Sequence[int],
        reporter: Reporter,
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._outputs = outputs
        self._reporter = reporter
        self._waiting: dict[int, _Waiting] = {}
        self._handed: list[socket.socket] = []  # of workers: open until they import
        self._environments: Sequence[Mapping[str, str]] = ()
        self._due: float | None = None
        self._words = 0
        self._is_over = options.standby_after is None
        if not self._is_over:
            try:
                self._words = interpreter_words(options.command)
            except UnsuitableError as reason:
                self._is_over = True
                reporter.no_standby(str(reason))

    def begin(self, now: float, environments: Sequence[Mapping[str, str]]) -> None:
        """An incarnation has been started.

        Args:
            now: monotonic seconds.
            environments: of its workers.
        """
        self._environments = environments
        if self._options.standby_after is not None and not self._is_over:
            self._due = now + self._options.standby_after

    def attend(self, now: float, running: Sequence[int]) -> None:
        """Starts what is due, and hears those that wait.

        Args:
            now: monotonic seconds.
            running: the workers that have not ended; where one is missing, the
                incarnation is about to end, and it is too late for a standby.
        """
        if len(running) < len(self._environments):
            self._due = None
        try:
            if self._due is not None and now >= self._due and self._have_imported():
                self._due = None
                self._start_all()
        except (UnsuitableError, OSError) as reason:
            self._end_all()  # a cluster starts together
            self._reporter.no_standby(str(reason))
        self._hear_all()

    def next_look(self, now: float) -> float | None:
        """Seconds until `attend` has something to do; None where only SIGCHLD tells."""
        if self._due is not None:
            return self._due - now if now < self._due else _LOOK_SECONDS
        is_awaited = any(each.memory is None for each in self._waiting.values())
        return _LOOK_SECONDS if is_awaited else None

    def take(self, worker: int, environment: Mapping[str, str]) -> int | None:
        """Makes the worker of the process that waits for it.

        Args:
            worker: its index.
            environment: of this start.

        Returns:
            Its process id; None where it has to be started cold.
        """
        self._due = None
        waiting = self._waiting.get(worker)
        if waiting is None:
            return None
        if waiting.memory is None:
            self._drop(worker, "was not ready in time")
            return None
        waiting.channel.settimeout(_TAKE_SECONDS)
        try:
            text = json.dumps({"environment": dict(environment)})
            waiting.channel.send(text.encode())
            has_taken = "taken" in _read(waiting.channel)
        except OSError as error:
            self._drop(worker, f"does not answer ({error})")
            return None
        if not has_taken:
            self._drop(worker, "has ended")
            return None
        del self._waiting[worker]
        waiting.channel.settimeout(0.0)
        self._handed.append(waiting.channel)
        self._fleet.take_over(worker, waiting.process)
        return waiting.process.pid

    def close(self) -> None:
        """Ends those that wait: nobody will need them."""
        self._is_over = True
        self._end_all()
        while self._handed:
            self._handed.pop().close()

    def _end_all(self) -> None:
        self._due = None
        for waiting in self._waiting.values():
            waiting.channel.close()
            self._fleet.dismiss(waiting.process)
        self._waiting.clear()

    def _start_all(self) -> None:
        """Raises UnsuitableError where there had better be none."""
        check_memory([self._fleet.memory(worker) for worker in self._fleet.running])
        command = self._options.command
        modules = ",".join(self._options.standby_imports)
        for worker, environment in enumerate(self._environments):
            # One that keeps messages apart.
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                line = [*command[: self._words], _SCRIPT, str(theirs.fileno())]
                line += [modules, str(self._words), *command]
                try:
                    process = self._fleet.launch(
                        line, environment, self._outputs[worker], theirs.fileno()
                    )
                except OSError as error:
                    ours.close()
                    raise UnsuitableError(f"it cannot be started ({error})") from error
            ours.settimeout(0.0)
            self._waiting[worker] = _Waiting(process, ours)

    def _have_imported(self) -> bool:
        """Whether the workers that were taken over have made their imports.

        Raises:
            UnsuitableError: one had to start cold, and so would the next.
        """
        for channel in list(self._handed):
            try:
                said = _read(channel)
            except BlockingIOError:
                return False
            if why := said.get("cold"):
                self._is_over = True
                raise UnsuitableError(f"the last one started cold: {why}")
            self._handed.remove(channel)
            channel.close()
        return True

    def _hear_all(self) -> None:
        were_awaited = [each for each in self._waiting.values() if each.memory is None]
        for worker, waiting in list(self._waiting.items()):
            if waiting.memory is None and not self._hear(worker, waiting):
                continue
            if (code := waiting.process.poll()) is not None:
                self._drop(worker, f"has ended ({describe_end(ReturnCode(code))})")
        memory = [each.memory for each in self._waiting.values()]
        if were_awaited and memory and None not in memory:
            self._reporter.standby_ready(list(self._waiting), max(filter(None, memory)))

    def _hear(self, worker: int, waiting: _Waiting) -> bool:
        """False where it is dropped for what it says."""
        try:
            said = _read(waiting.channel)
        except BlockingIOError:
            return True
        except OSError as error:
            said = {"refused": str(error)}
        if "ready" in said:
            waiting.memory = said["ready"]
            return True
        self._drop(worker, said.get("refused", "has ended"))
        return False

    def _drop(self, worker: int, why: str) -> None:
        waiting = self._waiting.pop(worker)
        waiting.channel.close()
        self._fleet.dismiss(waiting.process)
        self._reporter.no_standby(f"that of worker {worker} {why}")


def interpreter_words(command: Sequence[str]) -> int:
    """How many words of a command are a Python interpreter and its options.

    Raises:
        UnsuitableError: what it runs is not a file, nor `-m` and a module.
    """
    if not _PYTHON.fullmatch(Path(command[0]).name):
        raise UnsuitableError(f"{command[0]!r} is no Python interpreter")
    at = 1
    while at < len(command):
        word = command[at]
        if word == "-m" and at + 1 < len(command):
            return at
        if word in _WITH_VALUE:
            at += 2
        elif word.startswith(_WITH_VALUE) or (
            len(word) > 1 and word[0] == "-" and _FLAGS.issuperset(word[1:])
        ):
            at += 1
        elif word.startswith("-"):
            raise UnsuitableError(f"{word!r} stands before the program's file")
        elif not Path(word).is_file() or zipfile.is_zipfile(word):
            raise UnsuitableError(f"{word!r} is no file with a Python program")
        elif word.endswith(".pyc"):
            raise UnsuitableError(f"{word!r} is compiled")
        else:
            return at
    raise UnsuitableError("the command names no program")


def check_memory(
    workers: Sequence[int], *, available: int | None = None, most: int = _MOST_BYTES
) -> None:
    """Refuses standbys where training may miss the memory that they take.

    Args:
        workers: bytes that each worker takes; a standby takes less.
        available: bytes that can be had; those of this machine by default.
        most: bytes that a standby takes at most.

    Raises:
        UnsuitableError: there is less than twice of what they may take.
    """
    needed = 2 * sum(min(each, most) for each in workers)
    found = available_bytes() if available is None else available
    if found < needed:
        raise UnsuitableError(
            f"{size_text(found)} of memory are available, and {size_text(needed)} are "
            f"asked for: twice what {len(workers)} worker(s) take, {size_text(most)} "
            "each at most"
        )


def _read(channel: socket.socket) -> dict[str, Any]:
    """One message; empty where there will be none any more.

    Raises:
        OSError: there is none now.
    """
    data = channel.recv(_MESSAGE_BYTES)
    message: dict[str, Any] = json.loads(data) if data else {}
    return message
