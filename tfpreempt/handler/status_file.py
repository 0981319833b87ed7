"""The status file of a worker, `journal/worker-<i>.status`.

The journal is an append-only record of events, and records nothing during uneventful
steps. The status file holds the current state (step, rate, activity). A background
thread overwrites the file every few seconds, so the file does not slow down training
steps.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.core.clock import Clock
from tfpreempt.core.compat import StrEnum
from tfpreempt.core.journal import open_file
from tfpreempt.core.record_validation import validate_types
from tfpreempt.core.threads import ManagedThread

log = logging.getLogger(__name__)

REPORT_INTERVAL = 5.0
"""Seconds between reports; a new activity or a notice is reported within 1 s."""

_LOOKS_EVERY = 1.0  # seconds between two samples of the status
_JOIN_SECONDS = 1.0  # longest wait for the thread's last write: a disk may hang
_WINDOW_SECONDS = 60.0  # the rate is the mean of the last minute
_MOST_BYTES = 1 << 16  # read limit of a status file
_KINDS = {
    "at": "time",
    "host": "text",
    "doing": "text",
    "upload": "object?",
    **dict.fromkeys(("worker", "num_workers", "pid", "step"), "count"),
    **dict.fromkeys(("steps_per_second", "stepped_at"), "number?"),
    **dict.fromkeys(("noticed_at", "deadline"), "number?"),
}
_UPLOAD_KINDS = {
    "uri": "text",
    "is_complete": "flag",
    "last_error": "text?",
    **dict.fromkeys(("latest_step", "mirrored_step", "uploading"), "count?"),
    **dict.fromkeys(("pending", "error_count", "skipped"), "count"),
    **dict.fromkeys(("sent_bytes", "total_bytes"), "count"),
}


class WorkerActivity(StrEnum):
    """Activity of a worker, from its first boundary on."""

    TRAINING = "training"
    SAVING = "saving"  # training waits for a save
    WAITING = "waiting"  # waits for other workers, at a boundary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The contents of a worker's status file.

    Times are wall-clock seconds of the worker's machine.

    Attributes:
        at: time of the report.
        worker: index of the worker.
        num_workers: number of workers.
        host: name of the machine.
        pid: process id.
        doing: activity of the main thread.
        step: number of completed steps, over all restarts.
        steps_per_second: rate of the last minute; None until `step` has increased.
        stepped_at: time at which the reporting thread first saw the value of `step`.
        noticed_at: arrival time of the notice being handled; None without a notice.
        deadline: end of the grace period; None if unknown.
        upload: state of the mirror; None without a mirror.
    """

    at: float
    worker: int
    num_workers: int
    host: str
    pid: int
    doing: WorkerActivity
    step: int
    steps_per_second: float | None = None
    stepped_at: float | None = None
    noticed_at: float | None = None
    deadline: float | None = None
    upload: MirrorStatus | None = None


def status_path(journal: Path, worker: int) -> Path:
    """Returns the path of a worker's status file, in the directory of its journal."""
    return journal / f"worker-{worker}.status"


def read_worker_status(path: Path) -> WorkerStatus | None:
    """Reads the status file of a worker.

    Returns:
        The status; None if the file cannot be read, has another version, or is being
        written at the moment.
    """
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError:
        return None
    given, _, text = data.rstrip(b"\n").partition(b" ")
    if given != b"%08x" % zlib.crc32(text):
        return None
    try:
        values: dict[str, Any] = json.loads(text)
        if not validate_types(values, _KINDS):
            return None
        if (upload := values["upload"]) is not None:
            if not validate_types(upload, _UPLOAD_KINDS):
                return None
            values["upload"] = MirrorStatus(**upload)
        return WorkerStatus(**{**values, "doing": WorkerActivity(values["doing"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


class StepRate:
    """Computes the steps per second of the last minute; not thread-safe."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    @property
    def stepped_at(self) -> float:
        """Time at which the newest step was first seen, in monotonic seconds."""
        return self._seen[-1][0]

    def see(self, now: float, step: int) -> float | None:
        """Adds a sample, and returns the rate.

        During a step that takes longer than the steps before, the rate decreases.

        Args:
            now: monotonic seconds.
            step: number of completed steps.

        Returns:
            Steps per second; None until the number of steps has increased.
        """
        seen = self._seen
        if not seen or step != seen[-1][1]:
            seen.append((now, step))
        while len(seen) > 2 and seen[1][0] <= now - _WINDOW_SECONDS:
            seen.popleft()
        (began, first), (ended, last) = seen[0], seen[-1]
        if began == ended:
            return None
        return min((last - first) / (ended - began), (last - first + 1) / (now - began))


class StatusWriter:
    """Writes the status file on a thread, until `stop` is called.

    The thread also ends when `look` returns None. Only the first write creates the
    file: a later write could create the file in a mount point whose disk was unmounted.
    The file is overwritten in place, not replaced by a renamed file, so a program that
    copies the directory always finds the file.

    Args:
        path: path of the file.
        clock: time source for the steps per second.
        look: function that returns the current status, without the rate; None if the
            run no longer exists. Called on the thread.
    """

    def __init__(
        self, path: Path, clock: Clock, look: Callable[[], WorkerStatus | None]
    ) -> None:
        self._path = path
        self._clock = clock
        self._look = look
        self._is_made = False
        self._has_warned = False
        self._last: WorkerStatus | None = None  # the newest report
        self._thread = ManagedThread("tfpreempt-now", self._run)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread without waiting for the disk; may be called on any thread."""
        self._thread.stop_event.set()

    def write_upload(self, upload: MirrorStatus | None) -> None:
        """Writes the last report again, with a newer state of the mirror.

        Called after `stop`. The time of the report does not change: a report after the
        recorded exit would mean that the worker still runs.

        Args:
            upload: last state of the mirror; None without a mirror.
        """
        has_ended, last = self._thread.join(_JOIN_SECONDS), self._last
        if has_ended and last is not None and last.upload != upload:
            self._write(dataclasses.replace(last, upload=upload))

    def _run(self) -> None:
        rate, reported, due = StepRate(), None, -math.inf
        while (now := self._look()) is not None:
            seconds = self._clock.monotonic()
            now = dataclasses.replace(
                now,
                steps_per_second=rate.see(seconds, now.step),
                stepped_at=now.at - (seconds - rate.stepped_at),
            )
            what = now.doing, now.noticed_at is None, now.deadline is None
            if seconds >= due or what != reported:
                reported, due, self._last = what, seconds + REPORT_INTERVAL, now
                self._write(now)
            if self._thread.stop_event.wait(_LOOKS_EVERY):
                return

    def _write(self, now: WorkerStatus) -> None:
        data = _pack(now)
        try:
            flags = os.O_WRONLY | (0 if self._is_made else os.O_CREAT)
            # Even after an error, a later write must not create the file.
            self._is_made = True
            descriptor = open_file(self._path, flags)
            try:
                if os.pwrite(descriptor, data, 0) != len(data):
                    raise OSError("only a part was written")
                os.ftruncate(descriptor, len(data))
            finally:
                os.close(descriptor)  # on NFS, other machines see the data from here on
        except OSError as error:
            if not self._has_warned and not self._thread.stop_event.is_set():
                self._has_warned = True
                log.warning(
                    "cannot write the status file %s (%s). Training continues; "
                    "`tfpreempt status` shows the last known state. Make room or "
                    "check the directory's permissions.",
                    self._path,
                    error,
                )


def _pack(now: WorkerStatus) -> bytes:
    text = json.dumps(dataclasses.asdict(now)).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)
