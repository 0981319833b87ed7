"""Where the time went, in the words of Google's ml-goodput-measurement.

Goodput is the share of the time that went into steps which the run has kept. All other
time is badput, of one class or another. Time is that of all workers, added up.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from tfpreempt.cli.report.process_spans import Phase, Span


class Badput(enum.Enum):
    """A class of badput, by the name that it has there."""

    TRAINING_PREP = "TRAINING_PREP"
    RESTORE = "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"
    PROGRAM_STARTUP = "PROGRAM_STARTUP"
    SAVE = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"
    WASTED_PROGRESS = "WASTED_PROGRESS_FROM_DISRUPTION"
    RECOVERY = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
    OTHER = "OTHER"


PLAINLY = {
    Badput.TRAINING_PREP: "start of a process",
    Badput.RESTORE: "restoring",
    Badput.PROGRAM_STARTUP: "first steps, tracing",
    Badput.SAVE: "waiting for saves",
    Badput.WASTED_PROGRESS: "steps that were lost",
    Badput.RECOVERY: "down",
    Badput.OTHER: "leaving, and unknown",
}
"""What people read, short."""

MEANINGS = {
    Badput.TRAINING_PREP: "from the start of a process until its handler is made, or "
    "its fit begins: imports, devices, the model, the data",
    Badput.RESTORE: "agreeing with the other workers on a checkpoint, fetching it and "
    "reading it",
    Badput.PROGRAM_STARTUP: "the first step of each process, which traces and "
    "compiles, and what the program does before it",
    Badput.SAVE: "training stood still for a save; what is written beside training "
    "does not count",
    Badput.WASTED_PROGRESS: "steps that no later start went on from, so that they had "
    "to be made again",
    Badput.RECOVERY: "no process, until the run was started again",
    Badput.OTHER: "between the last commit and the end of a process, and what no "
    "record explains",
}
"""The same, exactly."""

CLASS_OF = {
    Phase.STARTING: Badput.TRAINING_PREP,
    Phase.RESTORING: Badput.RESTORE,
    Phase.TRACING: Badput.PROGRAM_STARTUP,
    Phase.SAVING: Badput.SAVE,
    Phase.LOST: Badput.WASTED_PROGRESS,
    Phase.DOWN: Badput.RECOVERY,
    Phase.LEAVING: Badput.OTHER,
    Phase.UNKNOWN: Badput.OTHER,
}
"""Of a phase that is no goodput."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GoodputBreakdown:
    """Seconds of all workers.

    Attributes:
        good: in steps that were kept.
        bad: by class, 0 where there was nothing.
    """

    good: float
    bad: Mapping[Badput, float]

    @property
    def total(self) -> float:
        """All seconds."""
        return self.good + sum(self.bad.values())

    @property
    def goodput(self) -> float | None:
        """The share of good time; None where there was no time."""
        return self.good / self.total if self.total else None

    def share(self, seconds: float) -> str:
        """A part of all seconds, for people."""
        return f"{seconds / self.total:.1%}" if self.total else "-"


def break_down(spans: Iterable[Span]) -> GoodputBreakdown:
    """Adds up the spans of all workers."""
    good, bad = 0.0, dict.fromkeys(Badput, 0.0)
    for span in spans:
        kind = CLASS_OF.get(span.phase)
        if kind is None:
            good += span.seconds
        else:
            bad[kind] += span.seconds
    return GoodputBreakdown(good=good, bad=bad)
