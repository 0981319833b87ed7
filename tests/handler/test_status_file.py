"""The status file of a worker: when and where it is written, and where not."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import math
import os
import random
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.cli.conftest import wait_until
from tests.fakes.clock import FakeClock
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.coordination.step_flag import StepFlag
from tfpreempt.handler import status_file
from tfpreempt.handler.status_file import (
    OwnTime,
    StatusWriter,
    StepRate,
    WorkerActivity,
    WorkerStatus,
    read_worker_status,
    status_path,
    with_step_times,
)

pytestmark = pytest.mark.timeout(60)


class Worker:
    """A worker with a status file, and its current status."""

    def __init__(self, journal: Path) -> None:
        self.path = status_path(journal, 0)
        self.clock = FakeClock()
        self.looks = 0
        self.says: WorkerStatus | None = WorkerStatus(
            at=1e9,
            worker=0,
            num_workers=1,
            host="h",
            pid=1,
            doing=WorkerActivity.TRAINING,
            step=1,
        )

    def look(self) -> WorkerStatus | None:
        self.looks += 1
        return self.says

    def say(self, **values: object) -> None:
        assert self.says is not None
        self.says = dataclasses.replace(self.says, **values)  # type: ignore[arg-type]  # its fields

    @contextlib.contextmanager
    def telling(self) -> Iterator[StatusWriter]:
        told = StatusWriter(self.path, self.clock, self.look)
        try:
            yield told
        finally:
            told.stop()

    def wait_looks(self, count: int = 3) -> None:
        end = self.looks + count
        wait_until(lambda: self.looks >= end, "looks")

    def wait_step(self, step: int) -> None:
        def is_told() -> bool:
            told = read_worker_status(self.path)
            return told is not None and told.step == step

        wait_until(is_told, f"step {step}")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(status_file, "_LOOKS_EVERY", 0.002)
    return Worker(tmp_path)


def test_the_status_is_written_every_few_seconds_only(worker: Worker) -> None:
    with worker.telling():
        worker.wait_step(1)
        worker.say(step=2)
        worker.wait_looks()
        told = read_worker_status(worker.path)
        assert told is not None
        assert (told.step, told.stepped_at) == (1, told.at)
        worker.clock.advance(status_file.REPORT_INTERVAL)
        worker.wait_step(2)


@pytest.mark.parametrize(
    "change",
    [{"doing": WorkerActivity.SAVING}, {"noticed_at": 1e9}, {"deadline": 1e9}],
    ids=str,
)
def test_a_change_of_the_activity_is_written_at_once(
    worker: Worker, change: dict[str, object]
) -> None:
    with worker.telling():
        worker.wait_step(1)
        worker.say(step=2, **change)
        worker.wait_step(2)


@pytest.mark.parametrize("uploading", [None, 3])
def test_nothing_is_measured_during_an_upload(
    worker: Worker, uploading: int | None
) -> None:
    """The threads of an upload to S3 or Azure are no Python threads."""
    upload = MirrorStatus(uri="s3://bucket/run", uploading=uploading)
    worker.say(num_workers=2, step_seconds=0.1, upload=upload)
    with worker.telling():
        for _ in range(20):
            worker.wait_looks(1)
            worker.clock.advance(status_file.REPORT_INTERVAL)
    told = read_worker_status(worker.path)
    assert told is not None
    assert (told.cpu_seconds is None) == (uploading is not None)


def test_every_field_is_read_back(worker: Worker) -> None:
    upload = MirrorStatus(
        uri="gs://bucket/run", latest_step=3, sent_bytes=7, last_error="503 é"
    )
    worker.say(noticed_at=1.5, deadline=2.5, upload=upload, host="h" * 200)
    with worker.telling():
        worker.wait_step(1)
    told = read_worker_status(worker.path)
    assert told is not None
    assert told.process is not None
    assert told.process.pid == os.getpid()
    worker.say(stepped_at=1e9, process=told.process)
    assert told == worker.says


def test_the_last_report_has_an_upload_that_was_complete_since_and_its_own_time(
    worker: Worker,
) -> None:
    with worker.telling() as telling:
        worker.wait_step(1)
    worker.say(step=2, at=2e9)
    uploaded = MirrorStatus(uri="gs://bucket/run", latest_step=2, mirrored_step=2)
    telling.write_upload(uploaded)
    told = read_worker_status(worker.path)
    assert told is not None
    assert (told.upload, told.step, told.at) == (uploaded, 1, 1e9)


def test_less_leaves_nothing_of_more(worker: Worker) -> None:
    worker.say(host="h" * 200)
    with worker.telling():
        worker.wait_step(1)
        worker.say(host="h", doing=WorkerActivity.WAITING, step=2)
        worker.wait_step(2)
    assert len(worker.path.read_bytes().splitlines()) == 1


def test_the_directory_can_be_removed_and_is_not_made_again(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with worker.telling():
        worker.wait_step(1)
        shutil.rmtree(worker.path.parent)
        worker.path.parent.mkdir()
        for _ in range(3):
            worker.clock.advance(status_file.REPORT_INTERVAL)
            worker.wait_looks()
    assert list(worker.path.parent.iterdir()) == []
    assert caplog.text.count("Training continues") == 1
    assert str(worker.path) in caplog.text


def test_a_full_disk_is_logged_once_and_later_writes_succeed(
    worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    with worker.telling():
        worker.wait_step(1)
        with monkeypatch.context() as disk:
            disk.setattr(os, "pwrite", full)
            for _ in range(3):
                worker.clock.advance(status_file.REPORT_INTERVAL)
                worker.wait_looks()
        worker.say(step=2)
        worker.clock.advance(status_file.REPORT_INTERVAL)
        worker.wait_step(2)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text


def test_a_link_is_not_followed(worker: Worker, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.write_text("theirs")
    worker.path.symlink_to(others)
    with worker.telling():
        worker.wait_looks()
    assert others.read_text() == "theirs"
    assert read_worker_status(worker.path) is None


def test_no_status_is_written_for_a_closed_run(worker: Worker) -> None:
    with worker.telling():
        worker.wait_step(1)
        worker.says = None
        worker.wait_looks(1)
        looks = worker.looks
    assert worker.looks == looks


@pytest.mark.parametrize("cut", [0, 1, 9, 40, -2])
def test_an_incomplete_status_file_is_ignored(worker: Worker, cut: int) -> None:
    with worker.telling():
        worker.wait_step(1)
    worker.path.write_bytes(worker.path.read_bytes()[:cut])
    assert read_worker_status(worker.path) is None


def test_one_digit_of_another_is_nothing(worker: Worker) -> None:
    with worker.telling():
        worker.wait_step(1)
    whole = worker.path.read_bytes()
    worker.path.write_bytes(whole.replace(b'"step": 1', b'"step": 7'))
    assert read_worker_status(worker.path) is None


@pytest.mark.parametrize(
    "values",
    [
        {"step": "7"},
        {"at": math.nan},
        {"deadline": math.inf},
        {"at": -1e300},
        {"at": 1e14},
        {"stepped_at": 1e300},
        {"step": 1 << 400},
        {"upload": {"uri": "gs://b/r", "total_bytes": 1 << 4000}},
        {"host": None},
        {"doing": "sleeping"},
        {"upload": {"uri": 3}},
        {"upload": {"uri": "gs://b/r", "sent_bytes": "3"}},
        {"upload": []},
        {"more": 1},
    ],
    ids=lambda values: str(values)[:60],
)
def test_a_status_that_no_worker_writes_is_ignored(
    worker: Worker, values: dict[str, object]
) -> None:
    assert worker.says is not None
    text = json.dumps(dataclasses.asdict(worker.says) | values).encode()
    worker.path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    assert read_worker_status(worker.path) is None


class Loop(threading.Event):
    """A synchronous loop on a fake clock: time passes while the sampler waits.

    In a step the main thread is in the program for `own` seconds, and then waits in
    TensorFlow.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step: float, own: float
    ) -> None:
        super().__init__()
        self.clock, self.step, self.own = FakeClock(), step, own
        self.measured = OwnTime(self.clock, "tensorflow")
        self.measured._random.seed(1)
        self.program, self.wait_in = frame_of("train"), frame_of("tensorflow.execute")
        monkeypatch.setattr(sys, "_current_frames", self.frames)
        # Without the threads that earlier tests left: an hour of the fake clock reads
        # the CPU time of each thread 72,000 times.
        every, earlier = threading.enumerate, set(threading.enumerate())
        monkeypatch.setattr(
            threading, "enumerate", lambda: [t for t in every() if t not in earlier]
        )

    def frames(self) -> dict[int, FrameType]:
        is_own = self.clock.monotonic() % self.step < self.own
        main = threading.main_thread().ident or 0
        return {main: self.program if is_own else self.wait_in}

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.advance(timeout or 0.0)
        return False

    def own_seconds(self) -> float | None:
        """Own time of a step, after another second."""
        assert not self.measured.sample(self, self.step)
        return self.measured.of_step(self.step)[0]


