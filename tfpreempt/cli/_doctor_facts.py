"""What `tfpreempt doctor` has found out, and what follows from it; no I/O."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from pathlib import Path

from tfpreempt.deadline import SAFETY
from tfpreempt.platforms.detect import Platform

WAIT_SECONDS = 30.0  # the handler's save_timeout, where nobody knows the grace
# What lies there goes with the machine, or with the container.
VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})


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
    """One line of the verdict; of a source with what its notice leaves."""

    level: Level
    about: str
    text: str
    grace_seconds: float | None = None


def assess(facts: Facts) -> tuple[Finding, ...]:
    """What is fine, what could be better, and what would lose work."""
    found = [*_assess_sources(facts), _assess_grace(facts)]
    if facts.storage is None:
        text = "no directory was given, so no save was tried: tfpreempt doctor DIR"
        found.append(Finding(level=Level.ADVICE, about="directory", text=text))
    else:
        found += _assess_storage(facts, facts.storage)
    return tuple(found)


def needed_seconds(save_seconds: float, grace: float) -> float:
    """What a save of that length needs of a grace period, margins included."""
    return SAFETY * save_seconds + min(2.0, 0.25 * grace)


def size_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _assess_sources(facts: Facts) -> Iterator[Finding]:
    levels = {
        Liveness.LIVE: Level.OK,
        Liveness.NOTICE: Level.PROBLEM,
        Liveness.DEAD: Level.PROBLEM,
        Liveness.SLOW: Level.ADVICE,
    }
    texts = {
        Liveness.LIVE: "works and is quiet",
        Liveness.NOTICE: "says now that this machine goes away",
        Liveness.DEAD: "does not work here; its notices would not be seen",
        Liveness.SLOW: "has not answered yet",
    }
    for source in facts.sources:
        text = texts[source.liveness]
        if source.detail:
            text = f"{text}: {source.detail}"
        yield Finding(
            level=levels[source.liveness],
            about=source.name,
            text=text,
            grace_seconds=source.grace_seconds,
        )


def _assess_grace(facts: Facts) -> Finding:
    grace = facts.shortest_grace
    if grace is not None:
        text = f"the shortest notice leaves {grace:g} s"
        return Finding(level=Level.OK, about="grace", text=text)
    how = "pass grace_period= to the config"
    if facts.platform.name == "kubernetes":
        how = "set TFPREEMPT_GRACE_PERIOD to the pod's terminationGracePeriodSeconds"
    text = f"nobody says what a notice leaves, so the step is committed at once; {how}"
    return Finding(level=Level.ADVICE, about="grace", text=text)


def _assess_storage(facts: Facts, storage: Storage) -> Iterator[Finding]:
    if storage.filesystem in VOLATILE:
        # A machine that nobody takes away keeps what is in its memory.
        is_safe = facts.platform.name == "generic"
        yield Finding(
            level=Level.ADVICE if is_safe else Level.PROBLEM,
            about="directory",
            text=f"{storage.path} is on {storage.filesystem}, which goes with the "
            "machine or the container; use a disk or a network file system that stays",
        )
    if storage.save_seconds is None:
        text = f"a save of {size_text(storage.save_bytes)} fails there: {storage.fault}"
        yield Finding(level=Level.PROBLEM, about="save", text=text)
        return
    took = f"{size_text(storage.save_bytes)} take {storage.save_seconds:.2f} s"
    grace = facts.shortest_grace
    needed = needed_seconds(storage.save_seconds, grace or WAIT_SECONDS)
    if needed <= (grace or WAIT_SECONDS):
        text = f"{took}; with margins {needed:.1f} s"
        fits = f" of {grace:g} s" if grace is not None else ""
        yield Finding(level=Level.OK, about="save", text=text + fits)
        return
    faster = "use faster storage, save less, or a machine with a longer notice"
    if grace is None:
        text = f"{took}, with margins {needed:.1f} s; pass save_timeout=, or {faster}"
        yield Finding(level=Level.ADVICE, about="save", text=text)
        return
    text = f"{took}, with margins {needed:.1f} s: more than the {grace:g} s; {faster}"
    yield Finding(level=Level.PROBLEM, about="save", text=text)
