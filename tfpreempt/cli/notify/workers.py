"""Finds the running worker of a directory, to signal it and nobody else.

A process id may belong to a stranger by the time it is used: workers end, ids are
given anew, and a directory on shared storage names processes of other machines. So
each candidate is held by a pidfd first, then asked who it is, and then signalled
through the pidfd.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from tfpreempt.cli.run.cluster import read_given_task
from tfpreempt.core.journal import journal_directory, parse_record
from tfpreempt.errors import ConfigurationError, TfpreemptError

_PROC = Path("/proc")
_START_SECONDS = 10.0  # between a worker's start and its record, on a busy machine


class NothingRunsError(TfpreemptError, RuntimeError):
    """There is no running worker that a notice could be sent to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that is said to be a worker.

    Attributes:
        index: of the worker.
        pid: its process id.
        origin: what says so, for people.
        is_same: whether the process of that id is still this worker.
    """

    index: int
    pid: int
    origin: str
    is_same: Callable[[], bool]


class HeldWorker:
    """A worker that runs; its id is given to no other process. A context manager.

    Args:
        worker: who it is.
        pidfd: belongs to this object from now on.
    """

    def __init__(self, worker: Worker, pidfd: int) -> None:
        self.worker = worker
        self._pidfd = pidfd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._pidfd)

    def send(self, number: signal.Signals) -> None:
        """Signals it.

        Raises:
            NothingRunsError: it has just ended.
        """
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError as error:
            raise NothingRunsError(
                f"worker {self.worker.index}, process {self.worker.pid}, has ended "
                "just before it could be signalled. Start the job again"
            ) from error

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


def hold_worker(directory: Path, index: int) -> HeldWorker:
    """Finds a worker that runs.

    Args:
        directory: its checkpoint directory, or the one that holds its journal.
        index: of the worker.

    Raises:
        NothingRunsError: there is no such worker on this machine.
    """
    journal = journal_directory(directory)
    if not journal.is_dir():
        raise NothingRunsError(_no_journal_text(directory))
    seen: list[str] = []
    for worker in find_workers(journal, index):
        held = _hold(worker)
        if held is not None:
            return held
        seen.append(f"process {worker.pid} ({worker.origin})")
    ended = f" What is recorded has ended: {', '.join(seen)}." if seen else ""
    raise NothingRunsError(
        f"worker {index} of {directory} does not run on this machine, or belongs to "
        f"another user.{ended} {_others_text(journal)}"
    )


def find_workers(journal: Path, index: int | None = None) -> Iterator[Worker]:
    """Who is said to be that worker: by the supervisor, then by the open journal.

    Args:
        journal: the job's journal directory.
        index: of the worker; None: any.
    """
    for path in sorted(journal.glob("supervisor*.jsonl")):
        for worker in _started_by(path):
            if index in (None, worker.index):
                yield worker
    for path in sorted(journal.glob("worker-*.jsonl")):
        number = path.stem.removeprefix("worker-")
        if number.isdecimal() and index in (None, int(number)):
            yield from _writers_of(path.resolve(), int(number))


def _writers_of(file: Path, index: int) -> Iterator[Worker]:
    for pid in sorted(_holders(file)):
        yield Worker(
            index=index,
            pid=pid,
            origin=f"writes {file}",
            is_same=functools.partial(_is_holder, pid, file),
        )


def _hold(worker: Worker) -> HeldWorker | None:
    """None where the process is gone, or is another one, or another user's."""
    try:
        pidfd = os.pidfd_open(worker.pid)
    except OSError:
        return None
    held = HeldWorker(worker, pidfd)
    try:
        if worker.is_same() and not held.has_ended():
            signal.pidfd_send_signal(pidfd, 0)  # raises where that is not allowed
            return held
    except OSError:
        pass  # the same as one that is not there
    os.close(pidfd)
    return None


