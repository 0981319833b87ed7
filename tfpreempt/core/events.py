"""The events of a run, as frozen values: notice, decision, commit, exit, restore.

Packages pass the events to each other, and the journal records them. Times named `_at`
are monotonic seconds of the process that created the event, and have no meaning in
other processes. The journal adds the wall time to a record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpreempt.core.compat import StrEnum


class Outcome(StrEnum):
    """The way in which the run of a worker ended."""

    COMMITTED = "committed"  # a commit of the agreed step was made
    LOST = "lost"  # no commit was made; the restart uses the last commit
    FINISHED = "finished"  # training was over on every worker
    FAILED = "failed"  # the program ended by an error or Ctrl-C, not by a notice


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
        """Name of the source, with the text from the source; for people."""
        detail = str(self.detail)  # a source of the user may set any type
        is_new = detail and not self.source.endswith(f":{detail}")
        return f"{self.source} ({detail})" if is_new else self.source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of a round: the boundary at which every worker saves.

    Attributes:
        round: number of the round (a notice, the agreement and the save).
        boundary: number of the boundary (the moment between two steps), equal on every
            worker; None if no common save is possible.
        reason: the reason for None, for people.
    """

    round: int
    boundary: int | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit: a checkpoint with its marker on the disk.

    Attributes:
        step: number of completed steps in the checkpoint.
        path: directory of the commit, or the prefix of a checkpoint written by the
            user's CheckpointManager.
        sequence: number of the commit in its directory, from 1 on; ranks commits
            without comparing clocks.
        world_size: number of workers in the save.
        save_seconds: time from the start of writing to the marker, on the chief.
        bytes: total size of the files.
        because: reason of the save: "preemption", "periodic", "save", "error",
            "finished" or "snapshot".
        notice_to_commit_seconds: for a preemption, time from the first notice on any
            worker to the commit.
        step_seconds: mean duration of this process's steps so far; None if unknown.
        blocked_seconds: seconds for which training waited for the save; less than
            `save_seconds` if the save was asynchronous.
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
    """The exit of this worker, recorded just before.

    Attributes:
        outcome: way in which the run ended.
        code: the exit code; None if an error of the program determines the code.
        step: number of completed steps.
        detail: the reason, or the error; may be empty.
    """

    outcome: Outcome
    code: int | None
    step: int
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The start of a run: the restored checkpoint, or a start from scratch.

    Attributes:
        path: path of the checkpoint; None if training starts from scratch.
        step: step of the checkpoint.
        sequence: number of the commit in its directory or store.
        world_size: number of workers that wrote the checkpoint.
        skipped: descriptions of corrupt checkpoints that were skipped.
        tier: storage of the checkpoint: "memory", "disk" or "mirror"; None without a
            checkpoint.
        seconds: duration of the start: the agreement with other workers, the download
            and the restore.
        process_seconds: age of the process; None if unknown.
        start: name that the supervisor has given to this start of the workers; None
            without a supervisor.
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

    The first step also traces the function, so the step is slower than later steps.

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
    """An error that did not end training, recorded for the report of the run."""

    where: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrite:
    """A record that this process writes the files of a `Dataset.cache(path)`.

    Attributes:
        path: absolute path of the cache.
        lock: modification time of the cache's first lock file, in nanoseconds since
            1970; distinguishes the file from a lock file of another process.
    """

    path: str
    lock: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataRefused:
    """The refusal of a fit whose directory has a finished fit on different arrays.

    Attributes:
        complete: sample of values of the arrays of the finished fit.
        refused: sample of values of the arrays of the refused fit.
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
