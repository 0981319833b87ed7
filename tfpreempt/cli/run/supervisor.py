"""The supervisor: one incarnation of the workers after the other, to the exit code.

One thread decides and acts: the kernel ties a worker's parent-death signal to it, as it
starts them, and it waits for signals. Others take in what the workers write, and
print: a console that stands still must delay no decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import sys
from collections.abc import Sequence

from tfpreempt.checkpoint import catalog
from tfpreempt.checkpoint.home import Home
from tfpreempt.cli.run import policy
from tfpreempt.cli.run.cluster import claimed_ports
from tfpreempt.cli.run.console import Console, unbuffered
from tfpreempt.cli.run.launch import HELD
from tfpreempt.cli.run.logs import Pump, WorkerLog
from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.policy import Leave, Restart, Situation, Spent, WorkerExit
from tfpreempt.cli.run.processes import Fleet, Guard, adopt_orphans
from tfpreempt.cli.run.reporter import Reporter
from tfpreempt.cli.signals import Wait, held_signals
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.storage import paths

_LEFTOVER_SECONDS = 0.05  # nobody tells when the last child of a dead worker goes
_CANNOT_START = policy.ReturnCode(126)


def supervise(options: RunOptions) -> int:
    """Supervises a run, from the first start to the end. Main thread only.

    Returns:
        The exit code for the platform.

    Raises:
        ConfigurationError: a log file cannot be written, or there are not enough ports.
    """
    clock, name = SystemClock(), secrets.token_hex(4)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whose caller may ignore it
    with held_signals(*HELD) as wait, contextlib.ExitStack() as ends:
        console = Console("", unbuffered(sys.__stderr__))
        reporter = Reporter(options.journal_path, clock, name, console)
        ends.callback(reporter.close)
        echo = None
        if options.has_echo:
            echo = Console(f"[{options.label(0)}] ", unbuffered(sys.__stdout__))
            ends.callback(echo.close)
        logs = []
        for worker in range(options.workers):
            log = WorkerLog(
                options.log_dir / f"{options.label(worker)}.log",
                size=options.log_size,
                files=options.log_files,
                lost=reporter.log_lost,
                console=echo if worker == 0 else None,
            )
            ends.callback(log.close)
            logs.append(log)
        ends.callback(Pump(logs).close)
        adopt_orphans()
        # However this ends, the guard ends the workers that are left.
        outputs = {log.reading: log.path for log in logs}
        guard = Guard(options.limits.leave_grace, outputs)
        ends.callback(guard.close)
        fleet = Fleet(guard, options.limits.leave_grace)
        return Supervisor(name, options, reporter, logs, fleet, wait, clock).run()


class Supervisor:
    """Starts all workers, follows them to the end, and again. Main thread only.

    Args:
        name: of this supervisor's life.
        options: what to run, and within which limits.
        reporter: is told what happens.
        logs: one per worker.
        fleet: has no workers yet.
        wait: for SIGCHLD, and the signals that tell the supervisor to leave.
        clock: for durations.
    """

    def __init__(
        self,
        name: str,
        options: RunOptions,
        reporter: Reporter,
        logs: Sequence[WorkerLog],
        fleet: Fleet,
        wait: Wait,
        clock: Clock,
    ) -> None:
        self._name = name
        self._options = options
        self._limits = options.limits
        self._reporter = reporter
        self._logs = logs
        self._fleet = fleet
        self._signals = wait
        self._clock = clock
        self._directory: str | None = None  # a URL is the workers' matter
        if options.checkpoint_dir and not paths.is_url(options.checkpoint_dir):
            self._directory = options.checkpoint_dir
        self._stop_at: float | None = None
        self._urges = 0  # each Ctrl-C that came after the signal to leave

    def run(self) -> int:
        """Runs to the end; returns the exit code."""
        began = self._clock.monotonic()
        home = Home(self._directory) if self._directory else None
        spent, restart = Spent(), 0
        while True:
            verdict = self._run_once(restart, spent, home)
            if isinstance(verdict, Leave):
                break
            spent, restart = verdict.spent, restart + 1
        seconds = self._clock.monotonic() - began
        self._reporter.left(verdict, restart + 1, seconds)
        return verdict.code

    def _run_once(
        self, restart: int, spent: Spent, home: Home | None
    ) -> Restart | Leave:
        """One incarnation, and the pause after it."""
        name = f"{self._name}-{restart}"
        ports = 0 if self._options.task else self._options.workers
        with claimed_ports(ports) as numbers:
            first_step = self._newest_step()
            seen = self._start(name, restart, spent, numbers)
            seen, verdict = self._follow(name, seen, first_step)
            if isinstance(verdict, Restart) and home and not home.is_same():
                verdict = policy.leave_without_directory(verdict.spent)
            self._reporter.decided(verdict, self._limits)
            failure = policy.first_failure(self._limits, seen)
            if failure:
                log = self._logs[failure.worker]
                self._reporter.failed(failure, log.error_lines(), log.path)
            self._clear(verdict.delay if isinstance(verdict, Restart) else 0.0)
        if isinstance(verdict, Restart) and self._stop_at is not None:
            return policy.leave_between_runs(self._limits, verdict.spent)
        return verdict

    def _start(
        self, name: str, restart: int, spent: Spent, ports: tuple[int, ...]
    ) -> Situation:
        """Starts all workers; who cannot be started has ended."""
        started_at = self._clock.monotonic()
        options, exits = self._options, []
        pids: list[int | None] = []
        for worker, log in enumerate(self._logs):
            log.begin(f"{options.label(worker)} starts, restart {restart}, {name}")
            told = options.worker_environment(worker, name, restart, ports)
            try:
                pids.append(
                    self._fleet.start(worker, options.command, told, log.writing)
                )
            except OSError as error:
                log.say(f"{options.label(worker)} cannot be started: {error}")
                pids.append(None)
                exits.append(
                    WorkerExit(worker=worker, returncode=_CANNOT_START, at=started_at)
                )
        self._reporter.started(name, restart, pids)
        for each in exits:
            self._reporter.worker_ended(name, each, self._logs[each.worker].path)
        return Situation(
            now=started_at,
            workers=options.workers,
            started_at=started_at,
            exits=tuple(exits),
            spent=spent,
        )

    def _follow(
        self, name: str, seen: Situation, first_step: int | None
    ) -> tuple[Situation, Restart | Leave]:
        """Does what the policy says until it has a verdict; also what that is on."""
        while True:
            seen = self._look(name, seen, first_step)
            match policy.decide(self._limits, seen):
                case policy.Wait(until=until):
                    self._wait(None if until is None else until - seen.now)
                case policy.Ask():
                    self._reporter.ended_others("SIGTERM", self._fleet.running)
                    self._fleet.ask()
                    seen = dataclasses.replace(seen, asked_at=seen.now)
                case policy.Kill():
                    self._reporter.ended_others("SIGKILL", self._fleet.running)
                    self._fleet.kill()
                    seen = dataclasses.replace(seen, killed_at=seen.now)
                case verdict:
                    return seen, verdict

    def _look(self, name: str, seen: Situation, first_step: int | None) -> Situation:
        """Adds the workers that have ended, and a stop, to what was seen."""
        now = self._clock.monotonic()
        exits = list(seen.exits)
        for worker, code in self._fleet.reap(now):
            asked = seen.asked_at is not None
            one = WorkerExit(worker=worker, returncode=code, at=now, was_asked=asked)
            log = self._logs[worker]
            log.end(f"{self._options.label(worker)} ended: {one.describe()}")
            is_fine = one.code in (0, *self._limits.restart_codes)
            self._reporter.worker_ended(name, one, None if is_fine else log.path)
            exits.append(one)
        is_over = len(exits) == seen.workers
        step = self._newest_step() if is_over else None
        return dataclasses.replace(
            seen,
            now=now,
            exits=tuple(exits),
            stop_at=self._stop_at,
            is_urged=self._is_urged,
            has_progressed=step not in (None, first_step),
        )

    def _clear(self, delay: float) -> None:
        """Waits for a delay, and until no child of a worker is left.

        A stop ends the delay. What the workers leave behind gets its time too.
        """
        now = self._clock.monotonic()
        due, gone_by = now + delay, now + self._limits.leave_grace
        gone_by += self._limits.unkillable
        while True:
            self._fleet.reap(now)
            if self._is_urged:
                self._fleet.kill()
            is_due = now >= due or self._stop_at is not None
            if is_due and (not self._fleet.has_leftovers or now >= gone_by):
                break
            self._wait((gone_by if is_due else due) - now)
            now = self._clock.monotonic()

    def _wait(self, seconds: float | None) -> None:
        """Waits for a worker's end or a signal to leave, and remembers that.

        The first one stays. One Ctrl-C after it must not cut short what was asked for;
        platforms repeat SIGTERM, which asks for nothing new.
        """
        times = [] if seconds is None else [max(0.0, seconds)]
        if self._fleet.has_leftovers:
            times.append(_LEFTOVER_SECONDS)
        told = self._signals(min(times, default=None))
        if told is None or told == signal.SIGCHLD:
            return
        now, grace = self._clock.monotonic(), self._limits.grace
        if self._stop_at is None:
            self._stop_at = now
            self._reporter.told_to_stop(told.name, grace)
        elif told == signal.SIGINT:
            self._urges += 1
            if self._urges == 1:
                left = None if grace is None else max(0.0, self._stop_at + grace - now)
                self._reporter.urged(self._fleet.running, left)

    @property
    def _is_urged(self) -> bool:
        """Whether to wait no longer: the first urge only asks what is waited for."""
        return self._urges >= 2

    def _newest_step(self) -> int | None:
        """The step of the newest commit; None where none is seen."""
        if self._directory is None:
            return None
        try:
            found = catalog.scan(self._directory)
        except OSError:
            return None
        return next((entry.step for entry in found if entry.is_committed), None)