def _no_journal_text(directory: Path) -> str:
    text = f"{directory} has no journal, so nothing is known to run there. "
    parent = directory.absolute().parent
    if journal_directory(parent).is_dir():
        return f"{text}{parent} has one: name that"
    return (
        f"{text}Expected the checkpoint directory of a job, or the --log-dir of a "
        "`tfpreempt run` without one; start the job first, or check the path"
    )


def _others_text(journal: Path) -> str:
    """Who runs there instead, and what to do."""
    running: set[int] = set()
    for worker in find_workers(journal):
        held = _hold(worker)
        if held is not None:
            with held:
                running.add(worker.index)
    if not running:
        return (
            "No worker of that job does: it has ended, or runs elsewhere. Start it, or "
            "run this command where the worker is"
        )
    names = ", ".join(map(str, sorted(running)))
    return (
        f"Here runs, by its index: {names}. Name one of these with --worker (workers "
        "count from 0), or run this command where the worker is"
    )


# --- by the supervisor's record ------------------------------------------------------


def _started_by(path: Path) -> Iterator[Worker]:
    """Those of the newest start in a supervisor's journal that have not ended."""
    start: dict[str, Any] = {}
    ended: set[int] = set()
    for record in _records(path):
        match record.get("event"):
            case "started" | "restarted":
                start, ended = record, set()
            case "worker_ended":
                ended.add(record.get("worker", -1))
            case "left":
                start = {}
    for position, pid in enumerate(start.get("pids", ())):
        if not isinstance(pid, int) or position in ended:
            continue
        index = _index(_environment(pid), position)
        if index is not None:
            yield Worker(
                index=index,
                pid=pid,
                origin=f"started by the supervisor of {path}",
                is_same=functools.partial(_is_started, pid, start),
            )


def _is_started(pid: int, start: Mapping[str, Any]) -> bool:
    """Whether a process is what a supervisor started, by what it was given.

    Only the worker itself leads a process group; its children inherit the variables.
    """
    environment = _environment(pid)
    if os.getpgid(pid) != pid or environment.get("TFPREEMPT_SUPERVISED") != "1":
        return False
    if environment.get("TFPREEMPT_NUM_RESTARTS") != str(start.get("restart")):
        return False
    incarnation = environment.get("TFPREEMPT_INCARNATION")
    if incarnation is not None:
        return incarnation == start.get("incarnation")
    # With a TF_CONFIG from outside there is no incarnation.
    return abs(_started_at(pid) - float(start.get("wall", 0.0))) < _START_SECONDS


def _index(environment: Mapping[str, str], position: int) -> int | None:
    """The worker's index by its TF_CONFIG; by its position where it has none."""
    try:
        task = read_given_task(environment)
    except ConfigurationError:
        return position
    return position if task is None else task.worker


def _records(path: Path) -> list[dict[str, Any]]:
    parsed = map(parse_record, path.read_bytes().splitlines())
    return [record for record in parsed if record is not None]


# --- what the system knows of a process ----------------------------------------------


def _environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none where that is not ours."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    entries = raw.decode("utf-8", errors="replace").split("\0")
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, sign, value in pairs if sign}


def _started_at(pid: int) -> float:
    """When a process was started, in seconds since the epoch."""
    fields = _stat(pid)
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold anything."""
    text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _holders(file: Path) -> set[int]:
    """The processes that have a file open; of a process and its forks the first."""
    found = {pid for pid in _pids() if _has_open(pid, file)}
    return {pid for pid in found if _parent(pid) not in found}


def _is_holder(pid: int, file: Path) -> bool:
    return pid in _holders(file)


def _pids() -> Iterator[int]:
    for entry in os.scandir(_PROC):
        if entry.name.isdecimal():
            yield int(entry.name)


def _has_open(pid: int, file: Path) -> bool:
    try:
        links = os.scandir(_PROC / str(pid) / "fd")
        return any(os.readlink(link.path) == str(file) for link in links)
    except OSError:
        return False  # it has ended, or is not ours


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except (OSError, IndexError, ValueError):
        return 0
