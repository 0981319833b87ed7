"""Reads a run's journals as they grow, and what its workers say of themselves."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Generic, TypeVar

from tfpreempt.cli.status.picture import (
    Heard,
    Picture,
    State,
    SupervisorJournal,
    WorkerJournal,
    paint,
)
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.journal import LineReader, open_file, parse_record
from tfpreempt.handler.now import TOLD_EVERY, now_path, read_now

LOOKS_AGAIN = TOLD_EVERY + 2
"""Seconds, where a worker seems silent: the clock of its machine may be another."""

_CLOCKS_DIFFER = 600.0  # seconds at most: who is silent for longer is so by any clock
_WORKER = re.compile(r"worker-(\d{1,9})\.(?:jsonl|now)")
_SUPERVISOR = re.compile(r"supervisor(?:-[\w-]+)?\.jsonl")

_Journal = TypeVar("_Journal", bound=WorkerJournal | SupervisorJournal)


class _File(Generic[_Journal]):
    """One journal, read as far as its newest whole line.

    Args:
        path: of the file; it may come later.
        kind: what its records make up.
    """

    def __init__(self, path: Path, kind: type[_Journal]) -> None:
        self._path = path
        self._kind = kind
        self._inode = 0
        self._restart()

    def _restart(self) -> None:
        self._lines = LineReader()
        self._journal = self._kind()

    def read_on(self) -> _Journal:
        """Reads what came since; what took the file's place, from its start.

        What is no whole record, or of another version, is passed over; so is what the
        disk does not give at the moment.

        Returns:
            What it says so far.
        """
        try:
            descriptor = open_file(self._path, os.O_RDONLY)
        except OSError:
            return self._journal
        try:
            status = os.fstat(descriptor)
            if status.st_ino != self._inode or status.st_size < self._lines.at:
                self._inode = status.st_ino
                self._restart()
            with contextlib.suppress(OSError):
                for line in self._lines.read_on(descriptor):
                    record = parse_record(line)
                    if record is not None:
                        with contextlib.suppress(ValueError):
                            self._journal.see(record)
        finally:
            os.close(descriptor)
        return self._journal


class Follower:
    """A run that is looked at again and again. Any thread.

    Args:
        directory: of its journals.
        workers: those that are looked at; None: all.
        supervisor: name of the one supervisor's journal that is read; None: all.
    """

    def __init__(
        self,
        directory: Path,
        workers: Collection[int] | None = None,
        supervisor: str | None = None,
    ) -> None:
        self._directory = directory
        self._workers = workers
        self._supervisor = supervisor
        self._of_workers: dict[int, _File[WorkerJournal]] = {}
        self._of_supervisors: dict[str, _File[SupervisorJournal]] = {}
        self._heard: dict[int, Heard] = {}
        self._lock = threading.Lock()

    def look(self, at: float) -> Picture:
        """What the run is at.

        A word that differs from that of the look before is of now, whatever the clock
        of its machine says. At the first look nothing better is known.

        Args:
            at: wall seconds, now.

        Raises:
            OSError: the directory cannot be read.
        """
        with self._lock:
            for name in os.listdir(self._directory):
                self._add(name)
            nows = {
                worker: now
                for worker in self._of_workers
                if (now := read_now(now_path(self._directory, worker))) is not None
            }
            for worker, now in nows.items():
                before = self._heard.get(worker)
                if before is None:
                    self._heard[worker] = Heard(now, min(now.at, at))
                elif before.now != now:
                    self._heard[worker] = Heard(now, at)
            return paint(
                at,
                [each.read_on() for each in self._of_supervisors.values()],
                {index: each.read_on() for index, each in self._of_workers.items()},
                self._heard,
            )

    def look_now(self) -> Picture:
        """The same at once; some seconds later where a worker may seem silent.

        Raises:
            OSError: the directory cannot be read.
        """
        picture = self.look(SystemClock.wall())
        silent = [w.since or 0.0 for w in picture.workers if w.state is State.SILENT]
        if any(picture.at - since < _CLOCKS_DIFFER for since in silent):
            threading.Event().wait(LOOKS_AGAIN)
            picture = self.look(SystemClock.wall())
        return picture

    def _add(self, name: str) -> None:
        """A file of the directory, if it is one to be read."""
        if match := _WORKER.fullmatch(name):
            index = int(match[1])
            if self._workers is None or index in self._workers:
                path = self._directory / f"worker-{index}.jsonl"
                self._of_workers.setdefault(index, _File(path, WorkerJournal))
        elif _SUPERVISOR.fullmatch(name) and self._supervisor in (None, name):
            path = self._directory / name
            self._of_supervisors.setdefault(name, _File(path, SupervisorJournal))