def frame_of(module: str) -> FrameType:
    """A frame of a function in a module of this name."""
    scope: dict[str, Any] = {"__name__": module}
    exec("def wait():\n    yield", scope)
    running = scope["wait"]()
    next(running)
    frame: FrameType = running.gi_frame
    return frame


class TestOwnTime:
    @pytest.mark.parametrize("step", [0.01, 0.05, 0.1, 0.7, 5.0])
    def test_it_is_the_time_outside_of_the_framework(
        self, monkeypatch: pytest.MonkeyPatch, step: float
    ) -> None:
        loop = Loop(monkeypatch, step, own=0.3 * step)
        seen = [loop.own_seconds() for _ in range(300)]
        assert seen[5] is None  # too few samples
        assert seen[-1] == pytest.approx(0.3 * step, abs=0.1 * step)

    @pytest.mark.parametrize("step", [0.3, 1.0, 5.0, 30.0])
    def test_a_worker_that_becomes_slow_is_seen_within_100_steps(
        self, monkeypatch: pytest.MonkeyPatch, step: float
    ) -> None:
        loop = Loop(monkeypatch, step, own=0.2 * step)
        for _ in range(int(100 * step) + 60):
            own = loop.own_seconds()
        assert own is not None
        slow_step = 1.3 * step
        loop.step, loop.own = slow_step, 0.5 * step
        for _ in range(int(100 * slow_step - status_file.REPORT_INTERVAL)):
            own = loop.own_seconds()
        assert own is not None
        assert slow_step / (slow_step - (own - 0.2 * step)) >= 1.2

    def test_equal_workers_differ_little_for_an_hour(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker is named from 0.17 of the step time on."""
        loop = Loop(monkeypatch, 0.05, own=0.025)
        other, differences = Loop(monkeypatch, 0.05, own=0.025), []
        other.measured._random.seed(2)
        for _ in range(3600):
            monkeypatch.setattr(sys, "_current_frames", loop.frames)
            mine = loop.own_seconds()
            monkeypatch.setattr(sys, "_current_frames", other.frames)
            others = other.own_seconds()
            if mine is not None and others is not None:
                differences.append(abs(mine - others) / loop.step)
        assert len(differences) > 3500
        assert max(differences) < 0.14

    def test_a_wait_for_input_is_own_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop = Loop(monkeypatch, 0.1, own=0.0)
        loop.wait_in = frame_of("tensorflow.python.ops.gen_dataset_ops")
        for _ in range(60):
            own = loop.own_seconds()
        assert own == pytest.approx(0.1)

    def test_no_own_time_is_counted_on_jax(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call of a compiled function waits in the frame of the program."""
        loop = Loop(monkeypatch, 0.1, own=0.1)
        loop.measured = OwnTime(loop.clock, "jax")
        assert [loop.own_seconds() for _ in range(60)][-1] == 0.0

    def test_the_generator_of_the_program_is_left_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = random.getstate()
        Loop(monkeypatch, 0.1, own=0.1).own_seconds()
        assert random.getstate() == before

    def test_no_frame_of_the_program_is_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A frame would keep a batch in memory that the program no longer needs."""
        loop = Loop(monkeypatch, 0.1, own=0.1)
        before = sys.getrefcount(loop.program)
        counts = []

        def wait(timeout: float | None = None) -> bool:
            counts.append(sys.getrefcount(loop.program))
            return False

        loop.wait = wait  # type: ignore[method-assign]  # the pauses between samples
        loop.own_seconds()
        assert set(counts) == {before}

    @pytest.mark.parametrize("is_python", [True, False])
    def test_background_threads_of_python_use_no_cpu_time_of_a_step(
        self, monkeypatch: pytest.MonkeyPatch, is_python: bool
    ) -> None:
        """Such as an upload. Threads of TensorFlow compute the step, and count."""
        loop = Loop(monkeypatch, 0.1, own=0.0)
        stop, has_ended = threading.Event(), threading.Event()

        def upload() -> None:
            while not stop.is_set():
                hashlib.sha256(bytes(1 << 16))
            has_ended.set()

        def wait(timeout: float | None = None) -> bool:
            has_ended.wait(0.001)
            return Loop.wait(loop, timeout)

        loop.wait = wait  # type: ignore[method-assign]  # the pauses between samples
        if is_python:
            threading.Thread(target=upload).start()
        else:
            _thread.start_new_thread(upload, ())
        used = time.process_time()
        for _ in range(20):
            loop.own_seconds()
        used = (time.process_time() - used) / 20  # in a second of the fake clock
        stop.set()
        assert has_ended.wait(30.0)
        _, cpu = loop.measured.of_step(1.0)
        assert cpu is not None
        assert (cpu < 0.5 * used) == is_python

    def test_the_end_is_not_waited_for(self) -> None:
        stop = threading.Event()
        stop.set()
        assert OwnTime(FakeClock(), "tensorflow").sample(stop, 1.0)

    def test_the_mean_and_the_deviation_of_the_newest_steps(self) -> None:
        status = Worker(Path()).says
        assert status is not None
        assert with_step_times(status, []) == status
        measured = with_step_times(status, [1.0, 3.0])
        assert (measured.step_seconds, measured.step_deviation) == (2.0, 1.0)

    def test_a_step_ends_during_a_garbage_collection_of_the_thread(self) -> None:
        flag = StepFlag()
        ends = flag.ends
        ends.extend(map(float, range(61)))
        kept = list[set[int]]()

        def step(*_: object) -> None:
            ends.append(ends[-1] + 1)  # as the main thread does
            kept.append(set())  # so that the next container starts a collection

        thresholds = gc.get_threshold()
        gc.callbacks.append(step)
        try:
            gc.set_threshold(1)  # at each new container
            measured = flag.step_times()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(step)
        assert measured


class TestStepRate:
    def test_steps_of_the_last_minute(self) -> None:
        rate = StepRate()
        assert rate.see(0.0, 5) is None
        for second in range(1, 200):
            slow = rate.see(float(second), 5 + second)
        assert slow == pytest.approx(1.0)
        for second in range(200, 262):
            fast = rate.see(float(second), 204 + 10 * (second - 199))
        assert fast == pytest.approx(10.0)

    def test_long_steps(self) -> None:
        rate = StepRate()
        seen = [rate.see(float(second), second // 90) for second in range(1, 400)]
        assert seen[88] is None  # none was seen to end yet
        assert seen[-1] == pytest.approx(1 / 90)

    def test_the_rate_decreases_during_a_long_step(self) -> None:
        rate = StepRate()
        for second in range(10):
            rate.see(float(second), second)
        assert rate.see(10.0, 9) == pytest.approx(1.0)
        assert rate.see(19.0, 9) == pytest.approx(10 / 19)
        assert (rate.see(100.0, 9) or 1.0) < 0.05
