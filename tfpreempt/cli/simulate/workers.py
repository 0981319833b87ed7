"""Finds the running workers of a checkpoint directory, and signals them safely.

The status file of a worker contains its process id. Any process with write access may
have changed the file, and the process may have ended. So a process counts as the worker
only if it has the journal of the worker open for writing, as a worker that can receive
a notice has. A process id may be reused before the signal is sent. So this module first
opens a pidfd (a file descriptor that refers to a process), then checks the process
again, and sends the signal through the pidfd.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tfpreempt.core.journal import (
    SEGMENT,
    LineReader,
    journal_directory,
    open_file,
    parse_record,
    segments,
)
from tfpreempt.errors import TfpreemptError
from tfpreempt.handler.status_file import read_worker_status


class NothingRunsError(TfpreemptError, RuntimeError):
    """No running worker can receive a notice."""


class RunningWorker:
    """A running worker, to which signals are sent through a pidfd.

    If the worker ends, a new process with the same process id gets no signal.

    Args:
        index: index of the worker.
        pid: process id of the worker.
        journal: directory of the worker's journal.

    Raises:
        ProcessLookupError: the process does not exist.
    """

    def __init__(self, index: int, pid: int, journal: Path) -> None:
        self.index = index
        self.pid = pid
        self._journal = journal / f"worker-{index}.jsonl"
        # Bytes of each file of the journal at the start.
        self._sizes = {each: each.stat().st_size for each in segments(self._journal)}
        self._pidfd = os.pidfd_open(pid)

    def close(self) -> None:
        """Closes the pidfd."""
        os.close(self._pidfd)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the worker.

        Raises:
            NothingRunsError: the worker has just ended.
        """
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError as error:
            raise NothingRunsError(
                f"worker {self.index} (process {self.pid}) exited before the signal. "
                "Start the job again"
            ) from error

    def wait_ended(self, seconds: float) -> bool:
        """Waits for the end of the worker; returns whether the worker has ended.

        Args:
            seconds: maximum seconds to wait.
        """
        ended, _, _ = select.select([self._pidfd], [], [], seconds)
        return bool(ended)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records that the worker wrote since this object was created.

        Raises:
            OSError: the journal cannot be read.
        """
        lines: list[bytes] = []
        for path in segments(self._journal):
            with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
                reader = LineReader(self._sizes.get(path, 0))
                lines += reader.read_on(file.fileno())
        return [record for line in lines if (record := parse_record(line))]


@contextlib.contextmanager
def held_workers(
    directory: Path, indexes: Iterable[int]
) -> Iterator[list[RunningWorker]]:
    """Context manager: yields running workers, and closes their pidfds at the end.

    Args:
        directory: checkpoint directory of the job.
        indexes: indices of the workers.

    Raises:
        NothingRunsError: a worker does not run on this machine.
    """
    journal = journal_directory(directory).resolve()
    if not journal.is_dir():
        above = directory.absolute().parent
        where = "Name the checkpoint directory of a running job"
        if journal_directory(above).is_dir():
            where = f"{above} has a journal: name {above}"
        raise NothingRunsError(
            f"{directory} has no journal, so no running job was found. {where}"
        )
    running = _find_workers(journal)
    held: list[RunningWorker] = []
    with contextlib.ExitStack() as ends:
        for index in dict.fromkeys(indexes):
            with contextlib.suppress(KeyError, ProcessLookupError):
                held.append(RunningWorker(index, running[index], journal))
                ends.callback(held[-1].close)
                if index in _journals_of(running[index], journal):
                    continue
            names = ", ".join(map(str, sorted(running))) or "none"
            raise NothingRunsError(
                f"worker {index} of {directory} is not running on this machine, "
                "belongs to another user, or has not reached the first step. Running "
                f"workers: {names}. Name one of these with --worker (the first is 0), "
                "wait for the first step, or run this command on the machine of "
                "the worker"
            )
        yield held


def _find_workers(journal: Path) -> dict[int, int]:
    """Returns the process ids of the running workers, by worker index.

    Args:
        journal: directory of the journals.
    """
    found = map(read_worker_status, journal.glob("worker-*.status"))
    return {
        now.worker: now.pid
        for now in found
        if now is not None and now.worker in _journals_of(now.pid, journal)
    }


def _journals_of(pid: int, journal: Path) -> Iterator[int]:
    """Yields the indices of the workers whose journals a process has open for writing.

    Yields no index for a process of another user, because its open files are hidden.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the file was closed since `scandir`
                folder, name = os.path.split(os.readlink(entry.path))
                match = re.fullmatch(r"worker-(\d+)" + SEGMENT + r"\.jsonl", name)
                if match and folder == str(journal) and _can_write(pid, entry.name):
                    yield int(match[1])


def _can_write(pid: int, descriptor: str) -> bool:
    """Returns whether a file descriptor of a process is open for writing.

    Raises:
        OSError: the descriptor was closed, or belongs to another user's process.
    """
    text = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii")
    flags = int(text.partition("flags:")[2].split()[0], base=8)
    return flags & os.O_ACCMODE != os.O_RDONLY
