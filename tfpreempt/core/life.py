"""Signs of life: how a worker tells whoever supervises it that it gets on.

The supervisor lends a file in memory. A thread of the worker writes into it, twice a
second, how far the main thread is, so a step does nothing for it. Behind that Python's
fault handler writes the stacks of all threads, on a signal; it needs no lock of the
interpreter, so a process that hangs does it too.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import faulthandler
import itertools
import logging
import os
import signal
import struct
from collections.abc import Callable, Mapping

from tfpreempt.core.threads import OwnedThread

log = logging.getLogger(__name__)

VARIABLE = "TFPREEMPT_LIFE_FILE"
_NAME = "tfpreempt-life"
_LINK = f"/memfd:{_NAME} "  # begins the link to such a file in /proc/PID/fd
TOLD_EVERY = 0.5  # seconds

STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Asks for the stacks. It ends a process that has given no sign of life yet."""

_RECORD = struct.Struct("=5q")


class Stage(enum.IntEnum):
    """What the main thread is in."""

    APART = 0  # the start, a save, an evaluation: it takes as long as it takes
    FIRST = 1  # the first steps, which trace and compile
    STEPS = 2
    WAITS = 3  # at a boundary for the other workers; those waits have limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """How far a worker is.

    Attributes:
        pid: process id of the worker in the supervisor's pid namespace.
        boundaries: that it came to since its start.
        step: that it has made, over all restarts.
        stage: what it is in.
    """

    pid: int
    boundaries: int
    step: int
    stage: Stage


def pid_seen_by_supervisor() -> int:
    """The id of this process in the pid namespace of the supervisor.

    os.getpid() gives the id in the worker's own pid namespace, where there is one. The
    supervisor's file was opened by way of /proc, so /proc shows the supervisor's
    namespace.
    """
    return int(os.readlink("/proc/self"))


def tell(sign: Callable[[], Sign]) -> None:
    """Tells it from now on, where a file was lent, until the process ends.

    The file is this process's from then on: its children are not told of it.

    Args:
        sign: how far this process is; called by a thread.
    """
    path = os.environ.pop(VARIABLE, None)
    if not path:
        return
    try:
        # The path names the supervisor's process and descriptor. Below the /proc of
        # another pid namespace the same numbers may lead to a file of the user's.
        if not os.readlink(path).startswith(_LINK):
            raise OSError(f"{path} is not the supervisor's file")
        record = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        stacks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        log.warning(
            "tfpreempt: this worker cannot tell its supervisor how far it is, so "
            "--hang-timeout watches none of this machine: %s. Let the workers run as "
            "the supervisor's user, with the supervisor's /proc",
            error,
        )
        return
    faulthandler.register(STACKS_SIGNAL, stacks)

    beats = itertools.count()

    def write() -> None:
        values = dataclasses.astuple(sign())
        os.pwrite(record, _RECORD.pack(next(beats), *values), 0)

    def work() -> None:
        while not thread.stop_event.wait(TOLD_EVERY):
            write()

    write()
    thread = OwnedThread("tfpreempt-life", work)
    thread.start()
    atexit.register(write)  # the end may take long, and the thread is ended first


class LifeFile:
    """What a supervisor lends one worker: it has no name, and goes with the supervisor.

    Who is no worker of it, such as a process of another user, cannot open it.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_NAME)

    def to_environment(self) -> Mapping[str, str]:
        """The variable by which the worker is told."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def clear(self) -> None:
        """Another process gets it."""
        os.ftruncate(self._descriptor, 0)

    def read(self) -> tuple[int, Sign] | None:
        """The newest sign, and its number; None where there was none yet."""
        data = os.pread(self._descriptor, _RECORD.size, 0)
        if len(data) < _RECORD.size:
            return None
        beat, pid, boundaries, step, stage = _RECORD.unpack(data)
        sign = Sign(pid=pid, boundaries=boundaries, step=step, stage=Stage(stage))
        return beat, sign

    def ask_for_stacks(self, pid: int) -> bool:
        """Signals a worker to write its stacks, if the worker has this file open.

        The signal ends a process that does not expect it, and the worker may have ended
        and its process id may belong to another process. A pidfd holds the process
        while its descriptors are looked up.

        Returns:
            Whether the signal was sent.
        """
        # An error: the process has ended, or belongs to another user.
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            try:
                if self._is_open_in(pid):
                    signal.pidfd_send_signal(process, STACKS_SIGNAL)
                    return True
            finally:
                os.close(process)
        return False

    def _is_open_in(self, pid: int) -> bool:
        own = os.fstat(self._descriptor)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), own):
                    return True
        return False

    def stacks(self) -> str:
        """What the worker wrote when it was asked for its stacks; empty for nothing."""
        size = os.fstat(self._descriptor).st_size - _RECORD.size
        data = os.pread(self._descriptor, max(0, size), _RECORD.size)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Nobody is told anything any more."""
        os.close(self._descriptor)
