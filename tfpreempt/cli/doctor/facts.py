"""What `tfpreempt doctor` finds out, and the lines of its verdict; values only."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Literal

from tfpreempt.platforms.detect import Platform

Requeue = Literal["exit", "scontrol"]
"""As `SlurmTerminationConfig(requeue=)`."""


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    ADVICE = "advice"  # could be better
    PROBLEM = "problem"  # a preemption would lose work, or end the job


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
        mount: where that file system is mounted; None if unknown.
        missing: the uppermost part of the path that was not there; None: all is.
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
    mount: Path | None = None
    missing: Path | None = None
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlurmState:
    """Whether Slurm starts the job again.

    Attributes:
        requeue: how the config means to be requeued.
        requeued_codes: exit codes on which the controller requeues (RequeueExit).
        held_codes: those on which it does and then holds the job (RequeueExitHold).
        may_requeue: whether `scontrol requeue` and a node that fails requeue this job
            (sbatch's --requeue), or by default any job; None where nobody says.
        is_batch: whether this job is sbatch's; None where no job was asked for.
        fault: why the controller could not be asked; "" if it was.
    """

    requeue: Requeue
    requeued_codes: frozenset[int] = frozenset()
    held_codes: frozenset[int] = frozenset()
    may_requeue: bool | None = None
    is_batch: bool | None = None
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it.

    Attributes:
        platform: where this is.
        sources: of the platform's config.
        storage: None where no directory was given.
        slurm: None where this is no Slurm.
    """

    platform: Platform
    sources: tuple[SourceState, ...]
    storage: Storage | None
    slurm: SlurmState | None = None

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
