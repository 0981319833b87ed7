"""Detects whether another run has committed to a directory or mirror meanwhile.

A run resumes from the commits found at its start. While the run holds the lease, no
other run commits. Once the lease is released, another run may commit; a later commit of
the first run would then mix the commits of both. So the run remembers the *head*: the
newest commit of other processes. If a newer commit of another process appears, the run
stops. In addition, each manifest names a *parent*: the newest commit when the commit
was made.
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
    """The lease, as used by code that writes files under the lease."""

    @property
    def token(self) -> str | None:
        """Token of the lease; None if the process does not hold the lease."""
        ...

    def check(self) -> None:
        """Raises an error if the lease is lost."""
        ...

    def lose_to_another_run(self) -> NoReturn:
        """Raises an error: another run has held the lease meanwhile, and committed."""
        ...

    def moving(self) -> contextlib.AbstractContextManager[str | None]:
        """Returns a context with a path in the lease's directory, through which to move
        a file; or with None, if the lease has no directory."""
        ...


@dataclasses.dataclass(eq=False)
class Head:
    """The newest known commit of other processes.

    Not thread-safe: used by the thread that lists the commits, or by the thread that
    publishes a commit.
    """

    _base: Parent | None = None  # None before the first `follow`
    _lease: str | None = None  # token of the lease at the last `follow`

    @property
    def is_known(self) -> bool:
        """Whether `follow` was called: the run has listed the commits."""
        return self._base is not None

    def has_moved(self, found: Iterable[Entry]) -> bool:
        """Returns whether another run has committed since the last call of `follow`.

        Args:
            found: the present commits.
        """
        there, base = newest(each for each in found if not is_own(each)), self._base
        if base is None or there.sequence < base.sequence:
            return False
        is_other = "" not in (there.token, base.token) and there.token != base.token
        return there.sequence > base.sequence or is_other

    def follow(self, found: Iterable[Entry], lease: HeldLease) -> None:
        """Remembers the newest present commit of other processes.

        If the lease was released since the last call, first checks that no other run
        has committed.

        Args:
            found: the present commits, including commits that this process adds.
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
    """Returns the newest of some commits, in the form of a parent for the next commit.

    Args:
        commits: checkpoints to choose from. Checkpoints of other programs do not count,
            because they have no sequence.
    """
    found = max(commits, key=catalog.rank, default=None)
    if found is None or found.sequence is None:
        return NONE
    return Parent(token=found.token, sequence=found.sequence)


def this_process() -> str:
    """Returns the name of this process in its manifests. A forked child has another
    name."""
    return f"{_PROCESS}-{os.getpid()}"


def is_own(commit: Entry) -> bool:
    """Returns whether this process made a commit."""
    manifest = commit.manifest
    return manifest is not None and manifest.metadata.get("process") == this_process()
