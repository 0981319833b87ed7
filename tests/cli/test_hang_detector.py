"""Workers that come to no boundary any more: seen, shown, and started again."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run, wait_until
from tfpreempt.cli.run.hang_detector import AUTO, HangDetector, WorkerProgress
from tfpreempt.core.heartbeat import VARIABLE, Heartbeat, WorkerPhase

pytestmark = pytest.mark.timeout(60)

HOUR = 3600.0
_ROOT = str(Path(__file__).parents[2])
# `step()` is a boundary. Other code of a program does not matter.
WORKER = f"""
sys.path.insert(0, {_ROOT!r})
import threading
from tfpreempt.core import heartbeat
file = os.environ[heartbeat.VARIABLE]
steps, stage = 0, heartbeat.WorkerPhase.STEPS
heartbeat.start_heartbeat(
    lambda: heartbeat.Heartbeat(
        pid=os.getpid(), boundaries=steps, step=steps, stage=stage))
def step():
    global steps
    steps += 1
def read_data():
    never = threading.Lock()
    never.acquire()
    never.acquire()
"""


def sign(
    boundaries: int = 0,
    *,
    step: int | None = None,
    stage: WorkerPhase = WorkerPhase.STEPS,
) -> Heartbeat:
    step = boundaries if step is None else step
    return Heartbeat(pid=os.getpid(), boundaries=boundaries, step=step, stage=stage)


class Worker:
    """A worker's heartbeats, and the detector, which reads each new heartbeat."""

    def __init__(self, timeout: float) -> None:
        self.life = WorkerProgress(timeout)
        self.now = 1000.0
        self.boundaries = self.beat = 0
        self.tells(0.0, sign(stage=WorkerPhase.APART))

    def tells(self, seconds: float, told: Heartbeat) -> None:
        """After so many seconds."""
        self.now += seconds
        self.beat += 1
        self.life.see(self.now, self.beat, told)

    def steps(self, *seconds: float, stage: WorkerPhase = WorkerPhase.STEPS) -> None:
        """Boundaries, with so many seconds before each."""
        for each in seconds:
            self.boundaries += 1
            self.tells(each, sign(self.boundaries, stage=stage))

    def begin(self, *first: float) -> None:
        """The start, and the first steps."""
        self.steps(7.0, *first, stage=WorkerPhase.FIRST)
        self.steps(first[-1])

    @property
    def left(self) -> float:
        """Seconds until it is taken for hung."""
        return self.life.since + self.life.limit - self.now


# --- how long a boundary may take ----------------------------------------------------


def test_a_worker_without_a_heartbeat_is_unknown() -> None:
    assert WorkerProgress(5.0).limit == math.inf


def test_the_start_has_no_timeout() -> None:
    worker = Worker(5.0)
    for _ in range(3):
        worker.tells(2 * HOUR, sign(stage=WorkerPhase.APART))
        assert worker.life.is_exempt
        assert worker.left == HOUR


def test_a_process_that_does_not_even_beat_gets_an_hour() -> None:
    """Native code that never gives back the lock of the interpreter is in its way."""
    worker = Worker(5.0)
    worker.life.see(worker.now + 100.0, worker.beat, sign(stage=WorkerPhase.APART))
    assert worker.left == HOUR


def test_first_steps_trace_and_compile_and_get_an_hour() -> None:
    worker = Worker(5.0)
    worker.steps(1.0, stage=WorkerPhase.FIRST)
    assert worker.left == HOUR
    worker.tells(100.0, sign(1, stage=WorkerPhase.FIRST))
    assert worker.left == HOUR - 100.0
    generous = Worker(2 * HOUR)
    generous.steps(1.0, stage=WorkerPhase.FIRST)
    assert generous.left == 2 * HOUR


def test_a_number_is_the_limit_of_all_other_steps() -> None:
    worker = Worker(5.0)
    worker.begin(1.0)
    worker.steps(2.0, 3.0)
    assert worker.left == 5.0
    worker.tells(1.0, sign(worker.boundaries))
    assert worker.left == 4.0


@pytest.mark.parametrize(
    ("first", "seconds", "limit"),
    [
        (1.0, [0.1] * 50, 120.0),
        (1.0, [10.0] * 5, 200.0),
        (1.0, [10.0, 10.0, 10.0, 900.0], 200.0),  # a callback was between
        (300.0, [0.1] * 50, 600.0),  # as long as another trace may take
        (500.0, [], 1000.0),  # no step is known yet
    ],
)
def test_auto_is_a_multiple_of_the_step_time(
    first: float, seconds: list[float], limit: float
) -> None:
    worker = Worker(AUTO)
    worker.begin(first)
    worker.steps(*seconds)
    assert worker.life.limit == pytest.approx(limit)


def test_short_steps_are_seen_many_at_once() -> None:
    worker = Worker(AUTO)
    worker.begin(1.0)
    worker.tells(20.0, sign(worker.boundaries + 2))
    assert worker.life.limit == pytest.approx(20 * 10.0)


