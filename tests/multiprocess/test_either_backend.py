"""A run of `model.fit` that changes between TensorFlow and JAX, in real processes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.harness import LIMIT, PROGRAMS, RESTART, ROOT, Zygote
from tests.without_tensorflow import WITHOUT_TENSORFLOW_ALONE, python_path_without

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
]
for each in ("tensorflow", "jax", "keras"):
    pytest.importorskip(each)

CHANGES = {
    "arrays": ["tensorflow train:1:4", "jax train:1:6", "tensorflow"],
    "arrays-same-epoch": ["jax train:1:4", "tensorflow train:1:6", "jax"],
    "arrays-twice-on-one": ["jax train:1:4", "tensorflow train:1:6", "tensorflow"],
    "arrays-epoch-begins": ["jax train:1:0", "tensorflow train:1:3", "jax"],
    "arrays-validation": ["tensorflow validation:1:2", "jax validation:2:1", "jax"],
    "batches": ["tensorflow train:1:4", "jax train:2:4", "tensorflow"],
    "in_order": ["tensorflow train:1:4", "jax train:1:6", "tensorflow"],
    "sequence": ["tensorflow train:1:4", "jax train:1:6", "tensorflow"],
    "tfdata": ["tensorflow train:1:4", "jax train:1:6", "tensorflow"],
    "grain": ["tensorflow train:1:4", "jax train:1:6", "tensorflow"],
    "indexed": ["tensorflow train:1:4", "jax train:1:6", "tensorflow"],
    "generator": ["tensorflow train:1:4", "jax train:2:6", "tensorflow"],
}
"""By the kind of the data: the backend of each start, and where it is preempted."""


Run = Callable[..., list[str]]


@pytest.fixture
def run(zygote_of: Callable[[str], Zygote]) -> Run:
    return functools.partial(run_to_its_end, zygote_of)


def run_to_its_end(
    zygote_of: Callable[[str], Zygote],
    directory: Path,
    data: str,
    start: str,
    path: str | None = None,
) -> list[str]:
    """Runs the program to its end; returns the lines that it printed.

    Args:
        zygote_of: the process that forks the program, by framework.
        directory: the checkpoint directory.
        data: name of the data in `DATA`.
        start: the backend, and the point of a preemption if there is one.
        path: PYTHONPATH of a new process; None: the program is a fork.
    """
    backend, *cut = start.split()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFPREEMPT_")}
    kept |= {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    env = kept | {"TFPREEMPT_PLATFORM": "generic", "PYTHONPATH": path or str(ROOT)}
    program, words = PROGRAMS / "either_fit.py", (str(directory), data, *cut)
    if path is None:
        zygote = zygote_of("keras-jax" if backend == "jax" else backend)
        here = directory.parent
        done = zygote.run(program, *words, directory=here, env=env, limit=2 * LIMIT)
    else:
        done = subprocess.run(
            [sys.executable, program, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
        )
    expected = RESTART if cut else 0
    assert done.returncode == expected, f"{start}: {done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def after(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if line.partition(" ")[0] == word]


@pytest.mark.parametrize("change", CHANGES)
def test_variables_and_position_are_equal(
    tmp_path: Path, run: Run, change: str
) -> None:
    data, saved, backend = change.partition("-")[0], "", ""
    for start in CHANGES[change]:
        lines = run(tmp_path / "run", data, start)
        states = after(lines, "state")
        if saved:
            assert states[0] == saved
        warnings = [each for each in after(lines, "warned") if "Not carried" in each]
        assert len(warnings) == (backend not in ("", start.split()[0])), lines
        saved, backend = states[-1], start.split()[0]
    # In each epoch, each sample was trained exactly once.
    assert after(lines, "final") == ["final [0, 1, 2] [80.0, 80.0, 80.0] 30"]
    assert after(lines, "python") == ["python 5 0.45"]


def test_without_tensorflow_a_new_order_is_named(tmp_path: Path, run: Run) -> None:
    [state] = after(run(tmp_path / "run", "arrays", "tensorflow train:1:4"), "state")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    alone = python_path_without(tmp_path / "missing", WITHOUT_TENSORFLOW_ALONE)
    path = os.pathsep.join([alone, str(ROOT)])
    lines = run(tmp_path / "run", "arrays", "jax", path=path)
    assert after(lines, "state") == [state]
    warnings = "\n".join(after(lines, "warned"))
    assert "the rest of the epoch has a new order" in warnings
    assert "the random generators of TensorFlow" in warnings
    [final] = after(lines, "final")
    assert final.startswith("final [0, 1, 2] [80.0, ")
    assert final.endswith("80.0] 30")
