"""The status file of a worker, `journal/worker-<i>.status`.

The journal is an append-only record of events, and records nothing during uneventful
steps. The status file holds the current state (step, rate, activity). A background
thread overwrites the file every few seconds, so the file does not slow down training
steps.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.checkpoint.lease import lease_record
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
_SAMPLES = 20  # samples of the main thread between two samples of the status
# Time constant of the means, in seconds and in steps: the longer of the two applies.
# Means with a shorter time constant vary too much for a comparison of workers.
_MEMORY_SECONDS, _MEMORY_STEPS = 15.0, 25
_ENOUGH = 0.6  # share of the time constant that the first samples must reach
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")
_READS_INPUT = ".gen_dataset_ops"  # module of TensorFlow that waits for the input
_MOST_BYTES = 1 << 16  # read limit of a status file
_KINDS = {
    "at": "time",
    "host": "text",
    "doing": "text",
    "upload": "object?",
    "process": "object?",
    **dict.fromkeys(("worker", "num_workers", "pid", "step"), "count"),
    **dict.fromkeys(("steps_per_second", "stepped_at"), "number?"),
    **dict.fromkeys(("noticed_at", "deadline"), "number?"),
    **dict.fromkeys(("step_seconds", "step_deviation"), "seconds?"),
    **dict.fromkeys(("own_seconds", "cpu_seconds"), "seconds?"),
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
    """Activity of a worker that has reached the boundary before its first step."""

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
        step_seconds, step_deviation: mean and standard deviation of the seconds of the
            newest steps; None if unknown.
        own_seconds, cpu_seconds: seconds of a step without waits for other workers, and
            CPU time, see `OwnTime`; None if unknown, or if the run has one worker.
        noticed_at: arrival time of the notice being handled; None without a notice.
        deadline: end of the grace period; None if unknown.
        upload: state of the mirror; None without a mirror.
        process: record with which a command on the same machine finds out whether the
            process still runs; None if unknown.
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
    step_seconds: float | None = None
    step_deviation: float | None = None
    own_seconds: float | None = None
    cpu_seconds: float | None = None
    noticed_at: float | None = None
    deadline: float | None = None
    upload: MirrorStatus | None = None
    process: lease_record.LeaseOwner | None = None


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
        if (process := values.get("process")) is not None:
            values["process"] = lease_record.from_json(json.dumps(process).encode(), "")
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


def with_step_times(status: WorkerStatus, steps: Sequence[float]) -> WorkerStatus:
    """Returns a status with the mean and the deviation of the newest step times.

    Args:
        status: status without step times.
        steps: seconds of the newest steps.
    """
    if not steps:
        return status
    mean = sum(steps) / len(steps)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in steps) / len(steps))
    return dataclasses.replace(status, step_seconds=mean, step_deviation=deviation)


def _module_of_main_thread() -> str:
    """Returns the name of the module whose code the main thread executes.

    Keeps no reference to a frame, because a frame keeps the variables of the program
    alive, such as batches and the handler.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _background_cpu() -> dict[int, float]:
    """Returns the CPU time of all Python threads but the main thread, by thread id.

    These threads save commits or read input while training continues. TensorFlow's own
    threads compute the steps; Python does not know these threads, or has a
    `_DummyThread` for them if they call a function of the program.
    """
    found = {}
    for thread in threading.enumerate():
        is_native = isinstance(thread, threading._DummyThread)
        number = thread.native_id
        if thread is not threading.main_thread() and not is_native and number:
            # The id of the thread's CPU clock on Linux, see MAKE_THREAD_CPUCLOCK.
            # pthread_getcpuclockid may crash if the thread has ended.
            with contextlib.suppress(OSError):
                found[number] = time.clock_gettime(~number << 3 | 6)
    return found


class OwnTime:
    """Measures the time of a step in which a worker does not wait for other workers.

    In a synchronous step, fast workers wait for the slowest worker inside of
    TensorFlow, so all steps take equally long. But the main thread of a slow worker is
    outside of TensorFlow more often, if its Python code or its input is slow. If its
    CPU computes slowly, the worker needs more CPU time. Other Python threads do not
    count, because a step does not wait for them, or waits in the program.

    Args:
        clock: time source.
        framework: name of the framework. JAX waits in the call of a compiled function,
            which has no frame, so no own time is counted.
    """

    def __init__(self, clock: Clock, framework: str) -> None:
        self._clock, self._sees_waits = clock, framework != "jax"
        self._random = random.Random()  # the program uses the global generator
        self._memory = math.inf  # time constant of the sums, in seconds
        # Sums of seconds, in which older seconds have less weight.
        self._total = self._own = self._cpu = 0.0

    def sample(self, stop: threading.Event, step_seconds: float) -> bool:
        """Samples the main thread for about a second; returns whether `stop` is set."""
        began, cpu, own = self._clock.monotonic(), time.process_time(), 0
        before = _background_cpu()
        for _ in range(_SAMPLES):
            # Random pauses, because equal pauses could coincide with the steps.
            if stop.wait(_LOOKS_EVERY / _SAMPLES * self._random.uniform(0.5, 1.5)):
                return True
            name = _module_of_main_thread()
            is_waiting = name.partition(".")[0] in _FRAMEWORKS
            if self._sees_waits and (not is_waiting or name.endswith(_READS_INPUT)):
                own += 1
            # Look often, because a thread that has ended has no CPU clock.
            now = _background_cpu()
            cpu += sum(used - before.get(each, 0.0) for each, used in now.items())
            before = now
        seconds = self._clock.monotonic() - began
        self._memory = max(_MEMORY_SECONDS, _MEMORY_STEPS * step_seconds)
        keep = math.exp(-seconds / self._memory)
        self._total = keep * self._total + seconds
        self._own = keep * self._own + own / _SAMPLES * seconds
        self._cpu = keep * self._cpu + max(time.process_time() - cpu, 0.0)
        return False

    def of_step(self, step_seconds: float | None) -> tuple[float | None, float | None]:
        """Returns the own seconds and the CPU seconds of a step; None for both before
        there are enough samples."""
        if step_seconds is None or self._total < _ENOUGH * self._memory:
            return None, None
        share = step_seconds / self._total
        return self._own * share, self._cpu * share


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
        framework: name of the framework that connects the workers.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        look: Callable[[], WorkerStatus | None],
        framework: str = "tensorflow",
    ) -> None:
        self._path = path
        self._own = OwnTime(clock, framework)
        self._clock = clock
        self._look = look
        self._is_made = False
        self._has_warned = False
        self._process = lease_record.this_process(0.0)
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
            own_seconds, cpu_seconds = self._own.of_step(now.step_seconds)
            now = dataclasses.replace(
                now,
                steps_per_second=rate.see(seconds, now.step),
                stepped_at=now.at - (seconds - rate.stepped_at),
                own_seconds=own_seconds,
                cpu_seconds=cpu_seconds,
                process=self._process,
            )
            what = now.doing, now.noticed_at is None, now.deadline is None
            if seconds >= due or what != reported:
                reported, due, self._last = what, seconds + REPORT_INTERVAL, now
                self._write(now)
            stop, step = self._thread.stop_event, now.step_seconds
            # An upload to S3 or Azure uses CPU time in threads that are not Python's.
            uploads = now.upload is not None and now.upload.uploading is not None
            is_training = now.doing is WorkerActivity.TRAINING and not uploads
            if now.num_workers > 1 and is_training and step is not None:
                if self._own.sample(stop, step):
                    return
            elif stop.wait(_LOOKS_EVERY):
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