def test_a_first_step_is_known_though_many_more_are_seen_with_it() -> None:
    worker = Worker(AUTO)
    worker.steps(7.0, stage=WorkerPhase.FIRST)
    worker.tells(300.0, sign(worker.boundaries + 150))
    assert worker.life.limit == pytest.approx(600.0)


def test_auto_allows_for_data_read_again_before_a_step() -> None:
    """Such as filling a shuffle buffer at the beginning of each epoch."""
    worker = Worker(AUTO)
    worker.steps(200.0, stage=WorkerPhase.FIRST)
    worker.steps(1.0, 1.0, 1.0)
    assert worker.life.limit == pytest.approx(400.0)


def test_data_that_are_read_between_steps_count_with_them() -> None:
    worker = Worker(AUTO)
    worker.begin(1.0)
    for number in range(3, 9):
        worker.tells(1.0, sign(number, step=number - 1))
        worker.tells(100.0, sign(number, step=number))
    assert worker.life.limit == pytest.approx(20 * 101.0)
    assert worker.left == worker.life.limit - 100.0  # the boundary is the sign


def test_the_steps_of_a_fit_are_known_without_its_callbacks() -> None:
    worker = Worker(AUTO)
    worker.begin(1.0)
    for number in range(3, 9):
        worker.tells(50.0, sign(number, step=number - 1))
        worker.tells(130.0, sign(number, step=number, stage=WorkerPhase.APART))
    worker.tells(50.0, sign(9, step=8))
    assert worker.left == pytest.approx(20 * 130.0)


def test_a_validation_measures_no_step_time() -> None:
    worker = Worker(AUTO)
    worker.begin(1.0)
    worker.steps(10.0)
    for _ in range(20):
        worker.boundaries += 1
        worker.tells(0.5, sign(worker.boundaries, step=3))
    assert worker.life.limit == pytest.approx(200.0)


def test_a_long_phase_has_no_timeout_and_then_steps_have_one() -> None:
    worker = Worker(5.0)
    worker.begin(1.0)
    worker.tells(1.0, sign(worker.boundaries, stage=WorkerPhase.APART))
    worker.tells(500.0, sign(worker.boundaries, stage=WorkerPhase.APART))
    assert worker.left == HOUR
    worker.tells(1.0, sign(worker.boundaries))
    assert worker.left == 5.0


# --- of all workers ------------------------------------------------------------------


