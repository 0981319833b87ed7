"""Detects whether another run has committed to the directory or mirror of this run.

A run resumes from the commits found at its start. While the run holds the lease, no
other run commits. Once the lease is released, another run may commit; a later commit of
the first run would then mix the commits of both runs. So the first run remembers the
*head*: the newest commit of other processes. If a newer commit of another process
appears, the first run makes no more commits. In addition, each manifest names a
*parent*: the commit that was the newest when the new commit was made.
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


class HeldLease(Protocol):
    """The operations of a lease that are needed to make a commit.

    `checkpoint.lease.lease.Lease` implements the operations.
    """

    @property
    def token(self) -> str | None:
        """Token of the lease; None if the process does not hold the lease."""
        ...

    def check(self) -> None:
        """Raises LeaseLostError if the lease is lost."""
        ...

    def lose_to_another_run(self) -> NoReturn:
        """Marks the lease as lost, and raises LeaseLostError. Called if another run has
        committed while this process did not hold the lease."""
        ...

    def moving(self) -> contextlib.AbstractContextManager[str | None]:
        """Returns a context whose value is a path in the lease's directory. A file
        moved through this path reaches its final name only if the lease is not lost.
        The value is None for the lease of an object store."""
        ...


@dataclasses.dataclass(eq=False)
class Head:
    """The newest commit by another process that this process has seen.

    Not thread-safe. One thread at a time uses the object: at the start of a run the
    thread that lists the commits, later the thread that makes commits.
    """

    _base: Parent | None = None  # None before the first `follow`
    _lease: str | None = None  # token of the lease at the last `follow`

    @property
    def is_known(self) -> bool:
        """Whether the run has listed the commits, by a call of `follow`."""
        return self._base is not None

    def has_moved(self, found: Iterable[Entry]) -> bool:
        """Returns whether another run has committed since the last call of `follow`.

        Args:
            found: the commits that exist now.
        """
        there, base = newest(each for each in found if not is_own(each)), self._base
        if base is None or there.sequence < base.sequence:
            return False
        is_other = "" not in (there.token, base.token) and there.token != base.token
        return there.sequence > base.sequence or is_other

    def follow(self, found: Iterable[Entry], lease: HeldLease) -> None:
        """Remembers the newest commit of other processes.

        If the lease was released and taken again since the last call, `follow` first
        checks that no other run has committed.

        Args:
            found: the commits that exist now, including commits that this process adds.
            lease: lease of the directory or mirror. Without the lease, only the first
                call has an effect.

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
    """Returns the newest of the given commits, as the parent of the next commit.

    Args:
        commits: checkpoints to choose from. Checkpoints of other programs do not count,
            because they have no sequence.
    """
    found = max(commits, key=catalog.rank, default=None)
    if found is None or found.sequence is None:
        return NONE
    return Parent(token=found.token, sequence=found.sequence)


def this_process() -> str:
    """Returns the name that this process writes into its manifests. A forked child has
    another name."""
    return f"{_PROCESS}-{os.getpid()}"


def is_own(commit: Entry) -> bool:
    """Returns whether this process made a commit."""
    manifest = commit.manifest
    return manifest is not None and manifest.metadata.get("process") == this_process()
