"""A scripted run: its journals, and the true durations for comparison.

All workers do the same at the same time, each on its own machine or all on one machine.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfpreempt.cli.journals.processes import SupervisorJournal, WorkerJournal
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report.goodput import Badput
from tfpreempt.cli.report.run_report import RunReport, build_report
from tfpreempt.core.events import (
    BAD_STEP,
    BadStep,
    Commit,
    Decision,
    Event,
    Exit,
    FirstStep,
    Metrics,
    Notice,
    Outcome,
    Restored,
)

STEP = 0.5
"""Seconds of a step."""


@dataclasses.dataclass
class Scripted:
    """Writes the journals of a run from its beginning; each method lets its time pass.

    Attributes:
        workers: number of workers.
        is_supervised: whether a supervisor starts the workers.
        wall: wall time at the beginning.
        jumps: times of the run at which the wall clock is set, and the changes, in
            seconds.
        skew: seconds by which each worker's wall clock is ahead.
        truth: seconds of each class, for all workers; "good" for the steps that count.
        lines: lines of each file.
        reached: the step that each process finds in the status of the process before.
    """

    workers: int = 2
    is_supervised: bool = True
    wall: float = 1_800_000_000.0
    jumps: tuple[tuple[float, float], ...] = ()
    skew: tuple[float, ...] = (0.0,) * 8
    truth: Counter[Any] = dataclasses.field(default_factory=Counter)
    lines: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    now: float = 0.0
    step: int = 0
    saved: int = 0
    starts: int = 0
    reached: int | None = None
    _unsaved: float = 0.0  # seconds of steps since the newest commit

    # --- what happens ----------------------------------------------------------------

    def start(
        self,
        starting: float = 8.0,
        restoring: float = 2.0,
        tracing: float = 3.0,
        tier: str | None = "disk",
    ) -> None:
        """Starts all workers, restores the newest commit, and trains a step."""
        self.truth["good"] -= self._unsaved * self.workers
        self.truth[Badput.WASTED_PROGRESS] += self._unsaved * self.workers
        self._unsaved = 0.0
        name = self._begin(starting)
        self._pass(restoring, Badput.RESTORE)
        self.step = self.saved
        path = f"/ckpt/{self.saved}" if self.saved else None
        self._record(
            Restored(
                path=path,
                step=self.step,
                sequence=1,
                world_size=self.workers,
                tier=tier if path else None,
                seconds=restoring,
                process_seconds=starting + restoring,
                start=name if self.is_supervised else None,
                reached=self.reached,
            )
        )
        self._pass(tracing, Badput.PROGRAM_STARTUP)
        self.step += 1
        self._record(FirstStep(step=self.step))

    def fail_and_start(self) -> None:
        """Adds a start that is refused, and then a start of the same process."""
        refused = Exit(outcome=Outcome.FAILED, code=None, step=self.saved)
        self.starts += 1
        self._record(refused)
        self.starts -= 1
        self.start()

    def die_early(self, seconds: float) -> None:
        """Adds a start that is killed before it has a handler."""
        self._begin(seconds)
        self.kill()

    def fail_to_start(self, seconds: float) -> None:
        """Adds a start that ends with an error before the restore."""
        self._begin(seconds)
        self.fail()

    def train(self, steps: int) -> None:
        """Trains a number of steps."""
        self.step += steps
        self._unsaved += steps * STEP
        self._pass(steps * STEP, "good")

    def stand(self, seconds: float) -> None:
        """Adds a step without an end; the status of the step before remains."""
        self.reached = self.step
        self._unsaved += seconds
        self._pass(seconds, "good")

    def log(self, **values: float) -> None:
        """The chief's fit has logged something."""
        self._record(Metrics(step=self.step, values=values), workers=[0])

    def save(
        self,
        seconds: float = 1.0,
        because: str = "periodic",
        size: int = 1000,
        told: float | None = None,
        beside: int = 0,
    ) -> None:
        """Adds a commit: training stops for `seconds`, and then trains `beside`
        steps."""
        self._pass(seconds, Badput.SAVE)
        self.saved, self._unsaved = self.step, 0.0
        step = self.step
        self.train(beside)
        self._record(
            Commit(
                step=step,
                path=f"/ckpt/{step}",
                sequence=1,
                world_size=self.workers,
                save_seconds=seconds + beside * STEP,
                bytes=size,
                because=because,
                notice_to_commit_seconds=told,
                step_seconds=STEP,
                blocked_seconds=seconds,
            ),
            workers=[0],
        )

    def preempt(self, worker: int = 0, steps: int = 1, save: float = 1.0) -> None:
        """Adds a notice to one worker; all workers commit together and exit."""
        self._notice(worker)
        self._record(Decision(round=1, boundary=7))
        self.train(steps)
        self.save(save, "preemption", told=save + steps * STEP)
        self._leave(Outcome.COMMITTED, 143, "preemption")

    def preempt_amid_save(self, before: float = 0.4, after: float = 0.6) -> None:
        """Adds a notice during a periodic save: all workers exit with this commit."""
        self.now += before
        self._notice(worker=0)
        self.now -= before
        self.save(before + after)
        self._leave(Outcome.COMMITTED, 143, "preemption")

    def find_bad_step(self, worker: int = 0) -> None:
        """A worker finds a bad step; all workers exit without a commit."""
        self._notice(worker, BAD_STEP)
        found = BadStep(
            step=self.step, fit=1, epoch=2, batch=7, batches=1, is_crash=False,
            reason="the loss is nan",
        )  # fmt: skip
        self._record(found, workers=[0])
        self._leave(Outcome.LOST, 143, "preemption")

    def finish(self, save: float = 1.0) -> None:
        """Training is over."""
        self.save(save, "finished")
        self._leave(Outcome.FINISHED, 0, "finished")
        self._supervisor("exited", cause="finished", code=0)

    def finish_later(self, steps: int = 10) -> None:
        """After a time without a process all start again, train on, and finish."""
        self.down()
        self.start()
        self.train(steps)
        self.finish()

    def kill(self) -> None:
        """Adds a SIGKILL of all workers, after which no record follows."""
        self._end(-signal.SIGKILL, "failure")

    def fail(self) -> None:
        """The program breaks off by an error."""
        self._leave(Outcome.FAILED, None, "failure")

    def hang(self) -> None:
        """Adds a hang: no boundary follows, and the supervisor kills all workers."""
        hung = [{"worker": worker} for worker in range(self.workers)]
        name = f"ab-{self.starts - 1}"
        self._supervisor("hang", incarnation=name, workers=hung)
        self._end(-signal.SIGKILL, "hang")

    def lose_supervisor(self, *, is_noticed: bool) -> None:
        """The supervisor is killed; its guard sends SIGTERM to the workers."""
        self._supervisor("supervisor_terminated")
        if is_noticed:
            self._notice(worker=0)
            self.train(1)
            self.save(1.0, "preemption", told=1.5)
            self._record(Exit(outcome=Outcome.COMMITTED, code=143, step=self.step))

    def end_unsaid(self) -> None:
        """Ends the processes with code 0, without an exit record."""
        self._end(0, "finished")

    def wait(self, seconds: float) -> None:
        """Adds time in which finished processes wait."""
        self._pass(seconds, Badput.OTHER)

    def down(self, seconds: float = 20.0) -> None:
        """No process."""
        self._pass(seconds, Badput.RECOVERY)

    # --- what is read ----------------------------------------------------------------

    def report(self) -> RunReport:
        """The report of the run."""
        return report_of(self.lines)

    def write(self, directory: Path) -> Path:
        """Writes the journals; returns the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, lines in self.lines.items():
            text = "".join(f"{line}\n" for line in lines)
            (directory / name).write_text(text, encoding="utf-8")
        return directory

    # --- within ----------------------------------------------------------------------

    def _begin(self, seconds: float) -> str:
        """Starts all workers, still without a handler; returns the start's name."""
        name = f"ab-{self.starts}"
        event = "restarted" if self.starts else "started"
        self._supervisor(event, incarnation=name, workers=self.workers)
        self.starts += 1
        self._pass(seconds, Badput.TRAINING_PREP)
        return name

    def _notice(self, worker: int, source: str = "signal:SIGTERM") -> None:
        notice = Notice(
            source=source,
            worker=worker,
            grace_seconds=30.0,
            received_at=self.now,
        )
        self._record(notice, workers=[worker])

    def _leave(self, outcome: Outcome, code: int | None, cause: str) -> None:
        self._record(Exit(outcome=outcome, code=code, step=self.step))
        if self.is_supervised:
            self._pass(1.0, Badput.OTHER)
        self._end(1 if code is None else code, cause)

    def _end(self, returncode: int, cause: str) -> None:
        name = f"ab-{self.starts - 1}"
        for worker in range(self.workers):
            ended = {"worker": worker, "returncode": returncode}
            self._supervisor("worker_ended", incarnation=name, **ended)
        self._supervisor("budget", cause=cause, is_used_up=False)

    def _pass(self, seconds: float, what: Any) -> None:
        self.now += seconds
        self.truth[what] += seconds * self.workers

    def _supervisor(self, event: str, **values: Any) -> None:
        if self.is_supervised:
            told = {"event": event, "supervisor": "ab", **values}
            self._add("supervisor.jsonl", 0, told)

    def _record(self, event: Event, workers: list[int] | None = None) -> None:
        for worker in range(self.workers) if workers is None else workers:
            name = f"ab-{self.starts - 1}"
            told = {"worker": worker, "incarnation": name}
            told |= {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
            self._add(f"worker-{worker}.jsonl", worker, told)

    def _add(self, file: str, worker: int, values: dict[str, Any]) -> None:
        jumped = sum(by for at, by in self.jumps if self.now >= at)
        wall = self.wall + self.now + jumped + self.skew[worker]
        monotonic = 5000.0 + self.now
        times = {"wall": wall, "monotonic": monotonic}
        self.lines[file].append(json.dumps({**times, **values}))


def report_of(lines: Mapping[str, Iterable[str]]) -> RunReport:
    """The report of a run with these lines in its journals, by file."""
    workers: dict[int, WorkerJournal] = {}
    supervisors: list[SupervisorJournal] = []
    for name, of_file in lines.items():
        journal: WorkerJournal | SupervisorJournal
        if name.startswith("worker-"):
            index = int(name[len("worker-") : -len(".jsonl")])
            journal = workers[index] = WorkerJournal(index, keeps_all=True)
        else:
            journal = SupervisorJournal(name, keeps_all=True)
            supervisors.append(journal)
        for line in of_file:
            journal.add_line(line.encode())
    report = build_report(workers, supervisors)
    assert report is not None
    return report


def read(directory: Path) -> RunReport:
    """The report of the journals in a directory."""
    journals = JournalTailer(directory, keeps_all=True)
    journals.read_on(0.0)
    warnings = journals.warnings
    report = build_report(journals.workers, journals.supervisors, warnings)
    assert report is not None
    return report


def a_run(workers: int = 3) -> Scripted:
    """Preempted, killed, and finished, with a metric whose name is hostile."""
    run = Scripted(workers=workers, jumps=((100.0, 50.0), (120.0, -50.0)))
    run.start()
    for epoch in range(6):
        run.train(25)
        run.log(loss=3.0 / (epoch + 1), **{"<b>$\\frac$</b>": float(epoch)})
        run.save(0.6, beside=2)
    run.preempt(worker=1)
    run.down(25.0)
    run.start(tier="mirror")
    run.train(30)
    run.log(loss=0.45)
    run.save(1.2)
    run.train(50)
    run.kill()
    run.down(10.0)
    run.start(tier="memory")
    run.train(90)
    run.log(loss=0.3)
    run.finish()
    return run