def a_process() -> subprocess.Popen[bytes]:
    """Waits until it is killed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)


class Told:
    """A watch over workers whose signs the test gives."""

    def __init__(self, workers: int) -> None:
        self.watch = HangDetector(5.0, workers)
        self.watch.begin()
        self.running = list(range(workers))
        self.now, self.beats = 1000.0, 0
        self.watch.look(self.now, self.running)

    def tell(self, worker: int, told: Heartbeat) -> None:
        path = self.watch.to_environment(worker)[VARIABLE]
        self.beats += 1
        fields = (self.beats, told.pid, told.boundaries, told.step, int(told.stage))
        data = b"".join(each.to_bytes(8, "little") for each in fields)
        Path(path).write_bytes(data)

    def look(self, seconds: float) -> float | None:
        """Returns the remaining seconds after some more seconds."""
        self.now += seconds
        due = self.watch.look(self.now, self.running)
        return None if due is None else due - self.now


def test_the_first_late_worker_sets_the_timeout_of_all() -> None:
    told = Told(2)
    told.tell(0, sign(5))
    told.tell(1, sign(5))
    assert told.look(0.5) == 5.0
    told.tell(0, sign(6))
    assert told.look(0.5) == 4.5
    told.tell(1, sign(6))
    assert told.look(0.5) == 4.5


def test_workers_may_wait_for_a_worker_in_a_long_phase() -> None:
    told = Told(2)
    told.tell(0, sign(5, stage=WorkerPhase.APART))
    told.tell(1, sign(5))
    assert told.look(0.5) == HOUR
    told.running = [1]
    assert told.look(0.5) == 4.5


@pytest.mark.slow  # starts a process
def test_a_stopped_process_is_in_no_exempt_phase() -> None:
    told = Told(1)
    with a_process() as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        told.tell(
            0, dataclasses.replace(sign(5, stage=WorkerPhase.APART), pid=process.pid)
        )
        assert told.look(0.5) == 5.0
        assert told.look(1.0) == 4.0
        process.kill()


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("stage", list(WorkerPhase))
def test_the_heartbeat_of_an_ended_process_is_ignored(stage: WorkerPhase) -> None:
    """As in `sh -c "train && export"`: the progress of the export is unknown."""
    told = Told(1)
    with a_process() as process:
        mine = dataclasses.replace(sign(5, stage=stage), pid=process.pid)
        told.tell(0, mine)
        told.look(0.5)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert told.look(0.5) is None  # nobody has waited for it yet
        told.tell(0, mine)
    assert told.look(0.5) is None
    told.tell(0, sign(5))
    assert told.look(0.5) == 5.0


@pytest.mark.slow  # starts a process
def test_the_stacks_of_a_process_outlive_it() -> None:
    watch = HangDetector(5.0, 1)
    watch.begin()
    environment = {**os.environ, **watch.to_environment(0)}
    program = "import os, sys, signal\n" + WORKER + "read_data()"
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        wait_until(lambda: watch.look(1000.0, [0]) is not None, "a sign")

        def is_shown() -> bool:
            watch.ask_for_stacks([0])
            return "in read_data" in watch.stacks()[0]

        wait_until(is_shown, "the stacks")
        process.kill()
    watch.look(1001.0, [0])
    assert "in read_data" in watch.stacks()[0]
    watch.close()


def test_a_worker_that_waits_for_a_hung_worker_is_not_hung() -> None:
    """For example, its data have ended, and it waits at the last boundary."""
    told = Told(2)
    told.tell(0, sign(5, stage=WorkerPhase.WAITS))
    told.tell(1, sign(5))
    assert told.look(0.5) == 5.0
    told.running = [0]
    assert told.look(0.5) is None


def test_one_without_a_handler_is_not_known() -> None:
    told = Told(2)
    told.tell(0, sign(5))
    assert told.look(0.5) is None


def test_time_in_which_the_supervisor_stood_still_does_not_count() -> None:
    """Otherwise a job that is suspended and resumed would count as hung."""
    told = Told(1)
    told.tell(0, sign(5))
    told.look(0.5)
    assert told.look(8 * HOUR) == 3.0


def test_a_restart_knows_nothing_of_the_start_before() -> None:
    told = Told(1)
    told.tell(0, sign(5))
    told.look(0.5)
    told.watch.begin()
    assert told.look(0.5) is None


# --- under the supervisor, with workers that are no TensorFlow ----------------------

OPTIONS = ("--hang-timeout", "2", "--kill-after", "0.5", "--workers", "2")


@pytest.mark.slow  # starts a process
def test_a_stuck_loader_is_shown_and_started_again(supervised: Run) -> None:
    """Worker 1 reads, and worker 0 waits for it."""
    program = WORKER + (
        "if restart: sys.exit()\n"
        "step()\n"
        "if me == 1: read_data()\n"
        "step()\n"
        "threading.Event().wait()"
    )
    code, _, err = supervised.run(program, *OPTIONS)
    assert code == 0
    assert re.search(r"worker 1 at step 1, behind other workers: no step for \d ", err)
    assert "in read_data" in err
    assert "restarting after a hang" in err
    assert "preemptions: 0, failures: 1" in err
    records = supervised.records()
    [hang] = [each for each in records if each["event"] == "hang"]
    assert [each["is_behind"] for each in hang["workers"]] == [False, True]
    stacks = [each["stacks"] for each in records if each["event"] == "stacks"]
    assert "in wait" in stacks[0]
    assert "in read_data" in stacks[1]
    [budget] = [r for r in records if r["event"] == "budget" and r["failures"]][:1]
    assert budget["cause"] == "hang"


@pytest.mark.slow  # starts a process
def test_a_stopped_worker_is_reported_as_stopped(supervised: Run) -> None:
    program = WORKER + (
        "if restart: sys.exit()\n"
        "step()\n"
        "while not os.path.getsize(file): pass\n"
        "tell(f'ready-{me}')\n"
        "threading.Event().wait()"
    )
    supervised.start(program, *OPTIONS)
    supervised.wait_told("ready-0")
    os.kill(int(supervised.wait_told("ready-1")), signal.SIGSTOP)
    code, _, err = supervised.finish()
    assert code == 0
    assert "worker 1 wrote no stacks" in err
    assert "process T (stopped)" in err
    assert "stack of worker 0 (all threads: " in err


@pytest.mark.slow  # starts a process
def test_hangs_have_a_budget(supervised: Run) -> None:
    program = WORKER + "read_data()"
    code, _, err = supervised.run(program, *OPTIONS, "--max-failures", "0")
    assert code == 137
    assert "outcome: limit of failures reached by hangs, exit code: 137" in err


@pytest.mark.slow  # starts a process
def test_a_slow_worker_may_finish(supervised: Run) -> None:
    """The worker first gets SIGTERM, as at a notice, and later SIGKILL."""
    program = WORKER + (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "threading.Event().wait()"
    )
    code, _, err = supervised.run(program, "--hang-timeout", "2")
    assert code == 0
    assert "workers are hung" in err
    assert "failures: 0" in err


@pytest.mark.slow  # starts a process
def test_without_the_option_no_worker_has_a_timeout(supervised: Run) -> None:
    program = f"tell('told', os.environ.get({VARIABLE!r}, 'nothing'))"
    code, _, _ = supervised.run(program, environment={VARIABLE: "/proc/1/fd/0"})
    assert code == 0
    assert supervised.wait_told("told") == "nothing"


@pytest.mark.slow  # starts a process
def test_the_heartbeat_memory_ends_with_the_supervisor(supervised: Run) -> None:
    program = f"tell('told', os.environ[{VARIABLE!r}])\nuntil_told()"
    supervised.start(program, "--hang-timeout", "auto")
    path = Path(supervised.wait_told("told"))
    assert path.exists()
    supervised.wait_told("ready-0-0")
    supervised.signal(signal.SIGTERM)
    supervised.finish()
    wait_until(lambda: not path.exists(), "the end")
