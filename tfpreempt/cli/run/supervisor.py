"""The supervisor: one incarnation of the workers after the other, to the exit code.

One thread decides and acts: the kernel ties a worker's parent-death signal to it, as it
starts them, and Python receives signals on the main thread only. Others take in what
the workers write, and print: a console that stands still must delay no decision.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from typing import IO, TextIO

from tfpreempt.checkpoint.home import Home
from tfpreempt.cli.run import policy
from tfpreempt.cli.run.echo import Echo
from tfpreempt.cli.run.incarnation import Incarnation
from tfpreempt.cli.run.logs import Pump, WorkerLog
from tfpreempt.cli.run.policy import Cause, Leave, Restart, Situation, Tally
from tfpreempt.cli.run.processes import Fleet, Guard, adopt_orphans
from tfpreempt.cli.run.record import Record, Summary
from tfpreempt.cli.run.settings import Settings
from tfpreempt.cli.run.signals import SignalBox, watch_signals
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.storage import paths


class Supervisor:
    """Supervises one run, from the first start to the exit code. Main thread only.

    Args:
        settings: what to run, and within which limits.
        clock: for durations and records.

    Raises:
        ConfigurationError: a log file cannot be written.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._id = secrets.token_hex(4)
        self._record = Record(
            settings.journal_path,
            self._clock,
            self._id,
            console=_unbuffered(sys.__stderr__),
        )
        self._echo = (
            Echo(f"[{settings.label(0)}] ", _unbuffered(sys.__stdout__))
            if settings.has_echo
            else None
        )
        self._logs = [self._open_log(worker) for worker in range(settings.workers)]
        self._home: Home | None = None  # a URL is the workers' matter
        if settings.checkpoint_dir and not paths.is_url(settings.checkpoint_dir):
            self._home = Home(settings.checkpoint_dir)
        self._tally = Tally()
        self._restart = 0
        self._down_at: float | None = None  # since when not all workers are there
        self._seconds_lost = 0.0

    def run(self) -> int:
        """Runs to the end.

        Returns:
            The exit code for the platform.

        Raises:
            ConfigurationError: there are not enough free ports.
        """
        began = self._clock.monotonic()
        with contextlib.closing(self._record):
            verdict = self._run_all()
            self._record.left(self._sum_up(verdict, self._clock.monotonic() - began))
        return verdict.code

    def _run_all(self) -> Leave:
        """One incarnation after the other, until one is the last."""
        adopt_orphans()
        with watch_signals(self._clock) as signals, contextlib.ExitStack() as ends:
            if self._echo is not None:
                ends.callback(self._echo.close)
            for log in self._logs:
                ends.callback(log.close)
            ends.callback(Pump(self._logs).close)
            # However this ends, the guard ends the workers that are left.
            outputs = {log.reading: log.path for log in self._logs}
            guard = Guard(self._settings.limits.leave_grace, outputs)
            ends.callback(guard.close)
            while True:
                verdict = self._run_once(guard, signals)
                if isinstance(verdict, Leave):
                    return verdict
                self._restart += 1

    def _open_log(self, worker: int) -> WorkerLog:
        settings = self._settings
        return WorkerLog(
            settings.log_dir / f"{settings.label(worker)}.log",
            size=settings.log_size,
            files=settings.log_files,
            lost=self._record.log_lost,
            echo=self._echo if worker == 0 else None,
        )

    def _run_once(self, guard: Guard, signals: SignalBox) -> Restart | Leave:
        """One incarnation, and the pause after it."""
        limits = self._settings.limits
        incarnation = Incarnation(
            f"{self._id}-{self._restart}",
            self._restart,
            self._settings,
            fleet=Fleet(guard, limits.leave_grace),
            logs=self._logs,
            record=self._record,
            signals=signals,
            clock=self._clock,
        )
        with contextlib.closing(incarnation):
            if self._down_at is not None:
                self._seconds_lost += incarnation.started_at - self._down_at
            seen = incarnation.follow(self._tally)
            verdict = self._judge(incarnation, seen)
            incarnation.clear(verdict.delay if isinstance(verdict, Restart) else 0.0)
        if isinstance(verdict, Restart) and signals.stop is not None:
            return policy.leave_between_runs(limits, verdict.tally)
        return verdict

    def _judge(self, incarnation: Incarnation, seen: Situation) -> Restart | Leave:
        """What follows from a run that is over; tells and remembers it."""
        limits = self._settings.limits
        verdict = policy.decide(limits, seen)
        assert isinstance(verdict, Restart | Leave)  # `follow` returns on these only
        if isinstance(verdict, Restart) and self._home and not self._home.is_same():
            verdict = policy.leave_without_directory(verdict.tally)
        self._tally = verdict.tally
        self._down_at = next((e.at for e in seen.exits if e.code != 0), None)
        self._record.decided(verdict, limits)
        failed = policy.first_failure(limits, seen)
        if failed and isinstance(verdict, Leave) and verdict.cause is Cause.FAILURE:
            log = self._logs[failed.worker].path
            lines = incarnation.errors.get(failed.worker, [])
            self._record.show_error(failed, lines, log)
        return verdict

    def _sum_up(self, verdict: Leave, seconds: float) -> Summary:
        return Summary(
            code=verdict.code,
            cause=verdict.cause,
            incarnations=self._restart + 1,
            tally=verdict.tally,
            seconds=seconds,
            seconds_lost=self._seconds_lost,
        )


# A program may be started with its streams closed; what it says then goes nowhere.


def _unbuffered(stream: TextIO | None) -> IO[bytes]:
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)
