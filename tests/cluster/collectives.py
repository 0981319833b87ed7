"""Collectives of a simulated cluster: all processes enter the same in one order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tests.cluster.timeline import Process, Timeline

Tag = tuple[str, int]  # what the collective is for: a step, or a save, and its number


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


class Collectives:
    """Completes a collective once all processes are in it; fails it after a death.

    Args:
        timeline: when things happen.
        processes: all of the cluster.
        failure: gives the milliseconds that a survivor needs to notice a death.

    Attributes:
        torn: what was seen where processes entered different collectives together; such
            a collective never completes.
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
        self._groups: dict[int, list[_Entry]] = {}
        self._ends: dict[int, int] = {}

    def enter(
        self,
        process: Process,
        tag: Tag,
        duration: int,
        resume: Callable[[Any], None],
    ) -> None:
        """A process enters its next collective.

        Args:
            process: who.
            tag: what for.
            duration: milliseconds that its own part takes.
            resume: told whether it completed.
        """
        number = self._entered[process]
        self._entered[process] = number + 1
        group = self._groups.setdefault(number, [])
        group.append(_Entry(process, tag, resume))
        ends = max(self._ends.get(number, 0), self._timeline.now + duration)
        self._ends[number] = ends
        if len(group) == len(self._processes) and self._is_whole(number):
            for entry in group:
                self._end(entry, ends, True)
        elif any(self._is_missed(process, number) for process in self._processes):
            self._end(group[-1], self._timeline.now + self._failure(), False)
        elif not self._is_whole(number):
            self.torn.append(f"collective {number}: {[entry.tag for entry in group]}")

    def process_ended(self, process: Process) -> None:
        """The survivors' collectives will fail, also one that it was still in."""
        for number, group in self._groups.items():
            if self._ends[number] < self._timeline.now and len(group) == len(
                self._processes
            ):
                continue
            for entry in group:
                if entry.process.gone_at is None and not entry.over:
                    self._end(entry, self._timeline.now + self._failure(), False)

    def _is_whole(self, number: int) -> bool:
        return len({entry.tag for entry in self._groups[number]}) == 1

    def _is_missed(self, process: Process, number: int) -> bool:
        """Whether it ended before this collective, or in it."""
        return process.gone_at is not None and self._entered[process] <= number + 1

    def _end(self, entry: _Entry, when: int, ok: bool) -> None:
        self._timeline.at(when, functools.partial(entry.end, ok), entry.process)
