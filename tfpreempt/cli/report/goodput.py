"""Where the time went, in the words of Google's ml-goodput-measurement.

Goodput is the share of the time that went into steps which the run has kept. All other
time is badput, of one class or another. Time is that of all workers, added up.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from tfpreempt.cli.report.lives import Phase, Span


class Badput(enum.Enum):
    """A class of badput, by the name that it has there."""

    TRAINING_PREP = "before the handler: imports, devices, the model, the data"
    RESTORE = "agreeing on a checkpoint, fetching and reading it"
    PROGRAM_STARTUP = "the first step of each process, which traces and compiles"
    SAVE = "training stood still for a save"
    WASTED_PROGRESS = "steps that were lost and had to be made again"
    RECOVERY = "no process: until the run was started again"
    OTHER = "leaving after the last step, and what no record explains"


WORDS = {
    Badput.TRAINING_PREP: "TRAINING_PREP",
    Badput.RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Badput.PROGRAM_STARTUP: "PROGRAM_STARTUP",
    Badput.SAVE: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Badput.WASTED_PROGRESS: "WASTED_PROGRESS_FROM_DISRUPTION",
    Badput.RECOVERY: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Badput.OTHER: "OTHER",
}

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
class Account:
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


def make_account(spans: Iterable[Span]) -> Account:
    """Adds up the spans of all workers."""
    good, bad = 0.0, dict.fromkeys(Badput, 0.0)
    for span in spans:
        kind = CLASS_OF.get(span.phase)
        if kind is None:
            good += span.seconds
        else:
            bad[kind] += span.seconds
    return Account(good=good, bad=bad)
