"""Real workers whose checkpoint directory is a bucket, and readers of that bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs import GcsServer
from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    PROGRAMS,
    RESTART,
    Cluster,
    Place,
    Zygote,
    wait_until,
    worker_environment,
)
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.core.scratch import VARIABLE, scratch_directory
from tfpreempt.storage.open_store import open_store

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

URL = "gs://bucket/run"


@pytest.fixture
def server(here: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    with GcsServer() as server:
        here.checkpoints = URL  # type: ignore[assignment]
        monkeypatch.setenv(VARIABLE, str(here.path / "scratch"))
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


def start(here: Place, strategy: str, world: int, *more: object) -> Cluster:
    """Starts on the machine of this process."""
    return here.start(
        "train.py",
        "--strategy",
        strategy,
        *more,
        world=world,
        tf_config=strategy == "mwms",
        env={VARIABLE: os.environ[VARIABLE]},
    )


def lose_machines(here: Place) -> None:
    for scratch in here.path.glob("scratch*"):
        shutil.rmtree(scratch)


def steps() -> list[int | None]:
    """Returns the steps of the commits in the bucket, newest first."""
    return [each.step for each in catalog.commits(open_store(URL), pytest.fail)]


@pytest.mark.parametrize(
    ("strategy", "world", "more"), [("none", 1, ()), ("mwms", 2, ("--own-disk",))]
)
def test_machines_that_are_lost(
    here: Place,
    server: GcsServer,
    reference: Reference,
    strategy: str,
    world: int,
    more: tuple[str, ...],
) -> None:
    """With and without a notice; the results equal those of an undisturbed run."""
    here.hold()
    first = start(here, strategy, world, *more, "--hold-at", 3)
    for worker in first:
        worker.wait_line("holding")
    here.slow_down()
    first[0].send(signal.SIGTERM)
    first[0].wait_text("notice from")
    here.release()
    first.expect(*[RESTART] * world)
    here.speed_up()
    [committed] = steps()  # one step more where a busy machine tells a worker late
    assert committed in range(4, 9)
    lose_machines(here)
    here.hold()
    saves = ("--save-freq", 2, "--sync-saves")
    second = start(here, strategy, world, *more, "--hold-at", 9, *saves)
    for worker in second:
        worker.wait_line("holding")
    wait_until(lambda: steps()[:1] == [8], "the bucket has step 8")
    for worker in second:
        worker.send(signal.SIGKILL)
    second.wait()
    here.release()
    lose_machines(here)
    last = start(here, strategy, world, *more)
    last.expect(*[0] * world)
    assert [worker.lines("restored") for worker in last] == [[["8", "8"]]] * world
    assert last.results() == reference(strategy, world)
    assert steps() == [12, 8]


def test_a_kill_before_the_upload_costs_nothing_on_the_same_machine(
    here: Place, server: GcsServer, reference: Reference
) -> None:
    here.hold()
    first = start(here, "none", 1, "--hold-at", 5, "--save-freq", 4, "--sync-saves")
    first[0].wait_line("holding")
    wait_until(lambda: steps() == [4], "the bucket has step 4")
    server.fail(10_000)  # nothing reaches the bucket any more
    here.release()
    wait_until(
        lambda: Path(scratch_directory(URL), "8", "COMMITTED").exists(), "step 8 here"
    )
    first[0].send(signal.SIGKILL)
    first.wait()
    server.clear_faults()
    assert steps() == [4]
    last = start(here, "none", 1)
    last.expect(0)
    assert last[0].lines("restored") == [["8", "8"]]
    assert last.results() == reference("none", 1)
    assert steps() == [12, 8]


def test_stock_tensorflow_reads_a_mirror_while_commits_come_and_go(
    here: Place, zygote: Zygote
) -> None:
    """In a directory with the layout of a bucket."""
    mirror = here.path / "mirror"
    mirror.mkdir()
    reader = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "stock_reader.py"), str(mirror), "60"],
        env=worker_environment(here.path),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        remote = {"TFPREEMPT_MIRROR_DIR": mirror.as_uri()}
        cluster = here.start(
            "train.py", "--steps", 60, "--save-freq", 1, "--pause", 0.05, env=remote
        )
        cluster.expect(0)
        output, _ = reader.communicate(timeout=120)
    finally:
        reader.kill()
        reader.wait()
    assert reader.returncode == 0, output
    read = [int(line.split()[1]) for line in output.splitlines() if "read " in line]
    assert read == sorted(read)
    assert len(read) > 2
    assert read[-1] == 60


LOOP = f"""
import os, signal, tfpreempt
from tfpreempt.states import StepCounter
counter = StepCounter()
made = tfpreempt.PreemptionCheckpointHandler(None, None, {URL!r}, save_freq=5)
with made as handler:
    while handler.total_run_calls < 20:
        handler.run(counter.increment)
        if counter.value == 13 and tfpreempt.num_restarts() == 0:
            assert handler.wait_for_mirror()
            os.kill(os.getpid(), signal.SIGKILL)
print("trained", counter.value)
"""


def test_a_supervised_run_and_its_report(here: Place, server: GcsServer) -> None:
    """The supervisor sees the commits; the report outlives the machine."""
    (here.path / "loop.py").write_text(LOOP)
    environment = worker_environment(here.path, server.environment())
    environment[VARIABLE] = os.environ[VARIABLE]

    def tfpreempt(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tfpreempt", *words],
            cwd=here.path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    options = ("--checkpoint-dir", URL, "--max-failures", "1", "--backoff", "0.01")
    output = tfpreempt("run", *options, "--", sys.executable, "loop.py")
    assert "trained 20" in output
    assert "finished" in tfpreempt("status", URL)
    lose_machines(here)
    report = json.loads(tfpreempt("report", URL, "--json"))
    assert (report["outcome"], report["step"]) == ("finished", 20)
    assert [each["cause"] for each in report["interruptions"]] == ["failure"]
    found = json.loads(tfpreempt("inspect", URL, "--json"))
    assert [each["step"] for each in found] == [20, 15]
