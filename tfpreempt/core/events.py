"""The events of a run, as frozen values: notice, decision, commit, exit, restore.

Packages pass the events to each other, and the journal records them. A field whose name
ends in `_at` is a time on the monotonic clock of the process that created the event; no
other process can interpret it. So the journal adds the wall time to every record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from tfpreempt.core.compat import StrEnum

BAD_STEP = "bad step"
"""The `source` of a notice of a worker that has found a bad step: all workers stop."""


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
        grace_seconds: time from `received_at` to the termination; None if unknown.
        received_at: time at which the worker saw the notice, on the monotonic clock.
        detail: text from the source, for people.
    """

    source: str
    worker: int
    grace_seconds: float | None
    received_at: float
    detail: str = ""

    @property
    def origin(self) -> str:
        """Name of the source, followed by `detail` in parentheses; for people."""
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
        reason: if `boundary` is None, the reason why no common save is possible.
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
        sequence: number of the commit in its directory, from 1 on. A newer commit has a
            higher number, so no clocks of two machines need to be compared.
        world_size: number of workers in the save.
        save_seconds: time from the start of writing to the marker, on the chief.
        bytes: total size of the checkpoint's files.
        because: reason for the save: "preemption", "periodic", "save" (requested by the
            program), "error", "finished" or "snapshot".
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
    """The exit of this worker; recorded just before the worker exits.

    Attributes:
        outcome: way in which the run ended on this worker.
        code: the exit code; None if an error of the program determines the code.
        step: number of completed steps.
        detail: the reason, or the error; may be empty.
        is_permanent: whether each restart would end by the same error, until a person
            corrects the cause.
    """

    outcome: Outcome
    code: int | None
    step: int
    detail: str = ""
    is_permanent: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The start of a worker, from a restored checkpoint or from scratch.

    Attributes:
        path: path of the checkpoint; None if training starts from scratch.
        step: number of completed steps in the checkpoint.
        sequence: number of the commit in its directory or object store.
        world_size: number of workers that wrote the checkpoint.
        skipped: descriptions of corrupt checkpoints that were skipped.
        tier: storage of the checkpoint: "memory", "disk" or "mirror"; None without a
            checkpoint.
        seconds: duration of the agreement with other workers, the download and the
            restore together.
        process_seconds: seconds since the process started; None if unknown.
        start: name that the supervisor has given to this start of all workers; None
            without a supervisor.
        reached: last step in the status file of this worker's previous process; None if
            there is no status file.
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

    In the first step TensorFlow also traces the step function, so this step is slower
    than later steps.

    Attributes:
        step: number of completed steps.
    """

    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The values that Keras logs at the end of an epoch of a fit.

    Attributes:
        step: number of completed steps.
        values: logged values by name, such as "loss" and "val_loss".
    """

    step: int
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error that did not end training, recorded for the report of the run.

    Attributes:
        where: what failed, such as "mirror" or "save".
        error: class and message of the error.
    """

    where: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrite:
    """The start of writing the files of a `Dataset.cache(path)` by this process.

    Attributes:
        path: absolute path of the cache.
        lock: modification time of the lock file that TensorFlow creates first, in
            nanoseconds since 1970. The time tells whether a lock file found later is
            from this process.
    """

    path: str
    lock: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataRefused:
    """tfpreempt refused a fit: the directory has a finished fit on different arrays.

    Attributes:
        complete: sample of values from the arrays of the finished fit.
        refused: sample of values from the arrays of the refused fit.
        arguments: checksum of the program's command line.
    """

    complete: str
    refused: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowingStep:
    """The values of the step of a loop that follows a boundary, where a commit may be
    made.

    Attributes:
        trained: number of steps trained before the step.
        workers: number of workers.
        values: fingerprints of the arguments of the step, or of the arrays that the
            step function uses, by name.
        shared: fingerprints of this worker's values of the States that only the chief
            saves, by name, if this process has changed the values.
        rates: the learning rates that the program set before the restore, by path.
    """

    trained: int
    workers: int
    values: Mapping[str, str]
    shared: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rates: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """A step of a fit that was bad: the next start may leave the step out.

    Attributes:
        step: number of completed steps of the process that recorded the event.
        fit: number of the fit, from 1, among the fits with the checkpoint directory.
        epoch: number of the epoch, from 0.
        batch: number of the step's first batch in the epoch, from 0.
        batches: number of batches of the step.
        reason: the reason, or the error of a crash; for people.
        is_crash: whether the step has raised an error. The step is left out only after
            several crashes.
        is_sought: whether the bad step is this step or an earlier step, so that the
            next start must find the step. The step itself is not left out.
        replaces: time of the record of a later step, which was only bad because of this
            step; None if there is none.
    """

    step: int
    fit: int
    epoch: int
    batch: int
    batches: int
    reason: str
    is_crash: bool
    is_sought: bool = False
    replaces: float | None = None


def name_steps(found: Iterable[tuple[int, int, int]]) -> str:
    """Returns bad steps as text.

    Args:
        found: fit, epoch and batch of each step, as in `BadStep`. In a custom loop, fit
            and epoch are 0.
    """
    return ", ".join(
        f"batch {batch} of epoch {epoch}{f' of fit {fit}' if fit > 1 else ''}"
        if fit
        else f"step {batch}"
        for fit, epoch, batch in found
    )


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
    | FollowingStep
    | BadStep
)
