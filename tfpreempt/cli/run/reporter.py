"""Writes the supervisor's events to its journal and to the console."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.checkpoint.lease import lease_record
from tfpreempt.cli.journals.locate import commits_in, count_commits
from tfpreempt.cli.run.console import OutputConsole
from tfpreempt.cli.run.hang_detector import Hang
from tfpreempt.cli.run.logs import TRACEBACK
from tfpreempt.cli.run.restart_policy import (
    OUTCOMES,
    BudgetUsed,
    Cause,
    ExitSupervisor,
    Restart,
    RestartLimits,
    WorkerExit,
)
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.heartbeat import WorkerPhase
from tfpreempt.core.journal import JsonLines, LineReader, open_file, parse_record
from tfpreempt.core.log_output import plain
from tfpreempt.errors import ConfigurationError

# Number of lines of a stack that are always shown, and of all shown lines. A stack
# begins with the newest call.
_NEWEST_LINES, _SHOWN_LINES = 3, 12
# Calls in libraries are shown only among the first lines.
_LIBRARIES = "/site-packages/"
_OTHER_DIRECTORY = (
    "the program uses another directory, or makes no commits. Create the handler or "
    "callback with the directory in TFPREEMPT_CHECKPOINT_DIR"
)


@dataclasses.dataclass(eq=False)
class Reporter:
    """Writes events to the supervisor's journal and to the console.

    Any thread may call the methods.

    Args:
        journal: journal of the supervisor.
        supervisor: id of this supervisor, written in every record.
        console: console for messages; a closed or stalled console does not delay the
            caller.
        shows_worker_0: whether the console also shows the output of worker 0.
    """

    journal: JsonLines
    supervisor: str
    console: OutputConsole
    shows_worker_0: bool = False
    _incarnation: str = ""
    _has_told_loss: bool = False
    _has_told_metrics_loss: bool = False
    _has_told_unseen: bool = False

    def started(
        self,
        incarnation: str,
        restart: int,
        pids: Sequence[int | None],
        first_worker: int | None = 0,
    ) -> None:
        """Records a start or a restart of the workers.

        Args:
            incarnation: name of this start of all workers.
            restart: number of restarts so far.
            pids: process ids of the workers; None for a worker that could not be
                started.
            first_worker: index of the first worker in the cluster; None for a task that
                does not train.
        """
        self._incarnation = incarnation
        count, event = len(pids), "restarted" if restart else "started"
        fields: dict[str, Any] = {"incarnation": incarnation, "restart": restart}
        fields |= {"workers": count, "pids": list(pids), "first_worker": first_worker}
        self._add(event, **fields)
        self._print(f"started {count} worker(s), restart {restart} ({incarnation})")

    def worker_ended(self, ended: WorkerExit, log: Path | None) -> None:
        """Records the end of a worker.

        Args:
            ended: the end of the worker.
            log: log file to name in the message; None: no file is named.
        """
        fields = dataclasses.asdict(ended) | {"code": ended.code}
        del fields["at"]
        self._add("worker_ended", incarnation=self._incarnation, **fields)
        hint = "" if log is None else f", see {log}"
        self._print(f"worker {ended.worker} ended: {ended.describe()}{hint}")

    def stop_requested(self, signal_name: str) -> None:
        """Records that the supervisor received a signal to stop."""
        self._add("stop_requested", signal=signal_name)
        self._print(f"received {signal_name}")

    def stop_requested_again(
        self, workers: Sequence[int], seconds: float | None
    ) -> None:
        """Records a further Ctrl-C, and shows which workers have not ended.

        Args:
            workers: indices of the workers that have not ended.
            seconds: seconds left to the workers; None: no limit.
        """
        self._add("stop_requested_again", workers=workers, seconds=seconds)
        whom = _names(workers) if workers else "child processes of the workers"
        limit = "" if seconds is None else f" (at most {seconds:.0f} s)"
        self._print(
            f"still waiting for {whom}{limit}. Another Ctrl-C kills the processes at "
            "once; steps without a commit are then lost"
        )

    def workers_signaled(
        self, signal_name: str, workers: Sequence[int], more: str = ""
    ) -> None:
        """Records that the supervisor has sent a signal to the remaining workers.

        Args:
            signal_name: name of the signal.
            workers: indices of the workers.
            more: end of the message, such as the reason for the signal.
        """
        self._add("workers_signaled", signal=signal_name, workers=workers)
        self._print(f"sent {signal_name} to {_names(workers)}{more}")

    def hung(self, hangs: Sequence[Hang]) -> None:
        """Records that a hang was detected."""
        fields = [
            dataclasses.asdict(each) | {"stage": each.stage.name.lower()}
            for each in hangs
        ]
        self._add("hang", incarnation=self._incarnation, workers=fields)
        self._print("workers are hung:", *(_how(each) for each in hangs))

    def stacks(self, stacks: Mapping[int, str]) -> None:
        """Records the stacks of hung workers.

        Args:
            stacks: for every worker, the stacks; "" if the worker has written none.
        """
        for worker, text in stacks.items():
            fields = {
                "incarnation": self._incarnation,
                "worker": worker,
                "stacks": text,
            }
            self._add("stacks", **fields)
            if not text:
                self._print(f"worker {worker} wrote no stacks")
                continue
            # The stack of the main thread is the last one.
            main = text.rstrip().rpartition("\n\n")[2].splitlines()
            own = [line for line in main[_NEWEST_LINES:] if _LIBRARIES not in line]
            shown = (main[:_NEWEST_LINES] + own)[:_SHOWN_LINES]
            self._print(
                f"stack of worker {worker} (all threads: {self.journal.path}):",
                *(f"  | {line}" for line in shown),
            )

    def failed(self, failure: WorkerExit, lines: Sequence[str], log: Path) -> None:
        """Shows the last traceback, or the last lines, of the worker that failed first.

        The console shows them only once: nothing is shown if the console already has
        the output of this worker.

        Args:
            failure: the end of the worker.
            lines: the error lines.
            log: log file of the worker.
        """
        if failure.worker == 0 and self.shows_worker_0:
            return
        shown = "error in" if TRACEBACK in "".join(lines) else "last lines of"
        self._print(
            f"worker {failure.worker} failed ({failure.describe()}); {shown} {log}:",
            *(f"  | {line}" for line in lines),
        )

    def decided(self, verdict: Restart | ExitSupervisor, limits: RestartLimits) -> None:
        """Records the decision that was made after the workers had ended."""
        spent = verdict.spent
        self._add(
            "budget",
            cause=verdict.cause.value,
            **_counts(spent),
            max_preemptions=limits.max_preemptions,
            max_preemptions_without_progress=limits.max_preemptions_without_progress,
            max_failures=limits.max_failures,
            is_used_up=isinstance(verdict, ExitSupervisor) and verdict.is_over_budget,
            delay=verdict.delay if isinstance(verdict, Restart) else None,
        )
        if isinstance(verdict, Restart):
            used = f"preemptions: {spent.preemptions}, failures: {spent.failures}"
            is_preempted = verdict.cause is Cause.PREEMPTION
            idle = spent.idle_in_a_row if is_preempted else spent.in_a_row
            if idle > 1:
                used += f", in a row without progress: {idle}"
            delay = f" in {verdict.delay:.1f} s" if verdict.delay else ""
            self._print(f"restarting after a {verdict.cause.value}{delay} ({used})")
            is_unseen = is_preempted and not self._has_journal_of_worker
            directory = self.journal.path.parent.parent
            if is_unseen and not self._has_told_unseen and not commits_in(directory):
                self._has_told_unseen = True
                self._print(
                    f"no worker has written a journal in {self.journal.path.parent} "
                    "yet: the notice came before the handler or callback was created, "
                    f"or {_OTHER_DIRECTORY}"
                )
        elif verdict.cause is Cause.NO_PROGRESS:
            self._print(
                f"giving up: {spent.idle_in_a_row} preemptions in a row without a "
                "newer commit in the checkpoint directory and without a run of "
                f"{limits.backoff_reset:g} s. Either a notice stays active on this "
                "machine (check with `tfpreempt doctor`), or the program itself exits "
                "with a restart code (see the log). "
                "--max-preemptions-without-progress allows more"
            )
        elif verdict.cause is Cause.FAILURE_RATE:
            self._print(
                f"giving up: {len(spent.failed_at)} failures within an hour, with "
                "progress between failures. See the errors in the workers' logs; "
                f"--max-failures {len(spent.failed_at)} allows as many per hour"
            )
        elif verdict.cause is Cause.MOVED:
            self._print(
                "giving up: the checkpoint directory was moved or replaced after the "
                "start, and a restart would train from scratch. Mount the directory "
                "again or move it back, and run the command again"
            )
        elif verdict.cause is Cause.PERMANENT:
            self._print(
                "giving up: each restart would end by the same error. Correct the "
                "cause that the error names, and run the command again"
            )

    def exited(
        self, verdict: ExitSupervisor, starts: int, seconds: float, why: str = ""
    ) -> None:
        """Records the end of the supervisor, and shows a summary.

        Args:
            verdict: final decision.
            starts: number of starts of all workers.
            seconds: time since the start of the supervisor.
            why: description of the last failure; "" without a failure.
        """
        spent = verdict.spent
        fields = {"code": verdict.code, "starts": starts, "seconds": seconds}
        self._add("exited", cause=verdict.cause.value, **fields, **_counts(spent))
        journal = self.journal.path.parent
        if verdict.cause is Cause.FINISHED and not self._has_journal_of_worker:
            commits = commits_in(journal.parent)
            found = count_commits(journal.parent, commits)
            began = SystemClock().wall() - seconds
            times = [each.saved_at or 0.0 for each in commits]
            if max(times, default=0.0) < began:
                before = f"{found}, all made before this run: " if found else ""
                found = f"{before}{_OTHER_DIRECTORY}"
            self._print(f"no worker wrote a journal in {journal}: {found}")
        # The numbers do not include the signal to stop, usually one more preemption.
        earlier = "earlier " if verdict.cause is Cause.STOPPED else ""
        self._print(
            f"outcome: {OUTCOMES[verdict.cause]}, exit code: {verdict.code}, "
            f"starts: {starts}, {earlier}preemptions: {spent.preemptions}, "
            f"{earlier}failures: {spent.failures}, time: {seconds:.1f} s"
            + (f"; last failure: {why}" if why else "")
        )

    @property
    def _has_journal_of_worker(self) -> bool:
        """Whether a worker has written a journal; also True if the directory cannot be
        read now, for example without a free file descriptor."""
        try:
            return any(self.journal.path.parent.glob("worker-*.jsonl"))
        except OSError:
            return True

    def log_lost(self, log: Path, error: OSError) -> None:
        """Reports that a worker's output cannot be written; later calls do nothing."""
        if not self._has_told_loss:
            self._has_told_loss = True
            self._add("log_lost", log=str(log), error=str(error))
            self._print(
                f"cannot write the log {log}: {error}. Training continues; output of "
                "the workers is lost until the disk has space"
            )

    def metrics_lost(self, path: Path, error: OSError) -> None:
        """Reports that the metrics cannot be written; later calls do nothing."""
        if not self._has_told_metrics_loss:
            self._has_told_metrics_loss = True
            self._add("metrics_lost", file=str(path), error=str(error))
            self._print(
                f"cannot write the metrics to {path}: {error}. Training continues"
            )

    def slow_worker(
        self, worker: int, host: str | None, slowdown: float, measure: str
    ) -> None:
        """Reports that a worker is slower than the other workers.

        Args:
            worker: index of the worker.
            host: name of the machine.
            slowdown, measure: slowdown of the worker, and its measure, see `RunStatus`.
        """
        fields = {"worker": worker, "host": host, "slowdown": slowdown, "by": measure}
        self._add("slow_worker", incarnation=self._incarnation, **fields)
        self._print(
            f"WARNING: worker {worker} on {host} has a larger {measure} than the other "
            f"workers, so a step probably takes {slowdown:.2g} times as long. Check "
            "the load of the machine, and its input data (docs/live.md)"
        )

    def close(self) -> None:
        """Closes the journal; prints the remaining text, and closes the console."""
        self.journal.close()
        self.console.close()

    def _add(self, event: str, **values: Any) -> None:
        self.journal.append(
            {"event": event, "supervisor": self.supervisor, **values},
            durable=event == "exited",
        )

    def _print(self, text: str, *more: str) -> None:
        # `feed` returns fast: the supervisor's main thread must not be delayed.
        lines = "".join(f"{plain(line)}\n" for line in (f"tfpreempt: {text}", *more))
        self.console.feed(lines.encode())


