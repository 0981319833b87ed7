"""Reads the files of a journal directory, once, or repeatedly while the files grow."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from tfpreempt.cli.journals.processes import SupervisorJournal, WorkerJournal
from tfpreempt.cli.journals.records import Record
from tfpreempt.core.journal import LineReader, open_file
from tfpreempt.handler.status_file import WorkerStatus, read_worker_status, status_path

_WORKER = re.compile(r"worker-(\d{1,9})\.(?:jsonl|now)")
_SUPERVISOR = re.compile(r"supervisor(?:-[\w-]+)?\.jsonl")

_Journal: TypeAlias = WorkerJournal | SupervisorJournal


@dataclasses.dataclass(frozen=True, slots=True)
class LastReport:
    """The contents of a worker's status file, and the time of the file.

    Attributes:
        now: contents of the file.
        at: time at which the worker wrote the file, in seconds since the epoch, on the
            clock of the machine that reads the file.
    """

    now: WorkerStatus
    at: float


class _File:
    """A journal file that is read incrementally, line by line.

    Args:
        path: path of the file, which need not exist yet.
        make: function that returns an empty journal, which receives the lines.

    Attributes:
        journal: journal with the lines read so far.
        error: error of the last attempt to read the file; None if it succeeded.
        is_incomplete: whether the last line of the file is incomplete.
    """

    def __init__(self, path: Path, make: Callable[[], _Journal]) -> None:
        self._path = path
        self._make = make
        self._inode = 0
        self._restart()

    def _restart(self) -> None:
        self._lines = LineReader()
        self.journal = self._make()
        self.error: OSError | None = None

    @property
    def is_incomplete(self) -> bool:
        return bool(self._lines.rest.strip())

    def read_on(self) -> None:
        """Reads new lines; reads a replaced or shortened file from the beginning."""
        self.error = None
        try:
            with open(open_file(self._path, os.O_RDONLY), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._lines.at:
                    self._inode = status.st_ino
                    self._restart()
                for line in self._lines.read_on(file.fileno()):
                    self.journal.add_line(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.error = error


class JournalTailer:
    """Reads the journals and status files of a run, repeatedly while they grow.

    Only one thread at a time may call `read_on`.

    Args:
        directory: directory of the journals.
        workers: indices of the workers whose files to read; None: all workers.
        supervisor: file name of the only supervisor journal to read; None: all
            supervisor journals.
        keeps_all: whether to keep all records. If False, only the newest records are
            kept.

    Attributes:
        directory: directory of the journals.
        reports: newest status of every worker with a status file, by worker index.
        lock: lock for callers in several threads; this class does not acquire it.
    """

    def __init__(
        self,
        directory: Path,
        workers: Collection[int] | None = None,
        supervisor: str | None = None,
        *,
        keeps_all: bool = False,
    ) -> None:
        self.directory = directory
        self._only_workers = workers
        self._only_supervisor = supervisor
        self._keeps_all = keeps_all
        self._files: dict[str, _File] = {}
        self.reports: dict[int, LastReport] = {}
        self.lock = threading.Lock()

    @property
    def reads_chief(self) -> bool:
        """Whether the journal of the chief is read; only the chief records commits."""
        return self._only_workers is None or 0 in self._only_workers

    @property
    def workers(self) -> dict[int, WorkerJournal]:
        """The journals of the workers, by index."""
        journals = [file.journal for file in self._files.values()]
        return {j.worker: j for j in journals if isinstance(j, WorkerJournal)}

    @property
    def supervisors(self) -> list[SupervisorJournal]:
        """The journals of the supervisors."""
        journals = [file.journal for file in self._files.values()]
        return [each for each in journals if isinstance(each, SupervisorJournal)]

    @property
    def warnings(self) -> list[str]:
        """Warnings about files with missing or corrupt records."""
        found = []
        for name, file in sorted(self._files.items()):
            if file.error is not None:
                found.append(
                    f"{name}: cannot be read ({file.error.strerror}); its records are "
                    "missing"
                )
            if bad := file.journal.corrupt + file.is_incomplete:
                found.append(
                    f"{name}: {bad} line(s) are corrupt or incomplete, as after a "
                    "kill; these lines are left out"
                )
        return found

    def records(self, event: str) -> list[Record]:
        """Returns the records of an event from all workers, ordered by wall time."""
        found = [
            record
            for journal in self.workers.values()
            for training in journal.trainings
            for record in training.of(event)
        ]
        return sorted(found, key=lambda each: each.wall)

    def read_on(self, at: float) -> None:
        """Reads the records and status files that were written since the last call.

        If a status file has changed since the last call, the time of this call counts
        as the time of the file, because the clock of the worker's machine may be wrong.
        Only at the first read, the time inside the file counts.

        Args:
            at: current time of this machine, in seconds since the epoch.

        Raises:
            OSError: the directory cannot be read.
        """
        for name in os.listdir(self.directory):
            self._add(name)
        for worker in self.workers:
            now = read_worker_status(status_path(self.directory, worker))
            before = self.reports.get(worker)
            if now is not None and (before is None or before.now != now):
                since = min(now.at, at) if before is None else at
                self.reports[worker] = LastReport(now, since)
        for file in self._files.values():
            file.read_on()

    def _add(self, name: str) -> None:
        """Adds a file to the files to read, if it is a requested journal.

        Args:
            name: name of the file in the directory. For a worker's status file, the
                journal of this worker is added.
        """
        make: Callable[[], _Journal]
        if match := _WORKER.fullmatch(name):
            index = int(match[1])
            if self._only_workers is not None and index not in self._only_workers:
                return
            name = f"worker-{index}.jsonl"
            make = functools.partial(WorkerJournal, index, keeps_all=self._keeps_all)
        elif _SUPERVISOR.fullmatch(name) and self._only_supervisor in (None, name):
            make = functools.partial(SupervisorJournal, name, keeps_all=self._keeps_all)
        else:
            return
        if name not in self._files:
            self._files[name] = _File(self.directory / name, make)
