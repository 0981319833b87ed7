"""Divides the time of a run into categories, as Google's ml-goodput-measurement does.

Goodput is the share of the time that was spent on kept steps: steps that were not lost
in an interruption. Badput is the remaining time, in several categories. Times are sums
over all workers.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from tfpreempt.cli.report.process_spans import Phase, Span


class Badput(enum.Enum):
    """A category of badput: time without training progress.

    The names are those of ml-goodput-measurement.
    """

    TRAINING_PREP = "TRAINING_PREP"
    RESTORE = "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"
    PROGRAM_STARTUP = "PROGRAM_STARTUP"
    SAVE = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"
    WASTED_PROGRESS = "WASTED_PROGRESS_FROM_DISRUPTION"
    RECOVERY = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
    OTHER = "OTHER"


PLAINLY = {
    Badput.TRAINING_PREP: "starting processes",
    Badput.RESTORE: "restoring",
    Badput.PROGRAM_STARTUP: "first steps, tracing",
    Badput.SAVE: "waiting for saves",
    Badput.WASTED_PROGRESS: "lost steps",
    Badput.RECOVERY: "down",
    Badput.OTHER: "exits, unrecorded time",
}
"""Short names of the categories, for tables and plots."""

MEANINGS = {
    Badput.TRAINING_PREP: "from the start of a process until the handler is created, "
    "or the fit begins: imports, devices, model, data",
    Badput.RESTORE: "agreeing with the other workers on a checkpoint, downloading and "
    "reading the checkpoint",
    Badput.PROGRAM_STARTUP: "the first step of each process, which traces and "
    "compiles, and the work of the program before this step",
    Badput.SAVE: "training waits for a save; writing in the background does not count",
    Badput.WASTED_PROGRESS: "steps after the commit from which the next start resumed; "
    "these steps were repeated",
    Badput.RECOVERY: "no process, until the run was restarted",
    Badput.OTHER: "between the last commit and the end of a process, and time without "
    "a record",
}
"""Exact definitions of the categories, for the HTML page."""

CLASS_OF = {
    Phase.STARTING: Badput.TRAINING_PREP,
    Phase.RESTORING: Badput.RESTORE,
    Phase.TRACING: Badput.PROGRAM_STARTUP,
    Phase.SAVING: Badput.SAVE,
    Phase.LOST: Badput.WASTED_PROGRESS,
    Phase.DOWN: Badput.RECOVERY,
    Phase.EXITING: Badput.OTHER,
    Phase.UNKNOWN: Badput.OTHER,
}
"""For each phase without kept steps: the category of badput."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GoodputBreakdown:
    """The time of all workers in seconds, by category.

    Attributes:
        good: seconds spent on kept steps.
        bad: seconds in each category of badput, also 0.
    """

    good: float
    bad: Mapping[Badput, float]

    @property
    def total(self) -> float:
        """Total number of seconds."""
        return self.good + sum(self.bad.values())

    @property
    def goodput(self) -> float | None:
        """Seconds on kept steps, divided by all seconds; None without any seconds."""
        return self.good / self.total if self.total else None

    def share(self, seconds: float) -> str:
        """Returns a number of seconds as a percentage of the total, as text."""
        return f"{seconds / self.total:.1%}" if self.total else "-"


def break_down(spans: Iterable[Span]) -> GoodputBreakdown:
    """Returns the sum of the spans' durations in each category."""
    good, bad = 0.0, dict.fromkeys(Badput, 0.0)
    for span in spans:
        kind = CLASS_OF.get(span.phase)
        if kind is None:
            good += span.seconds
        else:
            bad[kind] += span.seconds
    return GoodputBreakdown(good=good, bad=bad)
