"""What `tfpreempt doctor` finds out, and the lines of its verdict; values only."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path

from tfpreempt.platforms.detect import Platform


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    ADVICE = "advice"  # could be better
    PROBLEM = "problem"  # a preemption would lose work


class Liveness(enum.Enum):
    """What asking a source has shown."""

    LIVE = "live"
    NOTICE = "notice"  # it says now that this machine goes
    DEAD = "dead"
    SLOW = "slow"  # no answer yet; may be normal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """One source of notices.

    Attributes:
        name: the source's.
        grace_seconds: what its notice leaves; None where nobody knows.
        liveness: whether it works here.
        detail: why, for people.
    """

    name: str
    grace_seconds: float | None
    liveness: Liveness
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The checkpoint directory.

    Attributes:
        path: absolute.
        filesystem: its type, such as "ext4"; "" if unknown.
        free_bytes: what this user may still write there.
        save_bytes: the size of the save that was tried.
        save_seconds: how long it took, down to the disk; None: it failed.
        fault: why it failed.
    """

    path: Path
    filesystem: str
    free_bytes: int
    save_bytes: int
    save_seconds: float | None
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it; storage is None where no directory was given."""

    platform: Platform
    sources: tuple[SourceState, ...]
    storage: Storage | None

    @property
    def shortest_grace(self) -> float | None:
        """The least that a notice leaves; None where no source says."""
        known = [s.grace_seconds for s in self.sources if s.grace_seconds is not None]
        return min(known, default=None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the verdict; of a source with what its notice leaves.

    Attributes:
        level: how bad it is.
        about: what was looked at.
        text: what was found, and what to do.
        grace_seconds: of a source, what its notice leaves.
        code: Python that mends it; "" where none does.
    """

    level: Level
    about: str
    text: str
    grace_seconds: float | None = None
    code: str = ""