def claim(journal: JsonLines, supervisor: str) -> None:
    """Records this supervisor in a journal, and checks that no other supervisor runs.

    Of supervisors that begin at the same time, the first in the journal continues. Only
    a process of this machine can be known to run.

    Args:
        journal: journal of the supervisors of a directory.
        supervisor: id of this supervisor.

    Raises:
        ConfigurationError: an earlier supervisor runs.
    """
    here = lease_record.this_process(0.0)
    owner = dataclasses.asdict(here)
    journal.append({"event": "opened", "supervisor": supervisor, "owner": owner})
    journal.close()  # its descriptor may be 1 or 2, if stdout or stderr is closed
    earlier: dict[str, lease_record.LeaseOwner] = {}  # by id of the supervisor
    with (
        contextlib.suppress(OSError),
        open(open_file(journal.path, os.O_RDONLY)) as file,
    ):
        for line in LineReader().read_on(file.fileno()):
            record = parse_record(line) or {}
            name = str(record.get("supervisor"))
            if name == supervisor:
                break
            if "owner" in record:
                data = json.dumps(record["owner"]).encode()
                earlier[name] = lease_record.from_json(data, "")
            elif record.get("event") in ("exited", "supervisor_terminated"):
                earlier.pop(name, None)
    for other in filter(lambda each: each.is_running_beside(here), earlier.values()):
        raise ConfigurationError(
            f"Another supervisor uses {journal.path.parent}: {other}. Two supervisors "
            "would mix their workers, logs and journals. Wait until that process has "
            "ended, or stop it with SIGTERM; or name another --checkpoint-dir (without "
            "--checkpoint-dir: another --log-dir)."
        )


def _counts(spent: BudgetUsed) -> dict[str, int]:
    """Returns the numbers of preemptions and failures, as fields of a journal record.

    The times of the failures in the last hour are replaced by their number.
    """
    counts = dataclasses.asdict(spent)
    counts["failures_in_an_hour"] = len(counts.pop("failed_at"))
    return counts


def _how(hang: Hang) -> str:
    behind = ", behind other workers" if hang.is_behind else ""
    is_waiting = hang.stage is WorkerPhase.WAITS
    what = "waiting for other workers" if is_waiting else "no step"
    return (
        f"  worker {hang.worker} at step {hang.step}{behind}: {what} for "
        f"{hang.seconds:.0f} s, process {hang.state}"
    )


def _names(workers: Sequence[int]) -> str:
    return f"worker(s) {', '.join(map(str, workers))}"
