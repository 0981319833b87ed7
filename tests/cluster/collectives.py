"""Collectives of a simulated cluster: all processes enter the same in one order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tests.cluster.timeline import Process, Timeline

Tag = tuple[str, int]  # purpose of the collective: a step or a save, and its number


class _Entry:
    """A process inside a collective."""

    __slots__ = ("over", "process", "resume", "tag")

    def __init__(self, process: Process, tag: Tag, resume: Callable[[Any], None]):
        self.process = process
        self.tag = tag
        self.resume = resume
        self.over = False

    def end(self, ok: bool) -> None:
        if not self.over:
            self.over = True
            self.resume(ok)


class _Group:
    """A collective, and the processes that have entered the collective so far."""

    __slots__ = ("ends", "entries", "tags")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.tags: set[Tag] = set()
        self.ends = 0


class Collectives:
    """Completes a collective when all processes are in it; fails it after a crash.

    Args:
        timeline: the virtual time.
        processes: all processes of the cluster.
        failure: returns the milliseconds that a survivor needs to notice a crash.

    Attributes:
        torn: descriptions of collectives that processes entered out of step; such a
            collective never completes.
    """

    def __init__(
        self,
        timeline: Timeline,
        processes: Sequence[Process],
        failure: Callable[[], int],
    ) -> None:
        self.torn: list[str] = []
        self._timeline = timeline
        self._processes = processes
        self._failure = failure
        self._entered: dict[Process, int] = dict.fromkeys(processes, 0)
        self._groups: dict[int, _Group] = {}
        self._first_missed: int | None = None  # by a process that has ended

    def enter(
        self,
        process: Process,
        tag: Tag,
        duration: int,
        resume: Callable[[Any], None],
    ) -> None:
        """Makes a process enter its next collective.

        Args:
            process: the process.
            tag: purpose of the collective.
            duration: milliseconds of the process's own part.
            resume: called with whether the collective completed.
        """
        number = self._entered[process]
        self._entered[process] = number + 1
        group = self._groups.setdefault(number, _Group())
        group.entries.append(_Entry(process, tag, resume))
        group.tags.add(tag)
        group.ends = max(group.ends, self._timeline.now + duration)
        is_whole, now = len(group.tags) == 1, self._timeline.now
        if len(group.entries) == len(self._processes) and is_whole:
            for entry in group.entries:
                self._end(entry, group.ends, True)
        elif self._first_missed is not None and self._first_missed <= number:
            self._end(group.entries[-1], now + self._failure(), False)
        elif not is_whole:
            tags = [entry.tag for entry in group.entries]
            self.torn.append(f"collective {number}: {tags}")

    def process_ended(self, process: Process) -> None:
        """Makes collectives of the survivors fail, also the current collective."""
        left = self._entered[process] - 1  # not in later collectives
        if self._first_missed is None or left < self._first_missed:
            self._first_missed = left
        for group in self._groups.values():
            if group.ends < self._timeline.now and len(group.entries) == len(
                self._processes
            ):
                continue
            for entry in group.entries:
                if entry.process.gone_at is None and not entry.over:
                    self._end(entry, self._timeline.now + self._failure(), False)

    def _end(self, entry: _Entry, when: int, ok: bool) -> None:
        self._timeline.at(when, functools.partial(entry.end, ok), entry.process)
