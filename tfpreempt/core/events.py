"""The frozen values passed through the packages, from notice to commit and restore.

Times named `_at` are monotonic seconds of the process that made the value, and are
never compared between processes. The journal adds wall time to each record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpreempt.core.compat import StrEnum


class Outcome(StrEnum):
    """The way in which the run of a worker ended."""

    COMMITTED = "committed"  # the agreed step is durable
    LOST = "lost"  # the preemption made no commit; the last commit remains
    FINISHED = "finished"  # training was over on every worker
    FAILED = "failed"  # the program ended by an error or Ctrl-C, outside of a round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An announcement by a source: the machine will be terminated.

    Attributes:
        source: name of the source, such as "signal:SIGTERM" or "file:/run/stop".
        worker: index of the worker that saw the notice.
        grace_seconds: time until the termination, as known when the notice was
            received; None if unknown.
        received_at: monotonic seconds at which the notice was seen.
        detail: text from the source, for people.
    """

    source: str
    worker: int
    grace_seconds: float | None
    received_at: float
    detail: str = ""

    @property
    def origin(self) -> str:
        """The source, and further text from the source, for people."""
        detail = str(self.detail)  # a user's source may set another type
        is_new = detail and not self.source.endswith(f":{detail}")
        return f"{self.source} ({detail})" if is_new else self.source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The boundary at which every worker saves in a round; None for a lost round."""

    round: int
    boundary: int | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A durable step.

    Attributes:
        step: the step number that the checkpoint carries.
        path: directory in the own layout, or the prefix of a user's manager.
        sequence: 1 for the first commit in a directory, then counting up; ranks commits
            without comparing clocks.
        world_size: number of workers in the save.
        save_seconds: time from the start of writing to the marker, on the chief.
        bytes: total size of the files.
        because: reason of the save: "preemption", "periodic", "save", "error",
            "finished" or "snapshot".
        notice_to_commit_seconds: for a preemption, time since the first notice on any
            worker.
        step_seconds: mean duration of this process's steps so far; None if unknown.
        blocked_seconds: part of `save_seconds` for which training was blocked; less
            than the whole time if the save was asynchronous.
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
    """The imminent exit of this worker.

    Attributes:
        outcome: way in which the run ended.
        code: the exit code; None if the program's own error decides the code.
        step: number of completed steps.
        detail: the reason, or the error; empty if there is nothing to add.
    """

    outcome: Outcome
    code: int | None
    step: int
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored checkpoint.

    Attributes:
        path: path of the checkpoint; None means that training starts from scratch.
        step: step of the checkpoint.
        sequence: rank among the commits of the same directory or store.
        world_size: number of workers that wrote the checkpoint.
        skipped: descriptions of corrupt checkpoints that were skipped.
        tier: storage of the checkpoint: "memory", "disk" or "mirror"; None without a
            checkpoint.
        seconds: duration of the start: the agreement with other workers, fetch and
            read.
        process_seconds: age of the process; None if unknown.
        start: the supervisor's name of this start of the workers; None without a
            supervisor.
        reached: last step reported by the previous process; None if no step was
            reported.
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
    """The completion of the first step of the process.

    The first step traced the function; the later steps only train.

    Attributes:
        step: number of completed steps.
    """

    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The logs of a fit at the end of an epoch.

    Attributes:
        step: number of completed steps.
        values: logged values by name, such as "loss" and "val_loss".
    """

    step: int
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error that did not end training; recorded, so that no loss is silent."""

    where: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrite:
    """A statement that this process writes the files of a `Dataset.cache(path)`.

    Attributes:
        path: absolute path of the cache.
        lock: modification time of the cache's first lock file, in nanoseconds since
            1970; the time identifies the lock file.
    """

    path: str
    lock: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataRefused:
    """The refusal of a fit: the directory has a complete fit on other training arrays.

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
