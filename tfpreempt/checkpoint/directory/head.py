"""The head of a directory or a mirror: has another run committed there meanwhile?

A run resumes from the commits that were there when it started. No other run commits
while this run holds the lease. Once the lease is released, another run may: the commits
of both would be mixed if this run published again. The head is the newest commit of
other processes that the run has taken into account. Each manifest names its parent, the
commit on which it was published.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterable
from typing import NoReturn, Protocol

from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import Parent

_PROCESS = uuid.uuid4().hex[:16]

NONE = Parent(token="", sequence=0)
"""The parent of the first commit of a directory."""


class Held(Protocol):
    """A lease, as those see it who write under it."""

    @property
    def token(self) -> str | None:
        """Token of the lease; None where this process does not hold it."""
        ...

    def check(self) -> None:
        """Raises where it is lost."""
        ...

    def lose_to_another_run(self) -> NoReturn:
        """Raises: another run had the lease meanwhile, and committed."""
        ...

    def moving(self) -> contextlib.AbstractContextManager[str | None]:
        """A path by which to move a file; None where there is no lease to be had."""
        ...


@dataclasses.dataclass(eq=False)
class Head:
    """The newest commit of other processes that a run has taken into account.

    One thread at a time: the thread that looks at the commits, or publishes one.
    """

    _base: Parent | None = None  # None before the first look
    _lease: str | None = None  # token of the lease at the last look

    @property
    def is_known(self) -> bool:
        """Whether the run has looked at the commits."""
        return self._base is not None

    def has_moved(self, found: Iterable[Entry]) -> bool:
        """Returns whether another run has committed since the last look.

        Args:
            found: the commits that are there now.
        """
        there, base = newest(each for each in found if not is_own(each)), self._base
        if base is None or there.sequence < base.sequence:
            return False
        is_other = "" not in (there.token, base.token) and there.token != base.token
        return there.sequence > base.sequence or is_other

    def follow(self, found: Iterable[Entry], lease: Held) -> None:
        """Takes commits into account: all of them, while one lease is held.

        Args:
            found: the commits that are there now, or that this process brings there.
            lease: of the directory or mirror. A process that does not hold the lease
                takes into account what it finds at its first look.

        Raises:
            LeaseLostError: another run has committed while the lease was released.
        """
        token = lease.token
        if token is None and self._base is not None:
            return
        commits = list(found)
        if token != self._lease and self.has_moved(commits):
            lease.lose_to_another_run()
        others = newest(each for each in commits if not is_own(each))
        if self._base is None or others.sequence >= self._base.sequence:
            self._base = others
        self._lease = token


def newest(commits: Iterable[Entry]) -> Parent:
    """Returns the newest of some commits as the parent of the next one.

    Args:
        commits: checkpoints that other programs wrote have no sequence; they are none.
    """
    found = max(commits, key=catalog.rank, default=None)
    if found is None or found.sequence is None:
        return NONE
    return Parent(token=found.token, sequence=found.sequence)


def this_process() -> str:
    """Returns this process's name in its manifests; a forked child has another."""
    return f"{_PROCESS}-{os.getpid()}"


def is_own(commit: Entry) -> bool:
    """Returns whether this process made a commit."""
    manifest = commit.manifest
    return manifest is not None and manifest.metadata.get("process") == this_process()
