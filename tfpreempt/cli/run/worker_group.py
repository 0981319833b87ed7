"""Starts and ends the worker processes, each in a separate process group.

No worker survives the supervisor. SIGTERM is sent only to the worker, as Kubernetes and
Docker do, and not to the group of the worker: the signal would end data loader
processes that the commit may need. When the worker has ended, the remaining processes
of the group get SIGTERM, and SIGKILL after a timeout. If the worker's command is a
shell script, the script should start the program with `exec`.
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

from tfpreempt.cli.run.restart_policy import ReturnCode

_HERE = Path(__file__).parent
_SCRIPT = (sys.executable, "-I", "-S")  # ignore site packages and PYTHON* variables
_GUARD_EXIT_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class WorkerGroup:
    """Starts, signals and reaps the workers. Use on the main thread only.

    A child process, the guard (`orphan_reaper.py`), knows the process groups of the
    workers. If this process ends for any reason, the guard ends the remaining groups.

    Args:
        leave_seconds: seconds between SIGTERM and SIGKILL, for children of ended
            workers and for workers that the guard ends.
        outputs: for the reading end of every worker's pipe, the path of the log file;
            used by the guard.
        journal: journal of the supervisor, in which the guard records that the
            supervisor was killed.
        supervisor: id of this supervisor.
        root: directory inside which the guard follows no links, see `contained`.
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
        self._left_behind: dict[int, float] = {}  # process group -> time of its SIGKILL
        # Make orphans of the workers children of this process. Otherwise process 1
        # would be the parent. In a container process 1 may never reap children, and an
        # ended process looks like a running process until the parent reaps the process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        pairs = [str(each) for pair in outputs.items() for each in pair]
        self._guard = subprocess.Popen(
            [
                *(*_SCRIPT, str(_HERE / "orphan_reaper.py"), str(leave_seconds)),
                *(str(journal), supervisor, root, *pairs),
            ],
            pass_fds=tuple(outputs),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end_orderly(self) -> None:
        """Tells the guard that the supervisor has written its last record."""
        self._send_to_guard(".\n")

    def close(self) -> None:
        """Closes the guard's input; the guard ends remaining processes, and exits."""
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
        """Starts a worker.

        Args:
            worker: index of the worker.
            command: program and arguments.
            environment: environment of the worker.
            output: descriptor for stdout and stderr.

        Returns:
            The process id.

        Raises:
            OSError: memory or process ids are exhausted.
        """
        process = subprocess.Popen(
            [
                *_SCRIPT,
                str(_HERE / "exec_with_pdeathsig.py"),
                str(os.getpid()),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._send_to_guard(f"+{process.pid}\n")
        self._running[worker] = process
        return process.pid

    def reap(self, now: float) -> list[tuple[int, ReturnCode]]:
        """Finds the workers that have ended, and ends their remaining children.

        Args:
            now: current time on the monotonic clock.

        Returns:
            (index, return code) of every worker that has ended since the last call.
        """
        codes, ended = _reap_children(), []
        for worker, process in list(self._running.items()):
            if (code := codes.get(process.pid)) is not None:
                process.returncode = code  # so that `Popen` does not wait
                del self._running[worker]
                ended.append((worker, code))
                _signal_group(process.pid, signal.SIGTERM)
                self._left_behind[process.pid] = now + self._leave_seconds
        for group, killed_at in list(self._left_behind.items()):
            if not _signal_group(group, 0):
                del self._left_behind[group]
                self._send_to_guard(f"-{group}\n")
            elif now >= killed_at:
                _signal_group(group, signal.SIGKILL)
        return ended

    @property
    def running(self) -> list[int]:
        """Indices of the workers that had not ended at the last call of `reap`."""
        return list(self._running)

    @property
    def has_leftovers(self) -> bool:
        """Whether children of ended workers still run, which `reap` kills later."""
        return bool(self._left_behind)

    def ask(self) -> None:
        """Sends SIGTERM to the running workers."""
        for process in self._running.values():
            os.kill(process.pid, signal.SIGTERM)  # `reap` alone waits for children

    def kill(self) -> None:
        """Sends SIGKILL to the running workers, and to all remaining children."""
        for group in [p.pid for p in self._running.values()] + list(self._left_behind):
            _signal_group(group, signal.SIGKILL)

    def _send_to_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        # Ignore the end of the guard: the guard is needed only if this process is
        # killed.
        with contextlib.suppress(OSError):
            os.write(self._guard.stdin.fileno(), line.encode("ascii"))


def _reap_children() -> dict[int, ReturnCode]:
    """Calls wait() for each child that has ended; returns the return codes by process.

    Also children of ended workers are children of this process, which adopts them.
    """
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            codes[pid] = ReturnCode(os.waitstatus_to_exitcode(status))
    return codes


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns False if the group has no process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user: it runs, but cannot be signalled
    return True
