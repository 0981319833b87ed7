"""Compares the two jobs of the demo."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from tfpreempt.cli.demo.job import STEP
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.journal import journal_directory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of the demo: compares a job with preemptions and a job without.

    The names of the attributes are the keys of the JSON output.

    Attributes:
        preemptions: number of preemptions that ended in a commit.
        steps_lost: number of steps that some worker trained more than once, or never.
        bit_identical: whether the final weights are equal, byte for byte, on all
            workers of both jobs.
        notice_to_commit_seconds: for every preemption with a commit, seconds from the
            notice to the commit.
        final_accuracy: accuracy of the interrupted job on images that were not used for
            training.
        restarts: number of restarts of the workers.
        steps: number of training steps that the user has requested.
    """

    preemptions: int
    steps_lost: int
    bit_identical: bool
    notice_to_commit_seconds: tuple[float, ...]
    final_accuracy: float
    restarts: int
    steps: int

    def faults(self, asked: int) -> list[str]:
        """Returns a sentence for every failed check; empty if the demo succeeded.

        Args:
            asked: number of preemptions that the user has requested.
        """
        found = []
        if self.preemptions != asked:
            found.append(
                f"{self.preemptions} of {asked} preemptions ended with a commit"
            )
        if self.steps_lost:
            found.append(f"{self.steps_lost} steps were trained twice or never")
        if not self.bit_identical:
            found.append("the final weights differ from those of the uninterrupted run")
        return found


def assess(folders: Sequence[Path], workers: int, steps: int) -> Result:
    """Compares the files that the two jobs have written.

    Args:
        folders: directory of the job with preemptions, then of the uninterrupted job.
        workers: number of workers of every job.
        steps: number of steps to train.
    """
    first, indexes = folders[0], range(workers)
    files = [job / f"weights-{i}.bin" for job in folders for i in indexes]
    logs = [first / "logs" / f"worker-{i}.log" for i in indexes]
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    trained = [[int(step) for step, *_ in STEP.findall(text)] for text in texts]
    journals = JournalTailer(journal_directory(first / "checkpoints"), keeps_all=True)
    # Ignore the error: a job that failed early has no checkpoint.
    with contextlib.suppress(FileNotFoundError):
        journals.read_on(SystemClock.wall())
    commits = [each["notice_to_commit_seconds"] for each in journals.records("commit")]
    seconds = tuple(round(each, 4) for each in commits if each is not None)
    starts = [start for each in journals.supervisors for start in each.starts]
    return Result(
        preemptions=len(seconds),
        steps_lost=count_lost(trained, steps),
        bit_identical=len({file.read_bytes() for file in files}) == 1,
        notice_to_commit_seconds=seconds,
        final_accuracy=float((first / "accuracy-0.txt").read_text()),
        restarts=sum(each.records[0].event == "restarted" for each in starts),
        steps=steps,
    )


def count_lost(trained: Iterable[Iterable[int]], steps: int) -> int:
    """Returns the number of steps not trained exactly once on every worker.

    Args:
        trained: for every worker, the trained steps, in order.
        steps: number of steps to train.
    """
    lost: set[int] = set()
    for each in trained:
        times = collections.Counter([*range(steps), *each])
        lost |= {step for step, count in times.items() if count != 2}
    return len(lost)
