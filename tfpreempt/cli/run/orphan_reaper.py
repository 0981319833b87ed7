"""Ends the workers if the supervisor is killed.

A separate script, run by its path as a child of the supervisor, and called the guard.
It reads lines from its standard input: `+PGID` for a new process group, `-PGID` for a
process group that has ended, and `.` after the supervisor has written its last record.
The end of the input means that the supervisor has ended. Then remaining groups get
SIGTERM, some seconds to commit, and SIGKILL. If there was no `.`, the supervisor was
killed or failed, and the guard appends a record to the supervisor's journal.

Until the workers have ended, the guard reads their pipes, and appends the output to the
logs. The kernel's parent-death signal alone would not be enough: TensorFlow's SIGTERM
handler may ignore it, and then old workers would commit beside those of a new run.

Symbolic links below ROOT are not followed.

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
        The remaining groups, and whether the supervisor has not written its last
        record.
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
    """Records the end of the supervisor in the supervisor's journal, if present."""
    from tfpreempt.core.clock import SystemClock
    from tfpreempt.core.journal import JsonLines
    from tfpreempt.core.threads import CallTimeoutError, call_within

    if os.path.exists(journal):
        record = {"event": "supervisor_terminated", "supervisor": supervisor}
        lines = JsonLines(Path(journal), SystemClock())
        with contextlib.suppress(CallTimeoutError):  # a hung disk delays no signal
            call_within(_RECORD_SECONDS, lambda: lines.append(record))


def ask_groups(groups: set[int]) -> None:
    """Sends SIGTERM to the worker of every group; if it has ended, to the group.

    Only the worker gets the signal, so that its data loader processes run until the
    commit.
    """
    for group in groups:
        _signal(group, signal.SIGTERM) or _signal(-group, signal.SIGTERM)


def end_groups(
    groups: set[int], grace_seconds: float, outputs: dict[int, str], root: str
) -> None:
    """Waits for the groups to end, copies their output, and kills remaining groups."""
    deadline = time.monotonic() + grace_seconds
    while groups and time.monotonic() < deadline:
        _copy(outputs, root, _TICK_SECONDS)
        groups = {group for group in groups if _signal(-group, 0)}
    for group in groups:
        _signal(-group, signal.SIGKILL)
    _copy(outputs, root, 0.0)


def _copy(outputs: dict[int, str], root: str, seconds: float) -> None:
    """Waits up to `seconds` for output, and appends it to the logs."""
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
    """Sends a signal to a process, or to a group (negative target); False if none."""
    try:
        os.kill(target, number)
    except OSError:
        return False
    return True


def main() -> None:
    """Waits until the supervisor ends, then ends the workers. Blocks every signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    sys.path[:0] = [str(Path(__file__).parents[3])]  # for this package only
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
