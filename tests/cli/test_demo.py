"""The demo: what it plans, whom it preempts, what it counts; once as a whole."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tfpreempt.cli import main
from tfpreempt.cli.demo.job import (
    DemoFailedError,
    Plan,
    Preemption,
    Trained,
    draw_plan,
    pids_to_preempt,
    train,
)
from tfpreempt.cli.demo.result import Survived, assess, count_lost, find_survived
from tfpreempt.errors import ConfigurationError

# Stands in for a supervisor with two workers: trains step by step, and at each of the
# steps named on its command line goes on only after SIGTERM, as another incarnation.
FAKE_SUPERVISOR = """
import json, os, signal, sys
out, waits = sys.argv[1], [int(step) for step in sys.argv[2:]]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
restart = 0
for step in range(10):
    for worker in range(2):
        record = dict(step=step, loss=1 / (step + 1), pid=os.getpid(), restart=restart)
        with open(f"{out}/progress-{worker}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\\n")
    if step in waits:
        signal.sigwait([signal.SIGTERM])
        restart += 1
print("trained")
"""


def trained(worker: int, step: int, restart: int = 0) -> Trained:
    pid = 1000 * (restart + 1) + worker
    return Trained(worker=worker, step=step, loss=0.5, pid=pid, restart=restart)


def fake_job(directory: Path, *waits: int) -> list[str]:
    arguments = [str(directory), *map(str, waits)]
    return [sys.executable, "-I", "-S", "-c", FAKE_SUPERVISOR, *arguments]


def plan(preemptions: int, seed: int = 0, workers: int = 2) -> tuple[Preemption, ...]:
    how = {"workers": workers, "steps": 1000, "seed": seed, "preemptions": preemptions}
    return draw_plan(way="loop", **how).preemptions


# --- what is planned -----------------------------------------------------------------


def test_same_seed_same_preemptions() -> None:
    first, again, other = (plan(5, seed, workers=3) for seed in (1, 1, 2))
    assert first == again != other


def test_preemptions_leave_room_to_train_and_to_notice() -> None:
    for seed in range(50):
        steps = [each.step for each in plan(9, seed)]
        gaps = [late - early for early, late in itertools.pairwise(steps)]
        assert steps[0] > 0
        assert min(gaps) >= 10
        assert steps[-1] < 850


def test_every_worker_and_all_at_once_are_preempted() -> None:
    assert {each.workers for each in plan(30)} == {(0,), (1,), (0, 1)}
    assert plan(0) == ()


def test_too_many_preemptions_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="at most 39 fit into 1000 steps"):
        plan(40)


def test_a_preemption_waits_for_its_step() -> None:
    planned = Preemption(step=5, workers=(1,))
    early = {0: trained(0, 4), 1: trained(1, 4)}
    assert pids_to_preempt(planned, {}, restart=0) == []
    assert pids_to_preempt(planned, early, restart=0) == []
    assert pids_to_preempt(planned, early | {0: trained(0, 5)}, restart=0) == [1001]


def test_a_preemption_waits_until_its_workers_have_trained_since_the_restart() -> None:
    planned = Preemption(step=5, workers=(0, 1))
    latest = {0: trained(0, 6, restart=1), 1: trained(1, 5)}
    assert pids_to_preempt(planned, latest, restart=1) == []
    latest[1] = trained(1, 6, restart=1)
    assert pids_to_preempt(planned, latest, restart=1) == [2000, 2001]


# --- the job -------------------------------------------------------------------------


def test_a_job_is_preempted_and_recorded(tmp_path: Path) -> None:
    planned = [Preemption(step=3, workers=(0,)), Preemption(step=6, workers=(1,))]
    told = [*itertools.chain(*train(tmp_path, fake_job(tmp_path, 3, 6), 2, planned))]
    assert [(each.step, each.restart) for each in told if each.worker == 1] == [
        (step, (step > 3) + (step > 6)) for step in range(10)
    ]


def test_a_failure_shows_the_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such port')"]
    with pytest.raises(DemoFailedError, match=r"(?s)status 1, 0 .*no such port"):
        list(train(tmp_path, command, 2, ()))


def test_a_job_in_which_nothing_moves_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(DemoFailedError, match="No worker trained a step"):
        list(train(tmp_path, fake_job(tmp_path, 3), 2, (), stall_seconds=0.2))


def test_a_job_that_is_left_is_ended(tmp_path: Path) -> None:
    job = train(tmp_path, fake_job(tmp_path, 3), 2, ())
    (pid,) = {each.pid for each in next(job)}
    job.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- what is counted -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ({0: [0, 1, 2], 1: [0, 1, 2]}, 0),
        ({0: [0, 1, 1, 2], 1: [0, 1, 1, 2]}, 1),
        ({0: [0, 2], 1: [0, 1, 2]}, 1),
        ({0: [0, 1], 1: [1, 2]}, 2),
        ({0: [0, 1, 2, 3], 1: [0, 1, 2]}, 1),
        ({0: [], 1: []}, 3),
    ],
)
def test_repeated_and_missing_steps_are_lost(
    steps: dict[int, list[int]], lost: int
) -> None:
    told = [trained(worker, step) for worker, done in steps.items() for step in done]
    assert count_lost(told, workers=2, steps=3) == lost


def notice(incarnation: int, worker: int, wall: float) -> dict[str, Any]:
    who = {"incarnation": incarnation, "worker": worker}
    return {"event": "notice", "wall": wall, **who}


def commit(incarnation: int, wall: float, because: str) -> dict[str, Any]:
    what = {"incarnation": incarnation, "because": because, "step": int(wall)}
    return {"event": "commit", "wall": wall, **what}


def test_time_runs_from_the_first_notice_of_the_incarnation() -> None:
    journal = [
        notice(0, 1, 10.0),
        notice(0, 0, 10.25),
        commit(0, 10.5, "preemption"),
        commit(1, 20.0, "periodic"),
        notice(2, 0, 30.0),
        commit(2, 31.0, "preemption"),
        {"event": "restored", "wall": 40.0, "incarnation": 3},
    ]
    assert find_survived(journal) == (
        Survived(step=10, notified=(0, 1), notice_to_commit_seconds=0.5),
        Survived(step=31, notified=(0,), notice_to_commit_seconds=1.0),
    )


def test_one_bit_is_a_difference_and_failures_name_what_was_promised(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "accuracy-0.json").write_text("0.9")
        (folder / "weights-0.bin").write_bytes(b"\0\0")
    told = [trained(0, step) for step in range(3)]
    fine = Plan(way="loop", workers=1, steps=3, seed=0, preemptions=())
    same = assess(folders, told, fine)
    assert (same.bit_identical, same.final_accuracy, same.failures()) == (True, 0.9, [])
    (folders[1] / "weights-0.bin").write_bytes(b"\0\1")
    asked = (Preemption(step=1, workers=(0,)),) * 3
    other = assess(folders, told, dataclasses.replace(fine, steps=4, preemptions=asked))
    assert not other.bit_identical
    assert len(other.failures()) == 3
    assert "0 preemptions ended in a commit, 3 were asked" in other.failures()[0]


# --- the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preemptions", "99"], "--preemptions 99 does not fit"),
        (["--keras", "--steps", "130"], "Give a multiple of 50"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["demo", *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "pip install 'tfpreempt[demo]'" in done.output
    assert "pip install '.[demo]'" in done.output


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "file" / "x")])
    assert done.exit_code == 1
    assert "no folder can be made there" in done.output


@pytest.mark.tensorflow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("preemptions", "more"),
    [
        (0, ["--steps=500"]),
        (2, ["--steps=500"]),
        (2, ["--steps=200", "--keras"]),
    ],
)
def test_nothing_is_lost(tmp_path: Path, preemptions: int, more: list[str]) -> None:
    command = [sys.executable, "-m", "tfpreempt", "demo", "--json", "--seed", "4"]
    command += ["--preemptions", str(preemptions), *more]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["preemptions"] == result["restarts"] == preemptions
    assert result["steps_lost"] == 0
    assert result["bit_identical"] is True
    assert len(result["notice_to_commit_seconds"]) == preemptions
    assert all(0 < each < 10 for each in result["notice_to_commit_seconds"])
    assert result["final_accuracy"] > 0.9
