"""Shows the state of a run: as a line on a terminal, and as metrics.

Separate threads read the state from the files that `tfpreempt status` reads. So this
needs no answer of a worker, and neither training nor the supervisor waits for output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.run.console import StatusLine
from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.status import metrics
from tfpreempt.cli.status.read_status import read_status
from tfpreempt.cli.status.run_status import RunStatus
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import ManagedThread
from tfpreempt.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LOOKS_EVERY = 1.0
_WRITES_EVERY = 10.0
_JOIN_SECONDS = 5.0  # timeout at the end, because a disk may hang


@contextlib.contextmanager
def shown(
    options: RunOptions,
    clock: Clock,
    line: StatusLine | None,
    lost: Callable[[Path, OSError], None],
) -> Iterator[None]:
    """Context manager: shows the state of the run, and publishes metrics.

    The state is shown in the status line of the terminal. The metrics are served over
    HTTP, and written to a file, if the user has requested this.

    Args:
        options: options of the run. (The journal's directory should exist; until it
            exists, the state is empty.)
        clock: time source.
        line: status line on the terminal; None without a terminal.
        lost: function called with the path of the metrics file and the error, each time
            that the file cannot be written.

    Raises:
        ConfigurationError: the metrics cannot be served or written.
    """
    first = options.first_worker
    own = () if first is None else range(first, first + options.workers)
    journals = JournalTailer(options.journal_dir, own, options.journal_path.name)

    def look() -> RunStatus:
        try:
            return read_status(journals, clock.wall())
        except OSError:
            return RunStatus(at=clock.wall(), workers=())

    with contextlib.ExitStack() as ends:
        address, file = options.metrics_address, options.metrics_file
        if address is not None or file is not None:
            name = options.checkpoint_dir or str(options.journal_dir)
            collected = metrics.registry(name, look)
            if address is not None:
                ends.enter_context(metrics.served(*address, collected))
            if file is not None:
                ends.enter_context(_written(file, collected, lost))
        if line is not None:
            ends.enter_context(_drawn(line, look))
        yield


@contextlib.contextmanager
def _written(
    path: Path, collected: CollectorRegistry, lost: Callable[[Path, OSError], None]
) -> Iterator[None]:
    """Context manager: writes the metrics to a file repeatedly, and at the end.

    The file is replaced atomically, so a reader never sees incomplete metrics. The
    arguments are the file, the metrics, and `lost` of `shown`.
    """
    from prometheus_client import write_to_textfile

    try:
        write_to_textfile(str(path), collected)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write --metrics-file {str(path)!r} ({error.strerror}). Name a "
            "file in an existing, writable directory."
        ) from error

    def write() -> None:
        try:
            write_to_textfile(str(path), collected)
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
    name: str, seconds: float, do: Callable[[], None], at_last: Callable[[], None]
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
