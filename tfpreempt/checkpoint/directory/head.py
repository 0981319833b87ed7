"""The head of a directory or a mirror: has another run committed there meanwhile?

A run resumes from the commits found at its start. No other run commits while the run
holds the lease. Once the lease is released, another run may commit: the commits of both
would be mixed if the first run published again. The head is the newest commit of other
processes known to the run. Each manifest names a parent: the newest commit
before the publication.
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
    """A lease, as seen by the code that writes under the lease."""

    @property
    def token(self) -> str | None:
        """Token of the lease; None if the process does not hold the lease."""
        ...

    def check(self) -> None:
        """Raises an error if the lease is lost."""
        ...

    def lose_to_another_run(self) -> NoReturn:
        """Raises an error: another run had the lease meanwhile, and committed."""
        ...

    def moving(self) -> contextlib.AbstractContextManager[str | None]:
        """Returns a context with a path through which to move a file, or with None."""
        ...


@dataclasses.dataclass(eq=False)
class Head:
    """The newest known commit of other processes.

    Used by a single thread at a time: the thread that lists the commits, or publishes a
    commit.
    """

    _base: Parent | None = None  # None before the first listing
    _lease: str | None = None  # token of the lease at the last listing

    @property
    def is_known(self) -> bool:
        """Whether the run has listed the commits."""
        return self._base is not None

    def has_moved(self, found: Iterable[Entry]) -> bool:
        """Returns whether another run has committed since the last call of `follow`.

        Args:
            found: the commits that are there now.
        """
        there, base = newest(each for each in found if not is_own(each)), self._base
        if base is None or there.sequence < base.sequence:
            return False
        is_other = "" not in (there.token, base.token) and there.token != base.token
        return there.sequence > base.sequence or is_other

    def follow(self, found: Iterable[Entry], lease: HeldLease) -> None:
        """Takes the current commits into account, if no other run made them meanwhile.

        While the process holds the same lease, every commit is taken into account
        without a check.

        Args:
            found: the commits that are there now, or that the process adds.
            lease: lease of the directory or mirror. A process without the lease takes
                into account only the commits of its first call.

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
    """Returns the newest of some commits as the parent of the next commit.

    Args:
        commits: checkpoints to choose from. Checkpoints of other programs have no
            sequence and do not count.
    """
    found = max(commits, key=catalog.rank, default=None)
    if found is None or found.sequence is None:
        return NONE
    return Parent(token=found.token, sequence=found.sequence)


def this_process() -> str:
    """Returns the process's name in its manifests; a forked child has another name."""
    return f"{_PROCESS}-{os.getpid()}"


def is_own(commit: Entry) -> bool:
    """Returns whether the process made a commit."""
    manifest = commit.manifest
    return manifest is not None and manifest.metadata.get("process") == this_process()
