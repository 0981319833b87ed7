"""Heartbeats: a worker reports its progress to its supervisor.

The supervisor creates the heartbeat file, a file in memory, for every worker. A thread
of the worker writes the progress of the main thread into the file twice a second, so
the heartbeat does not slow down a step.

If the supervisor sends `STACKS_SIGNAL`, Python's fault handler appends the stacks of
all threads of the worker to the file. The fault handler does not need the GIL, so a
worker that hangs can write its stacks too.
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

from tfpreempt.core.threads import ManagedThread

log = logging.getLogger(__name__)

VARIABLE = "TFPREEMPT_HEARTBEAT_FILE"
_NAME = "tfpreempt-life"
_LINK = f"/memfd:{_NAME} "  # beginning of the file's link target in /proc/PID/fd
HEARTBEAT_INTERVAL = 0.5  # seconds between two heartbeats

STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Signal that makes a worker write its stacks. A process that has not called
`start_heartbeat` does not handle the signal, so the signal would kill the process."""

_RECORD = struct.Struct("=5q")


class WorkerPhase(enum.IntEnum):
    """The phase of the main thread; it decides which hang timeout applies."""

    APART = 0  # the start, a save, an evaluation: no timeout applies
    FIRST = 1  # the first steps, in which TensorFlow traces and compiles
    STEPS = 2  # all later steps
    WAITS = 3  # a wait at a boundary for other workers; the wait has its own timeout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A heartbeat: the progress of a worker.

    Attributes:
        pid: process id of the worker in the supervisor's pid namespace.
        boundaries: number of boundaries (moments between two steps) since the start of
            the process.
        step: number of completed steps, over all restarts.
        stage: phase of the main thread.
    """

    pid: int
    boundaries: int
    step: int
    stage: WorkerPhase


def pid_seen_by_supervisor() -> int:
    """Returns the id of this process in the pid namespace of the supervisor.

    If the worker has a pid namespace of its own, os.getpid() returns a different id.
    The worker has opened the heartbeat file by a path in /proc. So its /proc is the
    /proc of the supervisor, in which /proc/self leads to the id that the supervisor
    sees.
    """
    return int(os.readlink("/proc/self"))


def start_heartbeat(progress: Callable[[], Heartbeat]) -> None:
    """Starts the heartbeat thread, if the supervisor has created a heartbeat file.

    The thread writes heartbeats until the process ends. The environment variable with
    the file's path is removed, so that child processes do not write to the file.

    Args:
        progress: function that returns the progress of this process; called from
            several threads.
    """
    path = os.environ.pop(VARIABLE, None)
    if not path:
        return
    try:
        # The path has the supervisor's process id and descriptor. In the /proc of
        # another pid namespace the same path may lead to a file of the user.
        if not os.readlink(path).startswith(_LINK):
            raise OSError(f"{path} is not the supervisor's file")
        record = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        stacks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        log.warning(
            "cannot send heartbeats to the supervisor, so --hang-timeout does not "
            "watch this machine: %s. Run the workers as the user of the supervisor, "
            "with the /proc of the supervisor",
            error,
        )
        return
    faulthandler.register(STACKS_SIGNAL, stacks)

    numbers = itertools.count()

    def write() -> None:
        values = dataclasses.astuple(progress())
        os.pwrite(record, _RECORD.pack(next(numbers), *values), 0)

    def work() -> None:
        while not thread.stop_event.wait(HEARTBEAT_INTERVAL):
            write()

    write()
    thread = ManagedThread("tfpreempt-life", work)
    thread.start()
    # Write a last heartbeat: the thread ends when the exit begins, and the exit may
    # take long.
    atexit.register(write)


class HeartbeatFile:
    """The heartbeat file of a worker, as used by the supervisor.

    The file is in memory and has no name. It disappears when the supervisor ends.
    Processes of other users cannot open the file.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_NAME)

    def to_environment(self) -> Mapping[str, str]:
        """Returns the environment variable with the file's path, for the worker."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def clear(self) -> None:
        """Empties the file, for a new worker process."""
        os.ftruncate(self._descriptor, 0)

    def read(self) -> tuple[int, Heartbeat] | None:
        """Returns the newest heartbeat and its number; None before the first heartbeat.

        The numbers increase by 1, so an equal number means that no heartbeat was
        written since the last call.
        """
        data = os.pread(self._descriptor, _RECORD.size, 0)
        if len(data) < _RECORD.size:
            return None
        beat, pid, boundaries, step, stage = _RECORD.unpack(data)
        progress = Heartbeat(
            pid=pid, boundaries=boundaries, step=step, stage=WorkerPhase(stage)
        )
        return beat, progress

    def ask_for_stacks(self, pid: int) -> bool:
        """Signals a worker to write its stacks, if the worker has the file open.

        The worker may have ended, and a new process may have its process id. The signal
        would kill the new process. So this method opens a pidfd, checks that the
        process has the heartbeat file open, and sends the signal through the pidfd.

        Args:
            pid: process id of the worker.

        Returns:
            Whether the signal was sent.
        """
        # An error means that the process has ended, or belongs to another user.
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
            with contextlib.suppress(OSError):  # the process has closed the file
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), own):
                    return True
        return False

    def stacks(self) -> str:
        """Returns the stacks written by the worker; empty if there are none."""
        size = os.fstat(self._descriptor).st_size - _RECORD.size
        data = os.pread(self._descriptor, max(0, size), _RECORD.size)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Closes the file. After the call, no worker can open the file."""
        os.close(self._descriptor)
