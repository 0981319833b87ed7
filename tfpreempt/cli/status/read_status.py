"""Reads the current state of a run from its journals and status files."""

from __future__ import annotations

import dataclasses
import threading

from tfpreempt.cli.journals.locate import commits_in
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.status.run_status import (
    ReportedState,
    RunStatus,
    Worker,
    build_status,
)
from tfpreempt.core.clock import SystemClock
from tfpreempt.handler.status_file import REPORT_INTERVAL

LOOKS_AGAIN = REPORT_INTERVAL + 2
"""Seconds after which the status of a worker that seems silent is read again: the clock
of the worker's machine may be wrong."""

# A worker that seems silent for longer is silent: no clocks differ by so many seconds.
_CLOCKS_DIFFER = 600.0


def read_status(journals: JournalTailer, at: float) -> RunStatus:
    """Reads new records, and returns the state of the run.

    Only one thread at a time may call the function with the same journals.

    Args:
        journals: journals of the run.
        at: current time in seconds since the epoch.

    Raises:
        OSError: the directory of the journals cannot be read.
    """
    journals.read_on(at)
    status = build_status(at, journals.workers, journals.supervisors, journals.reports)
    # If no worker has a journal, look for commits: a program that saves States without
    # a handler makes commits, but writes no journal. Do not look if the chief's journal
    # is not among the journals to read, as it may exist. A journal may also be written
    # later, so only a commit after the start of a worker shows that the worker trains.
    is_alone = journals.reads_chief and not journals.workers
    commits = commits_in(journals.directory.parent) if is_alone else []
    if not commits:
        return status
    newest = commits[0]
    made = newest.time if newest.saved_at is None else newest.saved_at
    return dataclasses.replace(
        status,
        workers=[_with_commit(each, newest.step, made) for each in status.workers],
        commits=len(commits),
        commit_step=newest.step,
        committed_at=made,
    )


def _with_commit(worker: Worker, step: int | None, at: float | None) -> Worker:
    """Returns the state of a worker, with TRAINING if it has committed since its start.

    Args:
        worker: state of the worker; changed only if the state is STARTING.
        step: step of the newest commit.
        at: time of the newest commit; None if unknown.
    """
    is_starting = worker.state is ReportedState.STARTING
    if not is_starting or at is None or at < (worker.since or 0.0):
        return worker
    return dataclasses.replace(worker, state=ReportedState.TRAINING, step=step)


def read_status_now(journals: JournalTailer) -> RunStatus:
    """Returns the current state of the run.

    If a worker seems silent, the function waits some seconds and reads again, because
    the clock of the worker's machine may be wrong.

    Args:
        journals: journals of the run.

    Raises:
        OSError: the directory of the journals cannot be read.
    """
    status = read_status(journals, SystemClock.wall())
    silent = [w.since or 0.0 for w in status.workers if w.state is ReportedState.SILENT]
    if any(status.at - since < _CLOCKS_DIFFER for since in silent):
        threading.Event().wait(LOOKS_AGAIN)
        status = read_status(journals, SystemClock.wall())
    return status
