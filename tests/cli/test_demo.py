"""The demo: its plan, its preemptions, its counts; and one complete run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.cli.report.scripted import Scripted
from tests.without_tensorflow import WITHOUT_TENSORFLOW_ALONE, python_path_without
from tfpreempt.cli import main
from tfpreempt.cli.demo.job import (
    STEP,
    DemoFailedError,
    Preemption,
    draw_preemptions,
    train,
)
from tfpreempt.cli.demo.result import Result, assess, count_lost
from tfpreempt.errors import ConfigurationError

ROOT = Path(__file__).parents[2]

# Replaces a supervisor and its two workers: prints each step. At the steps on its
# command line it waits for SIGTERM, and continues as another incarnation.
FAKE_SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from tfpreempt.handler.status_file import WorkerStatus, _pack, status_path
out, waits = sys.argv[1], [int(step) for step in sys.argv[2:]]
journal = f"{out}/checkpoints/journal"
os.makedirs(journal)
held = [open(f"{journal}/worker-{i}.jsonl", "a") for i in range(2)]
for worker in range(2):
    values = {"at": 1.0, "worker": worker, "num_workers": 2, "host": "host"}
    now = WorkerStatus(**values, pid=os.getpid(), doing="training", step=0)
    status_path(Path(journal), worker).write_bytes(_pack(now))
told, restart = [], 0
signal.signal(signal.SIGTERM, lambda *_: told.append(restart))
for step in range(10):
    print(f"[worker-0] step {step}, restart {restart}, loss 1", flush=True)
    while step in waits and len(told) <= restart:
        signal.sigtimedwait([], 0.01)
    restart += step in waits
sys.exit(told != list(range(len(waits))))
"""


FIRST_STEP = "print('step 0, restart 0, loss 1', flush=True)"

# A worker whose other thread writes into the same pipe, without a pause.
WORKER_WITH_TWO_WRITERS = """
import os, sys, threading
from tfpreempt.cli.demo.job import print_step

def write():
    while True:
        os.write(1, b"a notice has come\\n")

threading.Thread(target=write, daemon=True).start()
for step in range(1000):
    print_step(step, 0, 1.0)
"""


def fake_job(directory: Path, *waits: int) -> list[str]:
    arguments = [str(directory), *map(str, waits)]
    return [sys.executable, "-c", FAKE_SUPERVISOR, *arguments]


def plan(count: int, seed: int = 0, workers: int = 2) -> tuple[Preemption, ...]:
    return draw_preemptions(count, workers=workers, steps=1000, seed=seed)


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


# --- the job -------------------------------------------------------------------------


@pytest.mark.slow  # starts a process
def test_each_incarnation_is_preempted_once(tmp_path: Path) -> None:
    """The second preemption is due at once, and waits for the restart."""
    planned = [Preemption(step=2, workers=(0,)), Preemption(step=3, workers=(1,))]
    train(tmp_path, fake_job(tmp_path, 5, 7), planned)


@pytest.mark.slow  # starts a process
def test_a_failure_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such port')"]
    with pytest.raises(DemoFailedError, match="exited with code 1"):
        train(tmp_path, command, ())


@pytest.mark.slow  # starts a process
def test_a_job_in_which_nothing_moves_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpreempt.cli.demo.job._STALL_SECONDS", 0.5)
    program = f"{FIRST_STEP}; import time; time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(DemoFailedError, match=r"No step .* for 0\.5 s.*/logs"):
        train(tmp_path, [sys.executable, "-c", program], ())
    assert time.monotonic() - began < 30


@pytest.mark.slow  # starts a process
def test_a_job_that_is_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def interrupted(line: str, err: bool) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    monkeypatch.setattr("click.echo", interrupted)
    program = f"{FIRST_STEP}; import time; time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, [sys.executable, "-c", program], ())
    assert lines == [f"[{tmp_path.name}] step 0"]
    assert time.monotonic() - began < 30


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
    assert count_lost(steps.values(), steps=3) == lost


