"""The demo: what it plans, whom it strikes, what it counts; once as a whole."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tfpreempt.cli.demo import command, plan
from tfpreempt.cli.demo.job import DemoFailedError, Job
from tfpreempt.cli.demo.plan import Progress, Strike, Striker, draw_strikes
from tfpreempt.cli.demo.result import (
    Preemption,
    Result,
    count_lost,
    digest_weights,
    find_preemptions,
)
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


def progress(worker: int, step: int, restart: int = 0) -> Progress:
    pid = 1000 * (restart + 1) + worker
    return Progress(worker=worker, step=step, loss=0.5, pid=pid, restart=restart)


def fake_job(directory: Path, *waits: int) -> Job:
    arguments = [str(directory), *map(str, waits)]
    return Job(directory, [sys.executable, "-c", FAKE_SUPERVISOR, *arguments], 2)


class TestPlan:
    def test_same_seed_same_strikes(self) -> None:
        first, again, other = (
            draw_strikes(workers=3, preemptions=5, seed=seed) for seed in (1, 1, 2)
        )
        assert first == again != other

    @pytest.mark.parametrize("seed", range(50))
    def test_strikes_leave_room_to_train_and_to_notice(self, seed: int) -> None:
        steps = [
            each.step for each in draw_strikes(workers=2, preemptions=9, seed=seed)
        ]
        gaps = [late - early for early, late in itertools.pairwise(steps)]
        assert steps[0] > 0
        assert min(gaps) >= 10
        assert steps[-1] < 0.85 * plan.STEPS

    def test_every_worker_and_all_at_once_are_struck(self) -> None:
        strikes = draw_strikes(workers=2, preemptions=30, seed=0)
        assert {each.victims for each in strikes} == {(0,), (1,), (0, 1)}

    def test_none(self) -> None:
        assert draw_strikes(workers=2, preemptions=0, seed=0) == ()

    def test_too_many(self) -> None:
        with pytest.raises(ConfigurationError, match="at most 39 fit into 1000 steps"):
            draw_strikes(workers=2, preemptions=40, seed=0)


class TestStriker:
    def test_waits_for_the_step(self) -> None:
        striker = Striker((Strike(step=5, victims=(1,)),))
        assert striker.due({}) == ()
        assert striker.due({0: progress(0, 4), 1: progress(1, 4)}) == ()
        assert striker.due({0: progress(0, 5), 1: progress(1, 4)}) == (1001,)
        assert striker.due({0: progress(0, 6), 1: progress(1, 6)}) == ()

    def test_strikes_an_incarnation_once(self) -> None:
        strikes = (Strike(step=5, victims=(0,)), Strike(step=7, victims=(0, 1)))
        striker = Striker(strikes)
        assert striker.due({0: progress(0, 5), 1: progress(1, 5)}) == (1000,)
        assert striker.due({0: progress(0, 8), 1: progress(1, 8)}) == ()
        latest = {0: progress(0, 9, restart=1), 1: progress(1, 9, restart=1)}
        assert striker.due(latest) == (2000, 2001)

    def test_a_victim_that_has_not_trained_yet_is_awaited(self) -> None:
        striker = Striker((Strike(step=5, victims=(1,)),))
        assert striker.due({0: progress(0, 6, restart=1), 1: progress(1, 5)}) == ()


class TestJob:
    def test_strikes_and_shows(self, tmp_path: Path) -> None:
        shown: list[Progress] = []
        strikes = (Strike(step=3, victims=(0,)), Strike(step=6, victims=(1,)))
        with fake_job(tmp_path, 3, 6) as job:
            job.watch(Striker(strikes), shown.append)
        assert [each.restart for each in shown][-1] == 2
        assert shown[-1].step == 9

    def test_failure_shows_the_last_lines(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "import sys; sys.exit('no such port')"]
        with (
            Job(tmp_path, command, 2) as job,
            pytest.raises(DemoFailedError, match=r"(?s)status 1, 0 .*no such port"),
        ):
            job.watch(Striker(()), lambda _: None)

    def test_gives_up_when_nothing_moves(self, tmp_path: Path) -> None:
        with (
            fake_job(tmp_path, 3) as job,
            pytest.raises(DemoFailedError, match="No worker trained a step"),
        ):
            job.watch(Striker(()), lambda _: None, stall_seconds=0.2)

    def test_leaving_ends_the_supervisor(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        with pytest.raises(KeyboardInterrupt), Job(tmp_path, command, 2) as job:
            raise KeyboardInterrupt
        assert job._process.returncode == -signal.SIGTERM


class TestResult:
    def test_steps_trained_once_are_not_lost(self) -> None:
        assert count_lost({0: [0, 1, 2], 1: [0, 1, 2]}, 3) == 0

    @pytest.mark.parametrize(
        ("trained", "lost"),
        [
            ({0: [0, 1, 1, 2], 1: [0, 1, 1, 2]}, 1),
            ({0: [0, 2], 1: [0, 1, 2]}, 1),
            ({0: [0, 1], 1: [1, 2]}, 2),
            ({0: [0, 1, 2, 3], 1: [0, 1, 2]}, 1),
            ({0: [], 1: []}, 3),
        ],
    )
    def test_repeated_and_missing_steps_are_lost(
        self, trained: dict[int, list[int]], lost: int
    ) -> None:
        assert count_lost(trained, 3) == lost

    def test_time_runs_from_the_first_notice_of_the_incarnation(self) -> None:
        def notice(incarnation: int, worker: int, wall: float) -> dict[str, object]:
            return {
                "event": "notice",
                "incarnation": incarnation,
                "worker": worker,
                "wall": wall,
            }

        def commit(incarnation: int, wall: float, because: str) -> dict[str, object]:
            return {
                "event": "commit",
                "incarnation": incarnation,
                "wall": wall,
                "because": because,
                "step": int(wall),
            }

        events = [
            notice(0, 1, 10.0),
            notice(0, 0, 10.25),
            commit(0, 10.5, "preemption"),
            commit(1, 20.0, "periodic"),
            notice(2, 0, 30.0),
            commit(2, 31.0, "preemption"),
            {"event": "restored", "incarnation": 3},
        ]
        assert find_preemptions(events) == (
            Preemption(step=10, notified=(0, 1), notice_to_commit_seconds=0.5),
            Preemption(step=31, notified=(0,), notice_to_commit_seconds=1.0),
        )

    def test_one_bit_makes_another_digest(self, tmp_path: Path) -> None:
        weights = np.ones((2, 2), np.float32)
        np.savez(tmp_path / "a.npz", w=weights)
        np.savez(tmp_path / "b.npz", w=weights)
        weights.view(np.uint32)[1, 1] ^= 1
        np.savez(tmp_path / "c.npz", w=weights)
        digests = [digest_weights(tmp_path / f"{name}.npz") for name in "abc"]
        assert digests[0] == digests[1] != digests[2]

    def test_failures_name_what_was_promised(self) -> None:
        result = Result(
            asked=3,
            preemptions=(),
            restarts=0,
            steps=9,
            steps_lost=2,
            bit_identical=False,
            final_accuracy=0.9,
        )
        assert len(result.failures()) == 3
        assert "0 preemptions ended in a commit, 3 were asked" in result.failures()[0]


class TestCommand:
    def test_too_many_preemptions(self, tmp_path: Path) -> None:
        arguments = ["--preemptions", "99", "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(command.demo, arguments)
        assert done.exit_code == 1
        assert "--preemptions 99 does not fit" in done.output
        assert not (tmp_path / "out").exists()

    def test_without_scikit_learn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        done = CliRunner().invoke(command.demo, ["--out", str(tmp_path)])
        assert done.exit_code == 1
        assert "pip install 'tfpreempt[demo]'" in done.output
        assert "pip install '.[demo]'" in done.output

    def test_out_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        done = CliRunner().invoke(command.demo, ["--out", str(tmp_path / "file" / "x")])
        assert done.exit_code == 1
        assert "no folder can be made there" in done.output

    def test_keras_trains_whole_epochs(self, tmp_path: Path) -> None:
        arguments = ["--keras", "--steps", "130", "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(command.demo, arguments)
        assert done.exit_code == 1
        assert "Give a multiple of 50" in done.output
        assert not (tmp_path / "out").exists()

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
    def test_nothing_is_lost(
        self, tmp_path: Path, preemptions: int, more: list[str]
    ) -> None:
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
