"""Ends the workers if the supervisor is killed.

This is a separate script, called the guard, which the supervisor runs by its path as a
child process. The guard reads lines from its standard input: `+PGID` for a new process
group, `-PGID` for a process group that has ended, and `.` after the supervisor has
written its last record. The end of the input means that the supervisor has ended. The
guard then sends SIGTERM to the remaining groups, waits some seconds for their commits,
and sends SIGKILL. If there was no `.`, the supervisor was killed or failed, and the
guard appends a record to the supervisor's journal.

Until the workers have ended, the guard reads their pipes, and appends the output to the
logs. The signal that the kernel sends at the end of a parent would not be enough:
TensorFlow's SIGTERM handler may ignore the signal, and then workers of the old run
would commit beside the workers of a new run.

Symbolic links inside ROOT are not followed.

Usage: orphan_reaper.py GRACE_SECONDS JOURNAL SUPERVISOR ROOT [DESCRIPTOR LOG ...]
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_RECORD_SECONDS = 1.0  # timeout for the record, because a disk may hang
_TICK_SECONDS = 0.05
_READ_BYTES = 1 << 20


def read_groups(lines: Iterable[str]) -> tuple[set[int], bool]:
    """Reads the supervisor's lines until the end of the input.

    Returns:
        The process groups that have not ended, and whether the supervisor ended before
        it had written its last record.
    """
    groups: set[int] = set()
    is_cut_off = False
    for line in lines:
        if line.startswith("+"):
            groups.add(int(line[1:]))
            is_cut_off = True
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
        else:
            is_cut_off = False
    return groups, is_cut_off


def record_end(journal: str, supervisor: str) -> None:
    """Records the end of the supervisor in its journal, if the journal exists.

    Args:
        journal: path of the journal.
        supervisor: id of the supervisor.
    """
    from tfpreempt.core.clock import SystemClock
    from tfpreempt.core.journal import JsonLines
    from tfpreempt.core.threads import CallTimeoutError, call_within

    if os.path.exists(journal):
        record = {"event": "supervisor_terminated", "supervisor": supervisor}
        lines = JsonLines(Path(journal), SystemClock())
        # A hung disk must not delay the signals.
        with contextlib.suppress(CallTimeoutError):
            call_within(_RECORD_SECONDS, lambda: lines.append(record))


def ask_groups(groups: set[int]) -> None:
    """Sends SIGTERM to the worker of every process group.

    Only the worker gets the signal, so that its data loader processes run until the
    commit. If the worker has ended, all processes of the group get the signal.
    """
    for group in groups:
        _signal(group, signal.SIGTERM) or _signal(-group, signal.SIGTERM)


def end_groups(
    groups: set[int], grace_seconds: float, outputs: dict[int, str], root: str
) -> None:
    """Waits until the process groups have ended, and kills the remaining groups.

    Args:
        groups: ids of the process groups.
        grace_seconds: maximum seconds to wait before SIGKILL.
        outputs: for the reading end of each worker's pipe, the path of the log file, to
            which the function appends the output.
        root: directory inside which no symbolic link is followed.
    """
    deadline = time.monotonic() + grace_seconds
    while groups and time.monotonic() < deadline:
        _copy(outputs, root, _TICK_SECONDS)
        groups = {group for group in groups if _signal(-group, 0)}
    for group in groups:
        _signal(-group, signal.SIGKILL)
    _copy(outputs, root, 0.0)


def _copy(outputs: dict[int, str], root: str, seconds: float) -> None:
    """Waits up to `seconds` for output of the workers, and appends it to the logs."""
    from tfpreempt.core import contained

    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(seconds * 1000):
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            del outputs[descriptor]
            continue
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with contextlib.suppress(OSError):
            log = contained.open_file(
                outputs[descriptor], flags, root=root, copies=True
            )
            with open(log, "ab") as file:
                file.write(data)


def _signal(target: int, number: int) -> bool:
    """Sends a signal to a process, or to a process group.

    Args:
        target: id of the process, or the negative id of the group.
        number: number of the signal; 0 only checks that a process exists.

    Returns:
        Whether the signal was sent.
    """
    try:
        os.kill(target, number)
    except OSError:
        return False
    return True


def main() -> None:
    """Waits until the supervisor ends, then ends the workers. Blocks all signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # The interpreter has no site packages; add the directory that contains tfpreempt.
    sys.path[:0] = [str(Path(__file__).parents[3])]
    grace, journal, supervisor, root, *pairs = sys.argv[1:]
    outputs = dict(zip(map(int, pairs[::2]), pairs[1::2], strict=True))
    groups, is_cut_off = read_groups(sys.stdin)
    ask_groups(groups)
    if is_cut_off:
        record_end(journal, supervisor)
    if groups:
        end_groups(groups, float(grace), outputs, root)


if __name__ == "__main__":
    main()
