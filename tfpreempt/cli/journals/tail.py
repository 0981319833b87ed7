"""Reads the files of a journal directory, once, or repeatedly while the files grow."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from tfpreempt.checkpoint.lease.lease_record import this_process
from tfpreempt.cli.journals.processes import SupervisorJournal, WorkerJournal
from tfpreempt.cli.journals.records import Record
from tfpreempt.core.journal import SEGMENT, LineReader, open_file
from tfpreempt.handler.status_file import WorkerStatus, read_worker_status, status_path

_WORKER = re.compile(r"worker-(\d{1,9})(?:" + SEGMENT + r"\.jsonl|\.status)")
_SUPERVISOR = re.compile(r"supervisor(?:-[\w-]+)?\.jsonl")

_Journal: TypeAlias = WorkerJournal | SupervisorJournal


@dataclasses.dataclass(frozen=True, slots=True)
class LastReport:
    """The contents of a worker's status file, and the time of the file.

    Attributes:
        now: contents of the file.
        at: time at which the worker wrote the file, in seconds since the epoch, on the
            clock of the machine that reads the file.
        has_ended: whether the process that wrote the file has certainly ended; False if
            unknown, because the process belongs to another machine or container.
    """

    now: WorkerStatus
    at: float
    has_ended: bool = False


class _File:
    """A file of a journal that is read incrementally, line by line.

    Args:
        path: path of the file, which need not exist yet.

    Attributes:
        lines: reader of the file's lines.
        inode: inode of the file that the reader has read; 0 before the first read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = LineReader()
        self.inode = 0


class _Files:
    """The files of a worker's or a supervisor's journal, read incrementally.

    Args:
        make: function that returns an empty journal, which receives the lines.

    Attributes:
        journal: journal with the lines read so far.
        error: error of the last attempt to read the files; None if it succeeded.
        is_incomplete: whether the last line of a file is incomplete.
    """

    def __init__(self, make: Callable[[], _Journal]) -> None:
        self._make = make
        # Key: number of the file, see `core/journal.py`.
        self._files: dict[int, _File] = {}
        self.journal = make()
        self.error: OSError | None = None

    def add(self, number: int, path: Path) -> None:
        """Adds a file of the journal, unless the file was added before."""
        if number not in self._files:
            self._files[number] = _File(path)

    @property
    def is_incomplete(self) -> bool:
        return any(each.lines.rest.strip() for each in self._files.values())

    def read_on(self) -> None:
        """Reads new lines. If a file was replaced or shortened, reads all files from
        the beginning."""
        self.error = None
        for _, file in sorted(self._files.items()):
            try:
                if not self._read(file):
                    self.journal = self._make()
                    for each in self._files.values():
                        each.lines = LineReader()
                    self.read_on()
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                self.error = error

    def _read(self, file: _File) -> bool:
        """Reads the new lines of a file; returns False if the file was replaced or
        shortened after lines were read."""
        descriptor = open_file(file.path, os.O_RDONLY)
        with open(descriptor, "rb", buffering=0):
            status = os.fstat(descriptor)
            is_other = status.st_ino != file.inode or status.st_size < file.lines.at
            file.inode = status.st_ino
            if is_other and file.lines.at:
                return False
            for line in file.lines.read_on(descriptor):
                self.journal.add_line(line)
        return True


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
        keeps_all: whether all records are kept.
        reports: newest status of every worker with a status file, by worker index.
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
        self.keeps_all = keeps_all
        # Key: name of the first file of the journal.
        self._journals: dict[str, _Files] = {}
        self.reports: dict[int, LastReport] = {}

    @property
    def reads_chief(self) -> bool:
        """Whether the journal of the chief is read; only the chief records commits."""
        return self._only_workers is None or 0 in self._only_workers

    @property
    def workers(self) -> dict[int, WorkerJournal]:
        """The journals of the workers, by index."""
        journals = [file.journal for file in self._journals.values()]
        return {j.worker: j for j in journals if isinstance(j, WorkerJournal)}

    @property
    def supervisors(self) -> list[SupervisorJournal]:
        """The journals of the supervisors."""
        journals = [file.journal for file in self._journals.values()]
        return [each for each in journals if isinstance(each, SupervisorJournal)]

    @property
    def warnings(self) -> list[str]:
        """Warnings about files with missing or corrupt records."""
        found = []
        for name, file in sorted(self._journals.items()):
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
        here = this_process(0.0)
        for worker in self.workers:
            now = read_worker_status(status_path(self.directory, worker))
            last = self.reports.get(worker)
            if now is not None and (last is None or last.now != now):
                since = min(now.at, at) if last is None else at
                last = LastReport(now, since)
            if last is not None:
                process = last.now.process
                has_ended = (
                    process is not None
                    and process.pid != here.pid  # a program may read its own status
                    and process.is_dead(here)
                )
                self.reports[worker] = dataclasses.replace(last, has_ended=has_ended)
        for journal in self._journals.values():
            journal.read_on()

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
            number = int(match["segment"] or 1)
            file = name.replace(".status", ".jsonl")
            name = f"worker-{index}.jsonl"
            make = functools.partial(WorkerJournal, index, keeps_all=self.keeps_all)
        elif _SUPERVISOR.fullmatch(name) and self._only_supervisor in (None, name):
            file, number = name, 1
            make = functools.partial(SupervisorJournal, name, keeps_all=self.keeps_all)
        else:
            return
        if name not in self._journals:
            self._journals[name] = _Files(make)
        self._journals[name].add(number, self.directory / file)
