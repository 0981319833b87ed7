"""One start of all workers, followed to the end of the last one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from tfpreempt.cli.run import policy
from tfpreempt.cli.run.cluster import Ports
from tfpreempt.cli.run.logs import WorkerLog
from tfpreempt.cli.run.policy import Situation, Tally, WorkerExit
from tfpreempt.cli.run.processes import Ended, Fleet
from tfpreempt.cli.run.progress import newest_step
from tfpreempt.cli.run.record import Record
from tfpreempt.cli.run.settings import Settings
from tfpreempt.cli.run.signals import SignalBox
from tfpreempt.core.clock import Clock

_LEFTOVER_SECONDS = 0.05  # nobody tells when the last child of a dead worker goes


class Incarnation:
    """Starts the workers when made; main thread only, as it becomes their parent.

    Args:
        name: what the workers call it, the same for all of them.
        restart: how many there were before.
        settings: what to run.
        fleet: has no workers yet.
        logs: one per worker.
        record: is told what happens.
        signals: end a wait.
        clock: for durations.
    """

    def __init__(
        self,
        name: str,
        restart: int,
        settings: Settings,
        *,
        fleet: Fleet,
        logs: Sequence[WorkerLog],
        record: Record,
        signals: SignalBox,
        clock: Clock,
    ) -> None:
        self.name = name
        self._settings = settings
        self._fleet = fleet
        self._logs = logs
        self._record = record
        self._signals = signals
        self._clock = clock
        self._is_stop_told = False
        self._is_urge_told = False
        self._first_step = newest_step(settings.checkpoint_dir)
        self.errors: dict[int, list[str]] = {}  # worker -> its last lines, if it failed
        self.started_at = clock.monotonic()
        self._ends = contextlib.ExitStack()
        record.started(name, restart, self._start(restart))

    def follow(self, tally: Tally) -> Situation:
        """Does what the policy says until it has a verdict; returns what it is on."""
        seen = Situation(
            now=self.started_at,
            workers=self._settings.workers,
            started_at=self.started_at,
            tally=tally,
        )
        while True:
            seen = self._look(seen)
            match policy.decide(self._settings.limits, seen):
                case policy.Wait(until=until):
                    self.wait(None if until is None else until - seen.now)
                case policy.Ask():
                    self._record.ended_others("SIGTERM", self._fleet.running)
                    self._fleet.ask()
                    seen = dataclasses.replace(seen, asked_at=seen.now)
                case policy.Kill():
                    self._record.ended_others("SIGKILL", self._fleet.running)
                    self._fleet.kill()
                    seen = dataclasses.replace(seen, killed_at=seen.now)
                case policy.Restart() | policy.Leave():
                    return seen

    def clear(self, delay: float) -> None:
        """Waits for a delay, and until no child of a worker is left.

        A stop ends the delay. What the workers leave behind gets its time too.
        """
        limits, now = self._settings.limits, self._clock.monotonic()
        due, gone_by = now + delay, now + limits.leave_grace + limits.unkillable
        while True:
            self._fleet.reap(now)
            if self._signals.is_urged:
                self._fleet.kill()
            is_due = now >= due or self._signals.stop is not None
            if is_due and (not self._fleet.has_leftovers or now >= gone_by):
                break
            self.wait((gone_by if is_due else due) - now)
            now = self._clock.monotonic()

    def wait(self, seconds: float | None) -> None:
        """Waits for a signal or a worker's end.

        Args:
            seconds: how long at most; None is without limit.
        """
        times = [] if seconds is None else [max(0.0, seconds)]
        if self._fleet.has_leftovers:
            times.append(_LEFTOVER_SECONDS)
        self._signals.wait(min(times, default=None))
        stop, grace = self._signals.stop, self._settings.limits.grace
        if stop is None:
            return
        if not self._is_stop_told:
            self._is_stop_told = True
            self._record.told_to_stop(stop.signal.name, grace)
        if self._signals.urges and not self._is_urge_told:
            self._is_urge_told = True
            left = None
            if grace is not None:
                left = max(0.0, stop.at + grace - self._clock.monotonic())
            self._record.urged(self._fleet.running, left)

    def close(self) -> None:
        """Gives up the ports."""
        self._ends.close()

    def _start(self, restart: int) -> list[int | None]:
        """Starts all workers; returns their process ids."""
        ports: tuple[int, ...] = ()
        if self._settings.task is None:
            held = Ports(self._settings.workers)
            self._ends.callback(held.close)
            held.release()
            ports = held.numbers
        pids = []
        for worker, log in enumerate(self._logs):
            label = self._settings.label(worker)
            log.mark(f"{label} starts, restart {restart}, {self.name}")
            environment = self._settings.worker_environment(
                worker, self.name, restart, ports
            )
            command = self._settings.command
            pids.append(self._fleet.start(worker, command, environment, log.writing))
        return pids

    def _look(self, seen: Situation) -> Situation:
        """Adds the workers that have ended, and a stop, to what was seen."""
        now, stop = self._clock.monotonic(), self._signals.stop
        exits = list(seen.exits)
        for ended in self._fleet.reap(now):
            one = WorkerExit(
                worker=ended.worker,
                returncode=ended.returncode,
                at=now,
                was_asked=seen.asked_at is not None,
            )
            hint = self._end_log(ended, one)
            self._record.worker_ended(self.name, one, hint)
            exits.append(one)
        is_over = len(exits) == seen.workers
        step = newest_step(self._settings.checkpoint_dir) if is_over else None
        return dataclasses.replace(
            seen,
            now=now,
            exits=tuple(exits),
            stop_at=stop.at if stop else None,
            is_urged=self._signals.is_urged,
            has_progressed=step not in (None, self._first_step),
        )

    def _end_log(self, ended: Ended, one: WorkerExit) -> str:
        """Keeps a failure's error lines, ends the part; returns a hint for people."""
        log = self._logs[ended.worker]
        log.take()  # what it wrote last
        hint = ""
        if one.code not in (0, *self._settings.limits.restart_codes):
            lines = [ended.detail] if ended.detail else log.error_lines()
            self.errors[ended.worker] = lines
            # What ends by a signal has not written why.
            line = ended.detail or ("" if one.returncode < 0 else log.error_line())
            hint = (f" ({line})" if line else "") + f", see {log.path}"
        log.mark(f"{self._settings.label(ended.worker)} ended: {one.describe()}")
        return hint
