"""Reads the status files of the workers that run in this container.

The command runs beside the workers, with their clock and process ids, so it knows which
status belongs to a running process. Of the journals, it reads only the ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tfpreempt.cli.journals.records import OF_WORKERS, read_record
from tfpreempt.cli.status.run_status import SILENT_AFTER
from tfpreempt.core.clock import SystemClock, process_seconds
from tfpreempt.core.journal import open_file, segments
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    read_worker_status,
)

_TAIL_BYTES = 1 << 16  # more than the records of an exit
_CLOCK_STEP = 1.0  # seconds by which a correction of the clock may move a report


def training_workers(journal: Path, worker: int | None) -> Iterator[WorkerStatus]:
    """Yields the status of the workers of this container that train.

    A worker trains from its first step on until its exit record, and again from the
    next step on if the exit function has returned.

    Args:
        journal: directory of the run's journals; need not exist.
        worker: index of the only worker to read; None: all workers.
    """
    pattern = "worker-*.status" if worker is None else f"worker-{worker}.status"
    for path in sorted(journal.glob(pattern)):
        now = read_worker_status(path)
        if now is None or now.host != socket.gethostname():
            continue
        if (seconds := process_seconds(now.pid)) is None:
            continue
        # An earlier process may have had the same id: in a container often 1.
        is_own = now.at > SystemClock.wall() - seconds - _CLOCK_STEP
        if is_own and not _has_ended(path.with_suffix(".jsonl"), now):
            yield now


def problem(now: WorkerStatus, hang_timeout: float | None) -> str:
    """Returns the reason to restart a worker that trains; "" if there is none.

    Args:
        now: status of the worker.
        hang_timeout: longest time without a step, in seconds; None: no limit.
    """
    at = SystemClock.wall()
    silent, still = at - now.at, at - (now.stepped_at or at)
    if silent > SILENT_AFTER:
        return f"worker {now.worker} has not reported for {silent:.0f} s"
    if hang_timeout and still > hang_timeout and now.doing is WorkerActivity.TRAINING:
        return f"worker {now.worker} has made no step for {still:.0f} s"
    return ""


def _has_ended(path: Path, now: WorkerStatus) -> bool:
    """Returns whether the newest start in a journal has ended by an exit record.

    Args:
        path: path of the journal's first file.
        now: status of the worker.
    """
    has_ended = False
    for each in segments(path)[-2:]:  # the newest file may have no record yet
        with (
            contextlib.suppress(OSError),
            open(open_file(each, os.O_RDONLY), "rb") as file,
        ):
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError):  # an incomplete or corrupt line
                    record = read_record(line, OF_WORKERS)
                    if record is not None and record.event in ("restored", "exit"):
                        # A later report alone does not mean that the worker trains:
                        # the worker reports until its uploads are complete.
                        has_ended = record.event == "exit" and (
                            record.wall >= now.at or record["step"] >= now.step
                        )
    return has_ended
