"""What the demo's two jobs left behind, counted and compared."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.cli.demo.job import Plan, Trained
from tfpreempt.core.journal import journal_directory, read_journal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survived:
    """A preemption that ended in a commit, from the journal."""

    step: int
    notified: tuple[int, ...]
    notice_to_commit_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of the demo.

    Attributes:
        asked: preemptions that were asked for.
        preemptions: those that ended in a commit.
        restarts: times that all workers were started again.
        steps: steps that the model was to be trained for.
        steps_lost: steps that some worker trained more than once, or never.
        bit_identical: whether the final weights of all workers of both jobs are equal,
            byte for byte.
        final_accuracy: of the interrupted job, on images never trained on.
    """

    asked: int
    preemptions: tuple[Survived, ...]
    restarts: int
    steps: int
    steps_lost: int
    bit_identical: bool
    final_accuracy: float

    def failures(self) -> list[str]:
        """What was promised and did not happen; empty if all is well."""
        found = []
        if len(self.preemptions) != self.asked:
            found.append(
                f"{len(self.preemptions)} preemptions ended in a commit, "
                f"{self.asked} were asked for"
            )
        if self.steps_lost:
            found.append(
                f"{self.steps_lost} steps were trained more than once or never"
            )
        if not self.bit_identical:
            found.append("the final weights differ from those of the uninterrupted run")
        return found

    def to_json(self) -> dict[str, Any]:
        """The result as values that JSON has."""
        return {
            "preemptions": len(self.preemptions),
            "steps_lost": self.steps_lost,
            "bit_identical": self.bit_identical,
            "notice_to_commit_seconds": [
                round(each.notice_to_commit_seconds, 4) for each in self.preemptions
            ],
            "final_accuracy": self.final_accuracy,
            "restarts": self.restarts,
            "steps": self.steps,
        }


def assess(folders: Sequence[Path], trained: Sequence[Trained], plan: Plan) -> Result:
    """Compares what the jobs left in their directories.

    Args:
        folders: of the job with preemptions, and of the other one.
        trained: the records of the job with preemptions.
        plan: what was to be trained.
    """
    weights = {
        (job / f"weights-{worker}.bin").read_bytes()
        for job in folders
        for worker in range(plan.workers)
    }
    journal = read_journal(journal_directory(folders[0] / "checkpoints"))
    accuracy = (folders[0] / "accuracy-0.json").read_text(encoding="utf-8")
    return Result(
        asked=len(plan.preemptions),
        preemptions=find_survived(journal),
        restarts=max(each.restart for each in trained),
        steps=plan.steps,
        steps_lost=count_lost(trained, plan.workers, plan.steps),
        bit_identical=len(weights) == 1,
        final_accuracy=json.loads(accuracy),
    )


def count_lost(trained: Iterable[Trained], workers: int, steps: int) -> int:
    """Number of steps that some worker did not train exactly once."""
    times = collections.Counter((each.worker, each.step) for each in trained)
    planned = {(worker, step) for worker in range(workers) for step in range(steps)}
    once = {pair for pair, count in times.items() if count == 1}
    return len({step for _, step in planned ^ once})


def find_survived(journal: Iterable[Mapping[str, Any]]) -> tuple[Survived, ...]:
    """The preemptions that ended in a commit, in order.

    From the first notice that any worker of the incarnation recorded to the first
    commit, by the wall clock: all workers of the demo share one machine.

    Args:
        journal: its records by wall time.
    """
    notices: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    commits: dict[str, Mapping[str, Any]] = {}
    for each in journal:
        if each["event"] == "notice":
            notices[each["incarnation"]].append(each)
        elif each["event"] == "commit" and each["because"] == "preemption":
            commits.setdefault(each["incarnation"], each)
    return tuple(
        Survived(
            step=commit["step"],
            notified=tuple(sorted({each["worker"] for each in notices[incarnation]})),
            notice_to_commit_seconds=commit["wall"] - notices[incarnation][0]["wall"],
        )
        for incarnation, commit in commits.items()
        if notices[incarnation]
    )
