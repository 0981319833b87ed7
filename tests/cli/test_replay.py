"""`tfpreempt verify --replay`: the steps between two commits, once more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import ROOT, Zygote
from tfpreempt import Checkpoint
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.restore import inspection
from tfpreempt.cli.inspect import replay

pytestmark = pytest.mark.multiprocess

LOOP = Path(__file__).with_name("replay_program.py")
FIT = LOOP.with_name("replay_fit.py")


def start(*command: object, **variables: str) -> Any:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFPREEMPT_")}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=kept
        | {"PYTHONPATH": str(ROOT), "TFPREEMPT_PLATFORM": "generic"}
        | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )


def contents(directory: Path) -> dict[Path, tuple[int, bytes]]:
    """The time of the last change, and the bytes, of each file and directory."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (directory, *directory.rglob("*"))
    }


def replayed(directory: Path, *command: object) -> tuple[int, str, str]:
    """Exit status, output, and errors."""
    words = ("-m", "tfpreempt", "verify", "--replay", directory, "--", sys.executable)
    before = contents(directory)
    done = start(*words, *command, TFPREEMPT_MIRROR_DIR="file:///not/used")
    assert contents(directory) == before
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("steps", [10, 8])
def test_the_end_of_a_loop_is_repeated(tmp_path: Path, steps: int) -> None:
    """With a final commit; or the last periodic commit is the final commit."""
    run = tmp_path / "run"
    assert start(LOOP, run, steps).returncode == 0
    first = {10: 8, 8: 4}[steps]
    code, output, _ = replayed(run, LOOP, run, steps)
    assert code == 0
    assert output.endswith(f"\nsteps {first} to {steps} repeated: 2 values are equal\n")
    code, output, _ = replayed(run, LOOP, run, steps, "wrong", first + 1)
    assert code == 1
    assert "\ndiffers: State states/weights.state\n" in output
    assert f"steps {first} to {steps} repeated: 1 of 2 values differ from" in output


def test_steps_that_cannot_be_repeated(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(LOOP, run, 6).returncode == 0
    code, _, problem = replayed(run, LOOP, tmp_path / "other", 6)
    assert code == 2
    assert "expected one process with checkpoint_dir=" in problem
    code, _, problem = replayed(run, LOOP, run, 5)
    assert code == 2
    assert "its newest commit is of step 5; expected a commit of step 6" in problem
    supervisor = ("-m", "tfpreempt", "run", "--checkpoint-dir", run, "--")
    code, _, problem = replayed(run, *supervisor, sys.executable, LOOP, run, 6)
    assert code == 2
    assert "Got `tfpreempt run` as the command of a replay" in problem
    assert f"--replay DIRECTORY -- {sys.executable} {LOOP} {run} 6\n" in problem


def test_a_mirror_is_repeated_from_a_local_copy(tmp_path: Path) -> None:
    mirror, copy = tmp_path / "mirror", tmp_path / "copy"
    variables = {"TFPREEMPT_MIRROR_DIR": mirror.as_uri()}
    assert start(LOOP, tmp_path / "run", 8, **variables).returncode == 0
    code, _, problem = replayed(mirror, LOOP, tmp_path / "run", 8)
    assert code == 2
    assert 'tfpreempt.Checkpoint(URI).to_directory("run/STEP")' in problem
    commits = [each for each in inspection.at(str(mirror)) if each.is_committed]
    for each in commits:
        Checkpoint(each.path).to_directory(copy / str(each.step))
    code, output, _ = replayed(copy, LOOP, copy, 8)
    assert "steps 4 to 8 repeated" in output


def test_a_replay_needs_a_command_and_two_commits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(LOOP, run, 2).returncode == 0
    words = ("-m", "tfpreempt", "verify", run)
    assert "needs the command" in start(*words, "--replay").stderr
    assert "needs the command" in start(*words, "--", "true").stderr
    code, _, problem = replayed(run, LOOP, run, 2)
    assert code == 2
    assert "found 1 intact commits; expected two" in problem


def test_a_replay_ends_at_the_step_of_the_newest_commit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(LOOP, run, 20, "crash", 10).returncode == 1
    code, output, _ = replayed(run, LOOP, run, 20)
    assert code == 0
    assert output.endswith("\nsteps 4 to 8 repeated: 2 values are equal\n")


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("tensorflow", ()),
        pytest.param("jax", ("wrong", 1, 5), marks=pytest.mark.thorough),
    ],
)
def test_the_steps_of_a_fit_are_repeated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    zygote_of: Callable[[str], Zygote],
    backend: str,
    fault: tuple[Any, ...],
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    run = tmp_path / "run"
    zygote = zygote_of({"jax": "keras-jax"}.get(backend, backend))
    crashed = zygote.run(FIT, run, "crash", 1, 6, directory=tmp_path)
    assert "crash of the test" in crashed.stderr
    code, output, problem = replayed(run, FIT, run, *fault)
    assert "\nsteps 12 to 16 repeated: " in output, output + problem
    assert "at the end" not in output
    assert code == (1 if fault else 0)
    differing = [each for each in output.splitlines() if each.startswith("differs: ")]
    assert len(differing) == bool(fault), differing
    assert all("kernel" in each for each in differing)


@pytest.mark.tensorflow
def test_a_commit_of_a_validation_is_not_repeated() -> None:
    pytest.importorskip("tensorflow")
    from tests.keras.small_fit import X, Y, machine

    with machine("keras") as on:
        on.cuts = [("test", 1, 0)]
        on.start()
        with pytest.raises(SystemExit):
            on.fit(validation_data=(X, Y), ours=on.preemption(save_freq=4))
        commits = catalog.scan(str(on.checkpoints))
        assert [each.step for each in commits] == [12, 8]
        with pytest.raises(replay.ReplayError, match="not during a validation"):
            replay.replay(commits, ["true"])
