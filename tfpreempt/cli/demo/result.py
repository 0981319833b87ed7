"""What the demo's two jobs left behind, counted and compared."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpreempt.cli.demo.job import parse_progress, progress_path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """One preemption, from the journal of the interrupted job."""

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
    preemptions: tuple[Preemption, ...]
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
        """The result as a JSON-able dictionary."""
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


def assess(
    interrupted: Path, uninterrupted: Path, *, workers: int, steps: int, asked: int
) -> Result:
    """Reads what both jobs left in their directories."""
    records = {i: _read_records(progress_path(interrupted, i)) for i in range(workers)}
    trained = {
        i: [parse_progress(i, line) for line in lines] for i, lines in records.items()
    }
    journal = interrupted / "checkpoints" / "journal"
    events = [
        json.loads(line)
        for path in sorted(journal.glob("worker-*.jsonl"))
        for line in _read_records(path)
    ]
    digests = {
        digest_weights(job / f"weights-{i}.npz")
        for job in (interrupted, uninterrupted)
        for i in range(workers)
    }
    result = json.loads((interrupted / "result-0.json").read_text(encoding="utf-8"))
    return Result(
        asked=asked,
        preemptions=find_preemptions(events),
        restarts=len({each.restart for each in trained[0]}) - 1,
        steps=steps,
        steps_lost=count_lost(
            {i: [each.step for each in lines] for i, lines in trained.items()}, steps
        ),
        bit_identical=len(digests) == 1,
        final_accuracy=result["accuracy"],
    )


def count_lost(trained: Mapping[int, Iterable[int]], steps: int) -> int:
    """Number of steps that some worker did not train exactly once.

    Args:
        trained: for each worker the steps that it recorded, over all restarts.
        steps: number of steps that there should be.
    """
    lost: set[int] = set()
    for done in trained.values():
        times = collections.Counter(done)
        lost.update(step for step in range(steps) if times[step] != 1)
        lost.update(step for step in times if not 0 <= step < steps)
    return len(lost)


def find_preemptions(events: Iterable[Mapping[str, Any]]) -> tuple[Preemption, ...]:
    """The preemptions that ended in a commit, in the order of their steps.

    From the first notice that any worker of the incarnation recorded to the chief's
    commit, by the wall clock: all workers of the demo share one machine.
    """
    notices: dict[Any, list[tuple[float, int]]] = collections.defaultdict(list)
    commits: dict[Any, tuple[float, int]] = {}
    for each in events:
        if each["event"] == "notice":
            notices[each["incarnation"]].append((each["wall"], each["worker"]))
        elif each["event"] == "commit" and each["because"] == "preemption":
            at = (each["wall"], each["step"])
            commits[each["incarnation"]] = min(at, commits.get(each["incarnation"], at))
    found = [
        Preemption(
            step=step,
            notified=tuple(sorted({worker for _, worker in notices[incarnation]})),
            notice_to_commit_seconds=wall - min(notices[incarnation])[0],
        )
        for incarnation, (wall, step) in commits.items()
        if notices[incarnation]
    ]
    return tuple(sorted(found, key=lambda each: each.step))


def digest_weights(path: Path) -> str:
    """Digest of the bytes, shapes and types of all arrays in an .npz file."""
    digest = hashlib.sha256()
    with np.load(path, allow_pickle=False) as arrays:
        for name in sorted(arrays.files):
            array = arrays[name]
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _read_records(path: Path) -> list[str]:
    """The complete lines of a JSONL file."""
    text = path.read_text(encoding="utf-8")
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