@pytest.mark.slow  # starts a process
def test_a_step_is_found_whatever_else_the_worker_writes() -> None:
    command = [sys.executable, "-u", "-c", WORKER_WITH_TWO_WRITERS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [int(step) for step, *_ in STEP.findall(printed.stdout)] == [*range(1000)]


def test_preemptions_are_counted_by_their_commits(tmp_path: Path) -> None:
    run = Scripted()
    run.start()
    run.save()
    run.preempt(steps=1)
    run.start()
    run.preempt(steps=2)
    run.start()
    run.finish()
    run.write(tmp_path / "checkpoints" / "journal")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").touch()
    (tmp_path / "accuracy-0.txt").write_text("0.9")
    (tmp_path / "weights-0.bin").touch()
    found = assess([tmp_path], workers=1, steps=0)
    assert found.notice_to_commit_seconds == (1.5, 2.0)
    assert (found.preemptions, found.restarts) == (2, 2)


def test_one_bit_is_a_difference_and_faults_name_the_promise(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
        log = "=== starts ===\nnoise\n" + "".join(
            f"step {step}, restart 0, loss 1\n" for step in range(3)
        )
        (folder / "logs" / "worker-0.log").write_bytes(b"\xff" + log.encode())
        (folder / "accuracy-0.txt").write_text("0.9")
        (folder / "weights-0.bin").write_bytes(b"\0\0")
    same = assess(folders, workers=1, steps=3)
    assert (same.bit_identical, same.final_accuracy, same.faults(0)) == (True, 0.9, [])
    (folders[1] / "weights-0.bin").write_bytes(b"\0\1")
    other = assess(folders, workers=1, steps=4)
    assert not other.bit_identical
    assert len(other.faults(3)) == 3
    assert "0 of 3 preemptions ended with a commit" in other.faults(3)[0]


# --- the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preemptions", "99"], "--preemptions 99 is too large"),
        (["--keras", "--steps", "130"], "Use a multiple of 50"),
        (
            ["--keras", "--backend", "jax", "--workers", "2"],
            "--workers 2 with --keras on JAX",
        ),
    ],
)
def test_invalid_arguments_are_reported_before_files_are_made(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["demo", *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "options", "advice"),
    [
        ({"sklearn"}, [], "pip install '.[demo]' in a clone"),
        ({"jax"}, ["--backend=jax"], "pip install '.[jax,demo]' in a clone"),
        ({"keras"}, ["--backend=jax"], "The demo on JAX needs JAX and Keras"),
        ({"tensorflow"}, ["--backend=tensorflow"], "pip install '.[tensorflow]' in"),
        ({"tensorflow", "jax"}, [], "To run on JAX: pip install '.[jax,demo]' in"),
    ],
)
def test_missing_packages_are_named(
    missing: set[str],
    options: list[str],
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name in missing else find(name),
    )
    done = CliRunner().invoke(main, ["demo", *options, "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert advice in done.output


def a_good_result(preemptions: int) -> Result:
    return Result(
        preemptions=preemptions,
        steps_lost=0,
        bit_identical=True,
        notice_to_commit_seconds=(0.5,) * preemptions,
        final_accuracy=0.98,
        restarts=preemptions,
        steps=1000,
    )


def test_it_may_be_preempted_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[object] = []
    well = a_good_result(preemptions=0)
    monkeypatch.setattr(
        "tfpreempt.cli.demo.command.train", lambda *args: planned.append(args[-1])
    )
    monkeypatch.setattr("tfpreempt.cli.demo.command.assess", lambda *_: well)
    monkeypatch.setattr("tfpreempt.cli.demo.command.signal.signal", lambda *_: None)
    arguments = ["demo", "--preemptions", "0", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "No step was lost." in done.output
    assert [*map(list, planned)] == [[], []]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_demo_with_its_supervisor(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the supervisor, in its own session, outlives a closed terminal."""
    handlers = {number: signal.SIG_DFL}
    monkeypatch.setattr(
        "tfpreempt.cli.demo.command.signal",
        SimpleNamespace(
            SIG_DFL=signal.SIG_DFL, signal=handlers.__setitem__, getsignal=handlers.get
        ),
    )
    monkeypatch.setattr(
        "tfpreempt.cli.demo.command.train", lambda *_: handlers[number](number, None)
    )
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path)])
    assert done.exit_code == 128 + number


def test_at_its_end_it_names_the_report_of_the_preempted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = a_good_result(preemptions=3)
    monkeypatch.setattr("tfpreempt.cli.demo.command.train", lambda *_: None)
    monkeypatch.setattr("tfpreempt.cli.demo.command.assess", lambda *_: well)
    monkeypatch.setattr("tfpreempt.cli.demo.command.signal.signal", lambda *_: None)
    command = str(tmp_path / "another space" / "tfpreempt")
    monkeypatch.setattr("sys.argv", [command])
    out = tmp_path / "with a space"
    done = CliRunner().invoke(main, ["demo", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (folder,) = out.iterdir()
    (line,) = re.findall("Time per phase: (.*)", done.output)
    checkpoints = str(folder / "interrupted" / "checkpoints")
    assert shlex.split(line) == [command, "report", checkpoints]
    monkeypatch.setattr("sys.argv", ["/any/tfpreempt/__main__.py"])
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "module")])
    assert "Time per phase: python -m tfpreempt report " in done.output


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "file" / "x")])
    assert done.exit_code == 1
    assert "cannot create a folder there" in done.output
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "is a file" in done.output


@pytest.mark.tensorflow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("preemptions", "more"),
    [
        (2, ["--steps=500"]),
        (2, ["--steps=200", "--keras"]),
    ],
)
def test_nothing_is_lost(tmp_path: Path, preemptions: int, more: list[str]) -> None:
    run_demo(tmp_path, preemptions, more, os.environ)


@pytest.mark.multiprocess
@pytest.mark.parametrize("more", [[], ["--keras"]], ids=["loop", "fit"])
def test_nothing_is_lost_on_jax(tmp_path: Path, more: list[str]) -> None:
    """The demo chooses JAX where TensorFlow is missing."""
    path = python_path_without(tmp_path / "missing", WITHOUT_TENSORFLOW_ALONE)
    path = os.pathsep.join([path, str(ROOT)])
    said = run_demo(
        tmp_path, 1, [*more, "--steps=200"], {**os.environ, "PYTHONPATH": path}
    )
    assert said.startswith("jax, seed 4,")


def run_demo(
    tmp_path: Path, preemptions: int, more: list[str], environment: Mapping[str, str]
) -> str:
    """Runs the whole demo, and checks the result; returns its other output."""
    command = [sys.executable, "-m", "tfpreempt", "demo", "--json", "--seed", "4"]
    command += ["--preemptions", str(preemptions), *more]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["preemptions"] == result["restarts"] == preemptions
    assert result["steps_lost"] == 0
    assert result["bit_identical"] is True
    assert len(result["notice_to_commit_seconds"]) == preemptions
    assert all(0 < each < 10 for each in result["notice_to_commit_seconds"])
    assert result["final_accuracy"] > 0.9
    return done.stderr
