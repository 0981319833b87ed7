"""Finds the running worker of a directory, to signal it and nobody else.

A worker that can hear a notice has its journal open: it is the process that does. What
it has forked may have it open too, and a process id may belong to a stranger by the
time it is used, so it is held by a pidfd first, then asked once more, and signalled
through the pidfd.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tfpreempt.core.journal import journal_directory
from tfpreempt.errors import TfpreemptError


class NothingRunsError(TfpreemptError, RuntimeError):
    """There is no running worker that a notice could be sent to."""


class Worker:
    """A worker that runs; its process id is given to no other process meanwhile.

    A context manager. A select finds it readable when it has ended.

    Args:
        index: of the worker.
        pid: its process id.
        pidfd: belongs to this object from now on.
    """

    def __init__(self, index: int, pid: int, pidfd: int) -> None:
        self.index = index
        self.pid = pid
        self._pidfd = pidfd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._pidfd)

    def fileno(self) -> int:
        """For a select."""
        return self._pidfd

    def send(self, number: signal.Signals) -> None:
        """Signals it.

        Raises:
            NothingRunsError: it has just ended.
        """
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError as error:
            raise NothingRunsError(
                f"worker {self.index}, process {self.pid}, has ended just before it "
                "could be signalled. Start the job again"
            ) from error


def hold_worker(directory: Path, index: int) -> Worker:
    """Finds a worker that runs.

    Args:
        directory: its checkpoint directory.
        index: of the worker.

    Raises:
        NothingRunsError: there is no such worker on this machine.
    """
    journal = journal_directory(directory).resolve()
    if not journal.is_dir():
        raise NothingRunsError(_no_journal_text(directory))
    running = _find_workers(journal)
    if index in running:
        pid = running[index]
        with contextlib.suppress(ProcessLookupError):
            worker = Worker(index, pid, os.pidfd_open(pid))
            if index in _journals_of(pid, journal):
                return worker
            os.close(worker.fileno())
    raise NothingRunsError(
        f"worker {index} of {directory} does not run on this machine, belongs to "
        f"another user, or has not come to its first step. {_others_text(running)}"
    )


def _no_journal_text(directory: Path) -> str:
    text = f"{directory} has no journal, so nothing is known to run there. "
    parent = directory.absolute().parent
    if journal_directory(parent).is_dir():
        return f"{text}{parent} has one: name that"
    return (
        f"{text}Expected the checkpoint directory of a job; start the job first, or "
        "check the path"
    )


def _others_text(running: dict[int, int]) -> str:
    """Who runs there instead, and what to do."""
    if not running:
        return (
            "No worker of that job does: it has ended, is starting, or runs elsewhere. "
            "Start it, wait for its first step, or run this command where the worker is"
        )
    names = ", ".join(map(str, sorted(running)))
    return (
        f"Here runs, by its index: {names}. Name one of these with --worker (workers "
        "count from 0), or run this command where the worker is"
    )


def _find_workers(journal: Path) -> dict[int, int]:
    """The process of each worker that has its journal there open."""
    holders: dict[int, set[int]] = collections.defaultdict(set)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            for index in _journals_of(int(entry.name), journal):
                holders[index].add(int(entry.name))
    return {
        index: min(pid for pid in pids if _parent(pid) not in pids)
        for index, pids in holders.items()
    }


def _journals_of(pid: int, journal: Path) -> Iterator[int]:
    """The workers whose journals a process has open; none where it is not ours."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                folder, name = os.path.split(os.readlink(entry.path))
                match = re.fullmatch(r"worker-(\d+)\.jsonl", name)
                if match and folder == str(journal):
                    yield int(match[1])


def _parent(pid: int) -> int:
    """Of a process; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])  # the name may hold anything
