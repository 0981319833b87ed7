"""The supervisor: starts the workers, waits for their end, and restarts them.

The main thread makes the decisions, starts the workers, and waits for signals. (The
main thread must start the workers, because the kernel sends SIGTERM to a worker when
the thread that started it ends.) Other threads read the workers' output and print it,
because a stalled console must not delay a decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tfpreempt.checkpoint.directory.storage_identity import DirectoryIdentity
from tfpreempt.cli.journals.locate import commits_in
from tfpreempt.cli.journals.records import Record
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.run import live_view, restart_policy, snapshot_space
from tfpreempt.cli.run.console import OutputConsole, status_line, unbuffered
from tfpreempt.cli.run.hang_detector import HangDetector
from tfpreempt.cli.run.logs import WorkerLog, pumped
from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.reporter import Reporter, claim
from tfpreempt.cli.run.restart_policy import (
    Cause,
    ExitSupervisor,
    Restart,
    ReturnCode,
    SupervisorState,
    WorkerExit,
)
from tfpreempt.cli.run.tf_config import claimed_ports
from tfpreempt.cli.run.worker_group import WorkerGroup
from tfpreempt.cli.signal_handling import NOTICES, WaitForSignal, held_signals
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.journal import JsonLines
from tfpreempt.errors import ConfigurationError

# Seconds between two polls for children of ended workers: the end of such a child sends
# no signal.
_LEFTOVER_SECONDS = 0.05
_LINE_LENGTH = 500  # longest error line in the summary; the log has the full line
_CANNOT_START = ReturnCode(126)


def supervise(options: RunOptions) -> int:
    """Supervises a run until its end. Call on the main thread.

    Args:
        options: options of the run.

    Returns:
        The exit code for the platform.

    Raises:
        ConfigurationError: another supervisor uses the directory, a log file or the
            metrics cannot be written, or there are not enough ports or not enough
            memory for snapshots.
    """
    clock, name, grace = SystemClock(), secrets.token_hex(4), options.limits.leave_grace
    journal = JsonLines(options.journal_path, clock)
    claim(journal, name)
    # If the parent process ignores SIGCHLD, this process ignores SIGCHLD too, from its
    # start. Stop ignoring it: `held_signals` does not wait for an ignored signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with held_signals(signal.SIGCHLD, *NOTICES) as wait, contextlib.ExitStack() as ends:
        lent = ends.enter_context(
            snapshot_space.lent(options.snapshots, options.workers)
        )
        options = dataclasses.replace(options, memory=lent)
        stderr, stdout = unbuffered(sys.__stderr__), unbuffered(sys.__stdout__)
        line = status_line(stderr)
        console = OutputConsole("", stderr, line)
        is_one_place = os.path.sameopenfile(stderr.fileno(), stdout.fileno())
        shows_worker_0 = options.has_echo and is_one_place
        reporter = Reporter(journal, name, console, shows_worker_0)
        ends.callback(reporter.close)
        echo = None
        if options.has_echo:
            beside = line if stdout.isatty() else None
            echo = OutputConsole(f"[{options.label(0)}] ", stdout, beside)
            ends.callback(echo.close)
        root = options.checkpoint_dir or ""
        logs = [
            WorkerLog(
                options.log_dir / f"{options.label(worker)}.log",
                size=options.log_size,
                files=options.log_files,
                lost=reporter.log_lost,
                console=None if worker else echo,
                root=root,
            )
            for worker in range(options.workers)
        ]
        for log in logs:
            ends.callback(log.close)
        ends.enter_context(pumped(logs))
        outputs = {log.reading: log.path for log in logs}
        fleet = WorkerGroup(grace, outputs, options.journal_path, name, root)
        ends.callback(fleet.close)
        watch = HangDetector(options.hang_timeout, options.workers)
        ends.callback(watch.close)
        ends.enter_context(live_view.shown(options, clock, line, reporter))
        supervisor = Supervisor(options, reporter, logs, fleet, watch, wait, clock)
        code = supervisor.run(name)
        fleet.end_orderly()
        return code


_Steps = tuple[int | None, int | None]
"""Step of the newest commit in the checkpoint directory, and in the chief's journal. A
step is None if there is no commit."""


@dataclasses.dataclass(eq=False)
class Supervisor:
    """Starts the workers, waits for their end, and restarts them.

    Use on the main thread only.

    Args:
        options: options of the run.
        reporter: writes events to the journal and the console.
        logs: log file of every worker.
        fleet: starts and ends the worker processes.
        watch: hang detector.
        wait: function that waits for SIGCHLD and for the signals to stop.
        clock: time source.
    """

    options: RunOptions
    reporter: Reporter
    logs: Sequence[WorkerLog]
    fleet: WorkerGroup
    watch: HangDetector
    wait: WaitForSignal
    clock: Clock
    seen: SupervisorState = dataclasses.field(init=False)
    """Observations for the next decision."""

    def __post_init__(self) -> None:
        self._journals = JournalTailer(
            self.options.journal_dir,
            {0, self.options.first_worker or 0},
            self.options.journal_path.name,
        )

    def run(self, name: str) -> int:
        """Runs the workers, with restarts, until the end; returns the exit code.

        Args:
            name: id of this supervisor.
        """
        began = self.clock.monotonic()
        self.seen = SupervisorState(now=began, workers=0)
        identity, directory, restart = None, self.options.local_dir, 0
        # Ignore the error: the workers will report it.
        with contextlib.suppress(OSError):
            identity = DirectoryIdentity(directory) if directory else None
        while True:
            verdict = self._run_once(f"{name}-{restart}", restart, identity)
            if isinstance(verdict, ExitSupervisor):
                break
            restart += 1
        seconds = self.clock.monotonic() - began
        self.reporter.exited(verdict, restart + 1, seconds, self._last_failure())
        return verdict.code

    def _run_once(
        self, name: str, restart: int, identity: DirectoryIdentity | None
    ) -> Restart | ExitSupervisor:
        """Starts the workers, waits for their end, and decides what follows.

        If the workers are to be restarted, also waits for the delay of the restart.

        Args:
            name: name of this start of all workers (the incarnation).
            restart: number of restarts so far.
            identity: identity of the checkpoint directory at the first start, to detect
                that the directory was replaced; None if unknown.
        """
        limits = self.options.limits
        with contextlib.ExitStack() as claims:
            first_steps, first_exits = self._newest_steps(), self._newest_exits
            self._start(name, restart, claims)
            verdict = self._follow(first_steps)
            is_restart = isinstance(verdict, Restart)
            if is_restart and (cause := self._permanent_cause(identity, first_exits)):
                verdict = ExitSupervisor(cause=cause, code=1, spent=verdict.spent)
            self.reporter.decided(verdict, limits)
            if self.seen.hung_at is not None:
                self.reporter.stacks(self.watch.stacks())
            if failure := self._first_failure():
                log = self.logs[failure.worker]
                self.reporter.failed(failure, log.error_lines(), log.path)
            self._clear(verdict.delay if isinstance(verdict, Restart) else 0.0)
        if isinstance(verdict, Restart) and self.seen.stop_at is not None:
            verdict = restart_policy.leave_between_runs(limits, verdict.spent)
        self._note(spent=verdict.spent)
        return verdict

    def _start(self, name: str, restart: int, claims: contextlib.ExitStack) -> None:
        """Starts the workers. A worker that cannot be started counts as ended.

        A lack of ports or file descriptors may be temporary, so it counts as a failed
        start, after which the workers are restarted.

        Args:
            name: name of this start of all workers (the incarnation).
            restart: number of restarts so far.
            claims: context at whose end the ports of the local cluster are no longer
                reserved.

        Raises:
            ConfigurationError: there are not enough ports for the first start.
        """
        now = self.clock.monotonic()
        options = self.options
        ports: tuple[int, ...] = ()
        obstacle: Exception | None = None
        try:
            count = 0 if options.task else options.workers
            ports = claims.enter_context(claimed_ports(count))
        except (OSError, ConfigurationError) as lacking:
            if isinstance(lacking, ConfigurationError) and not restart:
                raise
            obstacle = lacking
        pids: list[int | None] = []
        self.watch.begin()
        for worker, log in enumerate(self.logs):
            log.begin(f"{options.label(worker)} starts, restart {restart}, {name}")
            environment = options.worker_environment(worker, name, restart, ports)
            environment |= self.watch.to_environment(worker)
            pid, error = None, obstacle
            if error is None:
                try:
                    pid = self.fleet.start(
                        worker, options.command, environment, log.writing
                    )
                except OSError as refused:
                    error = refused
            if error is not None:
                log.add_line(f"{options.label(worker)} cannot be started: {error}")
            pids.append(pid)
        self.reporter.started(name, restart, pids, options.first_worker)
        self.seen = SupervisorState(
            now=now, workers=options.workers, started_at=now, spent=self.seen.spent
        )
        for worker, started in enumerate(pids):
            if started is None:
                self._add_exit(worker, _CANNOT_START, now)

    def _follow(self, first_steps: _Steps) -> Restart | ExitSupervisor:
        """Executes the actions of `restart_policy` until the workers have ended.

        Args:
            first_steps: result of `_newest_steps` before the start of the workers.
        """
        while True:
            now = self.clock.monotonic()
            for worker, code in self.fleet.reap(now):
                self._add_exit(worker, code, now)
            is_over = len(self.seen.exits) == self.seen.workers
            self._note(
                now=now,
                has_progressed=self._has_progressed(first_steps) if is_over else False,
                hang_due=self.watch.look(now, self.fleet.running),
            )
            match restart_policy.decide(self.options.limits, self.seen):
                case restart_policy.Wait(until=until):
                    due = None if until is None else until - now
                    looks = (due, self.watch.next_look)
                    times = [each for each in looks if each is not None]
                    self._wait(min(times, default=None))
                case restart_policy.DumpStacks():
                    self.reporter.hung(self.watch.ask_for_stacks(self.fleet.running))
                    self._note(hung_at=now)
                case restart_policy.SendSigterm():
                    self._ask()
                    self._note(asked_at=now)
                case restart_policy.SendSigkill(why=why):
                    workers = self.fleet.running
                    self.reporter.workers_signaled("SIGKILL", workers, f": {why}")
                    self.fleet.kill()
                    self._note(killed_at=now)
                case verdict:
                    return verdict

    def _ask(self) -> None:
        """Sends SIGTERM to the running workers, and writes the reason to their logs.

        Without the line, the log would show only a preemption notice.
        """
        failure, others, why = self._first_failure(), self.fleet.running, ""
        more = ""
        if failure is not None:
            why = f"worker {failure.worker} failed ({failure.describe()})"
            more = f", because {why}"
        elif self.seen.stop_at is not None:
            grace = self.options.limits.grace
            limit = "no time limit" if grace is None else f"at most {grace:g} s"
            more = f"; waiting for the workers to commit ({limit})"
        self.reporter.workers_signaled("SIGTERM", others, more)
        self.fleet.ask()
        for worker in others if why else ():
            self.logs[worker].note(
                f"SIGTERM to {self.options.label(worker)}, because {why}"
            )

    def _first_failure(self) -> WorkerExit | None:
        return restart_policy.first_failure(self.options.limits, self.seen)

    def _last_failure(self) -> str:
        """Describes the last failure of a worker, with its error line.

        The error line is left out if a signal killed the worker, because the worker's
        log cannot show the reason. Returns "" if no worker has failed.
        """
        failure = self._first_failure()
        if failure is None:
            return ""
        log = self.logs[failure.worker]
        line = log.error_line() if failure.returncode > 0 else ""
        text = textwrap.shorten(line, _LINE_LENGTH, placeholder=" ...")
        return f"worker {failure.worker}, {failure.describe()}: {text or log.path}"

    def _add_exit(self, worker: int, code: ReturnCode, now: float) -> None:
        """Records that a worker has ended, or could not be started."""
        asked = self.seen.asked_at is not None
        one = WorkerExit(worker=worker, returncode=code, at=now, was_asked=asked)
        self._note(exits=(*self.seen.exits, one))
        log = self.logs[worker]
        log.end(f"{self.options.label(worker)} ended: {one.describe()}")
        is_fine = not one.code or self.options.limits.is_preempted(one)
        self.reporter.worker_ended(one, None if is_fine else log.path)

    def _clear(self, delay: float) -> None:
        """Waits for the delay of a restart, and for the end of the workers' children.

        A signal to stop ends the delay. Children that do not exit in time are killed.

        Args:
            delay: delay of the restart in seconds.
        """
        now = self.clock.monotonic()
        due, gone_by = now + delay, now + self.options.limits.leave_grace
        gone_by += self.options.limits.unkillable
        while True:
            self.fleet.reap(now)
            if self.seen.is_urged:
                self.fleet.kill()
            is_due = now >= due or self.seen.stop_at is not None
            if is_due and (not self.fleet.has_leftovers or now >= gone_by):
                break
            self._wait((gone_by if is_due else due) - now)
            now = self.clock.monotonic()

    def _wait(self, seconds: float | None) -> None:
        """Waits for the end of a worker, a signal to stop, or a timeout.

        The first signal to stop is recorded. A later Ctrl-C or Ctrl-\\ is counted,
        because the second one kills the workers. A later SIGTERM is ignored, because
        platforms repeat SIGTERM.

        Args:
            seconds: timeout; None: no timeout.
        """
        times = [] if seconds is None else [max(0.0, seconds)]
        if self.fleet.has_leftovers:
            times.append(_LEFTOVER_SECONDS)
        signum = self.wait(min(times, default=None))
        if signum is None or signum == signal.SIGCHLD:
            return
        now, grace = self.clock.monotonic(), self.options.limits.grace
        if self.seen.stop_at is None:
            self._note(stop_at=now)
            self.reporter.stop_requested(signum.name)
        elif signum in (signal.SIGINT, signal.SIGQUIT):
            self._note(urges=self.seen.urges + 1)
            if not self.seen.is_urged:
                left = grace and max(0.0, self.seen.stop_at + grace - now)
                self.reporter.stop_requested_again(self.fleet.running, left)

    def _note(self, **values: Any) -> None:
        self.seen = dataclasses.replace(self.seen, **values)

    def _has_progressed(self, first_steps: _Steps) -> bool | None:
        """Returns whether the workers have committed a new step since their start.

        Args:
            first_steps: result of `_newest_steps` before the start.

        Returns:
            None if unknown: the supervisor sees no commit, but the chief runs on
            another machine, or commits to a directory that the supervisor does not
            know.
        """
        steps, chief = self._newest_steps(), self.options.journal_dir / "worker-0.jsonl"
        is_known = self.options.local_dir is not None or chief.exists()
        pairs = zip(steps, first_steps, strict=True)
        if any(step not in (None, first) for step, first in pairs):
            return True
        is_chief_here = is_known and self.options.first_worker == 0
        return False if is_chief_here or steps[0] is not None else None

    def _permanent_cause(
        self, identity: DirectoryIdentity | None, first_exits: Mapping[int, Record]
    ) -> Cause | None:
        """Returns the reason why no restart can help; None if a restart may help.

        Args:
            identity: identity of the directory at the first start, or None.
            first_exits: value of `_newest_exits` before the start of the workers.
        """
        if identity and _is_elsewhere(identity):
            return Cause.MOVED  # in the other directory, training would start at 0
        is_permanent = any(
            exit["is_permanent"] and exit != first_exits.get(worker)
            for worker, exit in self._newest_exits.items()
        )
        return Cause.PERMANENT if is_permanent else None

    @property
    def _newest_exits(self) -> Mapping[int, Record]:
        """The newest records of an exit that `_newest_steps` has read, of the chief and
        of this machine's first worker, by worker."""
        workers = self._journals.workers.items()
        exits = {i: each.training and each.training.exit for i, each in workers}
        return {i: exit for i, exit in exits.items() if exit}

    def _newest_steps(self) -> _Steps:
        """Returns the newest committed steps: in the directory, and in the journal.

        Both are needed: a program may commit to object storage, or to a subdirectory
        for every fit, and not to the checkpoint directory. If the chief runs on another
        machine, its journal is found only if the machines share the journal's
        directory.
        """
        in_directory = in_journal = None
        if self.options.local_dir is not None:
            commits = commits_in(self.options.local_dir)
            in_directory = commits[0].step if commits else None
        with contextlib.suppress(OSError):
            self._journals.read_on(self.clock.wall())
            chief = self._journals.workers.get(0)
            if chief is not None and chief.commit is not None:
                in_journal = chief.commit["step"]
        return in_directory, in_journal


def _is_elsewhere(identity: DirectoryIdentity) -> bool:
    """Returns whether the directory was moved or replaced; False if unknown."""
    try:
        return not identity.is_same()
    except OSError:
        return False
