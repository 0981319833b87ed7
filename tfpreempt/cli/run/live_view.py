"""Shows the state of a run: as a line on a terminal, and as metrics.

Separate threads read the state from the files that `tfpreempt status` reads. So this
needs no answer of a worker, and neither training nor the supervisor waits for output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report.run_report import build_report
from tfpreempt.cli.run.console import StatusLine
from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.reporter import Reporter
from tfpreempt.cli.status import metrics
from tfpreempt.cli.status.read_status import read_status
from tfpreempt.cli.status.run_status import RunStatus
from tfpreempt.core.clock import Clock
from tfpreempt.core.cluster import cluster_from_environment
from tfpreempt.core.threads import ManagedThread
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage.files import replace

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LOOKS_EVERY = 1.0
_REPORTS_EVERY = 5.0
_SHARE = 100  # a report that takes 1 s is computed again after 100 s
_READING_SHARE = 10  # if reading all files takes 1 s, the files are read after 10 s
_WRITES_EVERY = 10.0
_JOIN_SECONDS = 5.0  # timeout at the end, because a disk may hang
_NAMES_AGAIN = 600.0  # seconds of usual speed after which a slow worker is named again


class LiveStatus:
    """The current state of a run, with its report, from the files of all workers.

    The report is computed from all records, because a restart may change earlier sums:
    kept steps become lost steps. The computation takes at most 1 % of the time, and
    reading the files at most 10 %.

    Args:
        journals: journals of the run. Without the chief's journal, no slow workers are
            reported; without all records, there is no report.
        workers: indices of the workers in the state; the report and the slowdowns are
            those of all workers.
        clock: time source.
        on_slow: function called for every slow worker and machine, and again only if
            the worker was not slow for `_NAMES_AGAIN`; called with the index of the
            worker, the name of the machine, the slowdown and its measure.
    """

    def __init__(
        self,
        journals: JournalTailer,
        workers: Collection[int],
        clock: Clock,
        on_slow: Callable[[int, str | None, float, str], None],
    ) -> None:
        self._journals, self._workers = journals, workers
        self._clock, self._on_slow = clock, on_slow
        self._lock = threading.Lock()
        # Times at which a worker on a machine was last slow, in monotonic seconds.
        self._slow_at: dict[tuple[int, str | None], float] = {}
        self._newest = RunStatus(at=0.0, workers=())
        self._due = self._report_due = -math.inf
        self._is_ending = False

    def end(self) -> None:
        """Makes every later call of `look` read all records written so far."""
        self._is_ending = True

    def look(self) -> RunStatus:
        """Returns the newest state, without workers if the directory cannot be read.

        Any thread may call.
        """
        # If another thread reads, only a call at the end of the run waits for it.
        if self._lock.acquire(timeout=_JOIN_SECONDS if self._is_ending else 0.0):
            try:
                self._read(self._clock.monotonic())
            except OSError:
                self._newest = dataclasses.replace(self._newest, workers=())
            finally:
                self._lock.release()
        newest = self._newest  # once, because another thread may replace the state
        shown = [each for each in newest.workers if each.worker in self._workers]
        return dataclasses.replace(newest, at=self._clock.wall(), workers=shown)

    def _read(self, now: float) -> None:
        journals, report = self._journals, self._newest.report
        is_ending = self._is_ending  # another thread may set the flag meanwhile
        if is_ending or now >= self._due:
            status = read_status(journals, self._clock.wall())
            # A shared disk may need seconds for the files of a thousand workers.
            self._due = now + _READING_SHARE * (self._clock.monotonic() - now)
            self._newest = dataclasses.replace(status, report=report)
            if journals.reads_chief:
                self._name_slow(status, now)
        if journals.keeps_all and (is_ending or now >= self._report_due):
            report = build_report(journals.workers, journals.supervisors)
            self._newest = dataclasses.replace(self._newest, report=report)
            took = self._clock.monotonic() - now
            self._report_due = now + max(_REPORTS_EVERY, _SHARE * took)

    def _name_slow(self, status: RunStatus, now: float) -> None:
        """Calls `on_slow` for the slow workers that were not slow for long."""
        hosts = {each.worker: each.host for each in status.workers}
        for worker, slowdown in status.slow.items():
            named = worker, hosts[worker]
            if now - self._slow_at.get(named, -math.inf) >= _NAMES_AGAIN:
                self._on_slow(*named, slowdown, status.slow_by[worker])
            self._slow_at[named] = now


@contextlib.contextmanager
def shown(
    options: RunOptions,
    clock: Clock,
    line: StatusLine | None,
    reporter: Reporter,
) -> Iterator[None]:
    """Context manager: shows the state of the run, and publishes metrics.

    The state is shown in the status line of the terminal. The metrics are served over
    HTTP, and written to a file, if the user has requested this. A slow worker is
    reported as `LiveStatus` describes.

    Args:
        options: options of the run. (The journal's directory should exist; until it
            exists, the state is empty.)
        clock: time source.
        line: status line on the terminal; None without a terminal.
        reporter: reports a slow worker, and that the metrics file cannot be written.

    Raises:
        ConfigurationError: the metrics cannot be served or written.
    """
    first = options.first_worker
    own = () if first is None else range(first, first + options.workers)
    address, file = options.metrics_address, options.metrics_file
    if 0 in own:
        # One supervisor adds up the time of all workers, and compares the workers.
        keeps_all = bool(line or address or file)
        journals = JournalTailer(options.journal_dir, keeps_all=keeps_all)
    else:
        journals = JournalTailer(options.journal_dir, own, options.journal_path.name)
    live = LiveStatus(journals, own, clock, reporter.slow_worker)
    with contextlib.ExitStack() as ends:
        if address is not None or file is not None:
            name = options.checkpoint_dir or str(options.journal_dir)
            collected = metrics.registry(name, live.look)
            if address is not None:
                ends.enter_context(metrics.served(*address, collected))
            if file is not None:
                ends.enter_context(_written(file, collected, reporter.metrics_lost))
        if line is not None:
            ends.enter_context(_drawn(line, live.look))
        if journals.reads_chief and _has_several_workers(options):
            compared = _repeated("tfpreempt-compare", _REPORTS_EVERY, live.look)
            ends.enter_context(compared)
        # At the end, the last write of the metrics reads all records again.
        ends.callback(live.end)
        yield


def _has_several_workers(options: RunOptions) -> bool:
    """Returns whether the run has several workers, here or on several machines."""
    cluster = cluster_from_environment(options.environment)
    return options.workers > 1 or cluster.num_workers > 1


@contextlib.contextmanager
def _written(
    path: Path, collected: CollectorRegistry, lost: Callable[[Path, OSError], None]
) -> Iterator[None]:
    """Context manager: writes the metrics to a file repeatedly, and at the end.

    The file is replaced atomically, so a reader never sees incomplete metrics. The
    arguments are the file, the metrics, and `lost` of `shown`.
    """
    from prometheus_client import generate_latest

    try:
        replace(str(path), generate_latest(collected))
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write --metrics-file {str(path)!r} ({error.strerror}). Name a "
            "file in an existing, writable directory."
        ) from error

    def write() -> None:
        try:
            replace(str(path), generate_latest(collected))
        except OSError as error:
            lost(path, error)

    with _repeated("tfpreempt-metrics", _WRITES_EVERY, write, write):
        yield


@contextlib.contextmanager
def _drawn(line: StatusLine, look: Callable[[], RunStatus]) -> Iterator[None]:
    """Context manager: shows the state of the run in the status line."""
    from tfpreempt.cli.status.text import one_line

    def draw() -> None:
        status = look()
        if status.workers:
            line.show(one_line(status))

    with _repeated("tfpreempt-line", _LOOKS_EVERY, draw, lambda: line.show("")):
        yield


@contextlib.contextmanager
def _repeated(
    name: str,
    seconds: float,
    do: Callable[[], object],
    at_last: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Context manager: calls `do` repeatedly in a thread, and `at_last` at the end.

    At the end, the caller waits at most `_JOIN_SECONDS` for the thread, because output
    may block.

    Args:
        name: name of the thread.
        seconds: seconds between two calls.
        do: function that the thread calls repeatedly.
        at_last: function that the thread calls at the end.
    """

    def run() -> None:
        while not thread.stop_event.wait(seconds):
            do()
        at_last()

    thread = ManagedThread(name, run)
    thread.start()
    try:
        yield
    finally:
        thread.stop_event.set()
        thread.join(_JOIN_SECONDS)
