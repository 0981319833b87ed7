"""Worker processes: started in groups of their own, seen to end, never left behind.

Signals that ask go to the worker alone, as Kubernetes and Docker do it: a group-wide
SIGTERM would end the data loaders that the commit may still need. What a worker leaves
in its group is asked when the worker has ended, and killed with the group at the limit.
A program behind a shell should be started with `exec`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfpreempt.cli.run.policy import ReturnCode

_HERE = Path(__file__).parent
_SCRIPT = (sys.executable, "-I", "-S")  # neither site packages nor PYTHON* variables
_GUARD_EXIT_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class Fleet:
    """The workers of one incarnation, by index. Main thread only: it is their parent.

    A guard process is told of each of their groups, and ends what is left of them when
    this process is gone, however that was.

    Args:
        leave_seconds: what children of an ended worker get between SIGTERM and SIGKILL,
            and what the guard gives the workers to commit and leave.
        outputs: the reading ends of the workers' pipes, and the files that the guard
            empties them into.
        journal: the supervisor's, where the guard records an end without a last record.
        supervisor: id of this supervisor's life.
        root: the directory below which the guard follows no link; see `contained`.
    """

    def __init__(
        self,
        leave_seconds: float,
        outputs: Mapping[int, Path],
        journal: Path,
        supervisor: str,
        root: str,
    ) -> None:
        self._leave_seconds = leave_seconds
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._left_behind: dict[int, float] = {}  # group -> when it is killed
        self._started: list[subprocess.Popen[bytes]] = []
        # Without this, orphans of the workers go to process 1, which in a container may
        # reap late or never, and a dead child looks like a living one until then.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        pairs = [str(each) for pair in outputs.items() for each in pair]
        self._guard = subprocess.Popen(
            [
                *(*_SCRIPT, str(_HERE / "guard.py"), str(leave_seconds)),
                *(str(journal), supervisor, root, *pairs),
            ],
            pass_fds=tuple(outputs),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(self._guard)

    def end_orderly(self) -> None:
        """Tells the guard that the journal has the supervisor's last record."""
        self._tell_guard(".\n")

    def close(self) -> None:
        """The supervisor ends; the guard ends what is left and follows."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_GUARD_EXIT_SECONDS)

    def start(
        self,
        worker: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
    ) -> int:
        """Starts a worker that writes to a descriptor; returns its process id.

        Raises:
            OSError: there is no memory, or no process left.
        """
        process = subprocess.Popen(
            [*_SCRIPT, str(_HERE / "launch.py"), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._started.append(process)
        self._tell_guard(f"+{process.pid}\n")
        self._running[worker] = process
        return process.pid

    def reap(self, now: float) -> list[tuple[int, ReturnCode]]:
        """The workers that have ended since the last call, and a look at leftovers."""
        ended = []
        for worker, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[worker]
                ended.append((worker, ReturnCode(code)))
                _signal_group(process.pid, signal.SIGTERM)
                self._left_behind[process.pid] = now + self._leave_seconds
        self._reap_adopted()
        for group, killed_at in list(self._left_behind.items()):
            if not _signal_group(group, 0):
                del self._left_behind[group]
                self._tell_guard(f"-{group}\n")
            elif now >= killed_at:
                _signal_group(group, signal.SIGKILL)
        return ended

    def _reap_adopted(self) -> None:
        """Reaps orphans that have ended; their parent, a worker or its child, had too.

        The codes of processes that were started here are kept for their `Popen`.
        """
        self._started = [each for each in self._started if each.poll() is None]
        own = {each.pid for each in self._started}
        options = os.WEXITED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, options | os.WNOWAIT):
                if ended.si_pid in own:  # since it was polled; SIGCHLD is pending
                    break
                os.waitid(os.P_PID, ended.si_pid, options)

    @property
    def running(self) -> list[int]:
        """The workers that have not ended, as far as `reap` has seen."""
        return list(self._running)

    @property
    def has_leftovers(self) -> bool:
        """Whether children of ended workers still run; `reap` ends them in time."""
        return bool(self._left_behind)

    def ask(self) -> None:
        """Sends SIGTERM to the workers that still run."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the workers that still run, and to all children."""
        for group in [p.pid for p in self._running.values()] + list(self._left_behind):
            _signal_group(group, signal.SIGKILL)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # without it, only a killed one is unguarded
            os.write(self._guard.stdin.fileno(), line.encode("ascii"))


def _signal_group(group: int, number: int) -> bool:
    """False where the group has no member any more."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a member has another user: it is there, and beyond our reach
    return True
