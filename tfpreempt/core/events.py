"""The frozen values that travel the path, from notice to commit, exit and restored.

Times named `_at` are monotonic seconds of the process that made the value; they are
never compared between processes. The journal adds wall time when it records a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpreempt.core.python import StrEnum


class Outcome(StrEnum):
    """How a worker's run ended."""

    COMMITTED = "committed"  # the agreed step is durable
    LOST = "lost"  # this preemption committed nothing; the last commit stands
    FINISHED = "finished"  # training was over on every worker
    FAILED = "failed"  # the program broke off, by an error or Ctrl-C; of no round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A source says that this machine is going away.

    Attributes:
        source: the source's name, such as "signal:SIGTERM" or "file:/run/stop".
        worker: index of the worker that saw it.
        grace_seconds: time until the machine goes, as told when the notice was
            received; None where nobody said.
        received_at: monotonic seconds at which it was seen.
        detail: what the source said, for people.
    """

    source: str
    worker: int
    grace_seconds: float | None
    received_at: float
    detail: str = ""

    @property
    def origin(self) -> str:
        """The source, and what it said beyond its own name, for people."""
        detail = str(self.detail)  # which is not always what the type says
        is_new = detail and not self.source.endswith(f":{detail}")
        return f"{self.source} ({detail})" if is_new else self.source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The boundary at which every worker saves in this round; None means lost."""

    round: int
    boundary: int | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A step is durable.

    Attributes:
        step: the step number that the checkpoint carries.
        path: the directory of our own layout, or the prefix of a user's manager.
        sequence: 1 for the first commit in a directory, then counting up; ranks
            commits without comparing clocks.
        world_size: number of workers that took part.
        save_seconds: from the start of writing to the marker, on the chief.
        bytes: total size of its files.
        because: "preemption", "periodic" or "save".
        notice_to_commit_seconds: of a preemption, from the first notice on any worker.
        step_seconds: the mean of this process's steps so far; None while unknown.
        blocked_seconds: of `save_seconds`, for how long training stood still; less than
            all where the save was asynchronous.
    """

    step: int
    path: str
    sequence: int
    world_size: int
    save_seconds: float
    bytes: int
    because: str
    notice_to_commit_seconds: float | None = None
    step_seconds: float | None = None
    blocked_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """This worker is about to leave.

    Attributes:
        outcome: what for.
        code: the exit code; None where the program's own error decides on it.
        step: that it has made.
        detail: the reason, or the error; empty where there is no more to say.
    """

    outcome: Outcome
    code: int | None
    step: int
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint was restored.

    Attributes:
        path: of the checkpoint; None means that training starts afresh.
        step: that it carries.
        sequence: its rank among the commits of its place.
        world_size: number of workers that it is of.
        skipped: what was found damaged on the way.
        tier: where it was: "memory", "disk" or "bucket"; None without one.
        seconds: that the start took: to agree with the others, to fetch and to read.
        process_seconds: since this process began; None where the system does not say.
        start: what the supervisor calls this start of the workers; None without one.
        reached: the step that the process before told last; None where it told none.
    """

    path: str | None
    step: int
    sequence: int
    world_size: int
    skipped: tuple[str, ...] = ()
    tier: str | None = None
    seconds: float | None = None
    process_seconds: float | None = None
    start: str | None = None
    reached: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first step of this process is made: it traced its function, the others train.

    Attributes:
        step: the number of steps that are made now.
    """

    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a fit has logged at the end of an epoch.

    Attributes:
        step: the number of steps that are made.
        values: such as "loss" and "val_loss".
    """

    step: int
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something went wrong that training survived; nothing is lost in silence."""

    where: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrite:
    """This process writes the files of a `Dataset.cache(path)`.

    Attributes:
        path: absolute path of the cache.
        lock: modification time of the cache's first lock file, in nanoseconds since
            1970; the time identifies the lock file.
    """

    path: str
    lock: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataRefused:
    """A fit was refused: the directory has a complete fit on other training arrays.

    Attributes:
        complete: samples of the arrays of the complete fit.
        refused: samples of the arrays of the refused fit.
        arguments: checksum of the program's command line.
    """

    complete: str
    refused: str
    arguments: str


Event = (
    Notice
    | Decision
    | Commit
    | Exit
    | Restored
    | FirstStep
    | Metrics
    | Fault
    | CacheWrite
    | DataRefused
)
