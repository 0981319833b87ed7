"""What a supervisor tells: its journal, its lines on the console, its summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tfpreempt.cli.run.echo import Echo
from tfpreempt.cli.run.policy import Cause, Leave, Limits, Restart, Tally, WorkerExit
from tfpreempt.core.clock import Clock
from tfpreempt.core.journal import JsonLines

_CAUSES = {
    Cause.FINISHED: "training is finished",
    Cause.PREEMPTION: "the preemption budget is used up",
    Cause.FAILURE: "the failure budget is used up",
    Cause.NO_PROGRESS: "preempted again and again without progress",
    Cause.MOVED: "the checkpoint directory is not the one of the start",
    Cause.STOPPED: "told to stop; the platform is expected to start the run again",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A supervisor's life in figures; `seconds_lost` is time without all workers."""

    code: int
    cause: Cause
    incarnations: int
    tally: Tally
    seconds: float
    seconds_lost: float

    def rows(self) -> list[tuple[str, str]]:
        """What the figures are called, and the figures, for people."""
        return [
            ("outcome", _CAUSES[self.cause]),
            ("exit code", str(self.code)),
            ("incarnations", str(self.incarnations)),
            ("preemptions", str(self.tally.preemptions)),
            ("failures", str(self.tally.failures)),
            ("time", f"{self.seconds:.1f} s"),
            ("lost between runs", f"{self.seconds_lost:.1f} s"),
        ]


class Record:
    """Writes what happens to `supervisor.jsonl` and to the console. Any thread.

    Args:
        journal: the file.
        clock: where the journal's times come from.
        supervisor: id of this supervisor's life; goes into every record.
        console: where lines for people go, unbuffered; one that is closed or stands
            still ends and delays nothing.
    """

    def __init__(
        self, journal: Path, clock: Clock, supervisor: str, console: IO[bytes]
    ) -> None:
        self._lines = JsonLines(journal, clock)
        self._supervisor = supervisor
        self._is_terminal = console.isatty()
        self._echo = Echo("", console)
        self._has_told_loss = False

    def started(
        self, incarnation: str, restart: int, pids: Sequence[int | None]
    ) -> None:
        """All workers were started, for the first time or again."""
        self._add(
            "restarted" if restart else "started",
            incarnation=incarnation,
            restart=restart,
            workers=len(pids),
            pids=list(pids),
        )
        self.say(f"started {len(pids)} worker(s), restart {restart} ({incarnation})")

    def worker_ended(self, incarnation: str, ended: WorkerExit, hint: str) -> None:
        """One worker has ended; the hint says more to people."""
        self._add(
            "worker_ended",
            incarnation=incarnation,
            worker=ended.worker,
            code=ended.code,
            returncode=ended.returncode,
            was_asked=ended.was_asked,
        )
        self.say(f"worker {ended.worker} ended: {ended.describe()}{hint}")

    def told_to_stop(self, signal_name: str, grace: float | None) -> None:
        """The supervisor itself got a signal to leave."""
        self._add("told_to_stop", signal=signal_name)
        limit = "as long as it takes" if grace is None else f"up to {grace:g} s"
        self.say(f"{signal_name}: waiting {limit} for the workers to commit")

    def urged(self, workers: Sequence[int], seconds: float | None) -> None:
        """A Ctrl-C that came after the signal to leave."""
        self._add("urged", workers=list(workers), seconds=seconds)
        names = ", ".join(str(each) for each in workers)
        whom = f"worker(s) {names}" if workers else "what the workers left behind"
        limit = "" if seconds is None else f", up to {seconds:.0f} s"
        self.say(
            f"still waiting for {whom}{limit}. Ctrl-C once more kills them at once: "
            "what they have not committed is lost"
        )

    def ended_others(self, signal_name: str, workers: Sequence[int]) -> None:
        """The supervisor sent a signal to the workers that still ran."""
        self._add("ended_others", signal=signal_name, workers=list(workers))
        names = ", ".join(str(each) for each in workers)
        self.say(f"sent {signal_name} to worker(s) {names}")

    def decided(
        self,
        verdict: Restart | Leave,
        limits: Limits,
    ) -> None:
        """What follows from the end of a run."""
        tally = verdict.tally
        self._add(
            "budget",
            cause=verdict.cause.value,
            preemptions=tally.preemptions,
            max_preemptions=limits.max_preemptions,
            idle_in_a_row=tally.idle_in_a_row,
            max_idle_preemptions=limits.max_idle_preemptions,
            failures=tally.failures,
            max_failures=limits.max_failures,
            is_used_up=isinstance(verdict, Leave) and verdict.is_over_budget,
        )
        if isinstance(verdict, Restart):
            used = f"{tally.preemptions} preemption(s), {tally.failures} failure(s)"
            if tally.idle_in_a_row > 1:
                used += (
                    f", {tally.idle_in_a_row} in a row without progress that is seen"
                )
            delay = f" in {verdict.delay:.1f} s" if verdict.delay else ""
            self.say(f"{verdict.cause.value}: restarting{delay} ({used} so far)")
        elif verdict.cause is Cause.NO_PROGRESS:
            self.say(
                f"giving up: {tally.idle_in_a_row} preemptions in a row without a "
                "newer commit in the checkpoint directory, and without a run of "
                f"{limits.backoff_reset:g} s. Either a notice stays up on this machine "
                "(`tfpreempt doctor` shows what is asked), or the program leaves with "
                "a restart code by itself; see its log. --max-idle-preemptions allows "
                "more"
            )
        elif verdict.cause is Cause.MOVED:
            self.say(
                "giving up: the checkpoint directory is not the one of the start any "
                "more; training would begin anew in what has taken its place. Mount it "
                "again or put it back, and start this again"
            )

    def left(self, summary: Summary) -> None:
        """The end: the last record, and the summary as a table or as plain lines."""
        self._add(
            "left",
            cause=summary.cause.value,
            code=summary.code,
            incarnations=summary.incarnations,
            preemptions=summary.tally.preemptions,
            failures=summary.tally.failures,
            seconds=summary.seconds,
            seconds_lost=summary.seconds_lost,
        )
        if self._is_terminal:
            self._print(_make_table(summary))
        else:
            self.say(", ".join(f"{name}: {value}" for name, value in summary.rows()))

    def close(self) -> None:
        """Ends the journal, and the printing once all is shown."""
        self._lines.close()
        self._echo.close()

    def show_error(self, failed: WorkerExit, lines: Sequence[str], log: Path) -> None:
        """The error lines of the worker whose failure ended the run."""
        self.say(f"worker {failed.worker} failed ({failed.describe()}), from {log}:")
        for line in lines:
            self._print(f"  | {line}\n")

    def log_lost(self, log: Path, error: OSError) -> None:
        """A worker's output cannot be written; the first time is told."""
        if not self._has_told_loss:
            self._has_told_loss = True
            self._add("log_lost", log=str(log), error=str(error))
            self.say(
                f"cannot write the log {log}: {error}. Training goes on, and what the "
                "workers write is left out until there is room."
            )

    def say(self, text: str) -> None:
        """A line for people."""
        self._print(f"tfpreempt: {text}\n")

    def _add(self, event: str, **values: Any) -> None:
        self._lines.append(
            {"event": event, "supervisor": self._supervisor, **values},
            durable=event == "left",
        )

    def _print(self, text: str) -> None:
        # The deciding thread says what it does before it does it, and must not wait.
        self._echo.feed(text.encode(errors="backslashreplace"))


def _make_table(summary: Summary) -> str:
    """The summary for a terminal, in its width."""
    # Imported here: it takes as long as all else, and a log file gets plain lines.
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title="tfpreempt run")
    for name, value in summary.rows():
        table.add_row(name, value)
    console = Console(stderr=True)
    with console.capture() as printed:
        console.print(table)
    return printed.get()
