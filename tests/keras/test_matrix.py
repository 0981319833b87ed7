"""The pairwise cover of the matrix; `make campaign` runs all cells.

A process for each Keras, a fork of a zygote, runs its cells in sequence; a test waits
for its cell.
Only selected cells run: `-k` runs a single cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.keras.matrix import (
    DATA_ON_JAX,
    KINDS,
    LINES,
    Cell,
    cells,
    cuts,
    fails_by_itself,
    pairs,
    pairwise,
)
from tests.multiprocess.harness import ROOT, Zygote, wait_until, worker_environment
from tests.multiprocess.jax_processes import Fork

PROGRAM = ROOT / "tests" / "keras" / "matrix.py"
ON_JAX = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
LIMIT = 290.0  # seconds for a cell and all cells before it


class Runner:
    """A process that runs cells of one Keras.

    Args:
        zygote: process that has imported the framework; its cache keeps compiled
            functions of JAX for the starts that follow.
        line: "keras", "tf_keras" or "jax".
        requests: cells to run; None: see `keras_alone_on_two_devices`.
        directory: directory for the files of the process.
    """

    def __init__(
        self,
        zygote: Zygote,
        line: str,
        requests: Sequence[Cell | None],
        directory: Path,
    ) -> None:
        directory.mkdir()
        records = [each and dataclasses.asdict(each) for each in requests]
        (directory / "in").write_text("".join(f"{json.dumps(r)}\n" for r in records))
        self._log = directory / "log"
        command = (str(PROGRAM), line, str(directory))
        env = worker_environment(directory) | (ON_JAX if line == "jax" else {})
        self._process = Fork(zygote, command, self._log, env, ROOT)

    def result(self, name: str, limit: float = LIMIT) -> dict[str, Any]:
        """Waits for the result of a cell."""

        def found() -> list[dict[str, Any]]:
            has_ended = self._process.poll() is not None
            lines = self.output.split("\n")[:-1]
            told = [line[7:] for line in lines if line.startswith("result ")]
            here = [each for each in map(json.loads, told) if each["id"] == name]
            assert here or not has_ended, f"the process ended:\n{self.output[-6000:]}"
            return here

        return wait_until(found, name, limit, self.output[-6000:])[0]

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def runners(
    zygote_of: Callable[[str], Zygote], requests: Sequence[Cell | None]
) -> Iterator[dict[str, Runner]]:
    """Returns a process for each requested Keras; None belongs to Keras 3."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix="tfpreempt-test-", dir=memory))
    made: dict[str, Runner] = {}
    try:
        for line in LINES:
            of_line = [r for r in requests if (r.line if r else "keras") == line]
            if of_line:
                zygote = zygote_of("keras-jax" if line == "jax" else "tensorflow")
                made[line] = Runner(zygote, line, of_line, place / line)
        yield made
    finally:
        for runner in made.values():
            runner.close()
        shutil.rmtree(place, ignore_errors=True)


def selected(request: pytest.FixtureRequest) -> list[Cell | None]:
    """Returns the cells of the selected tests of this module, in their order."""
    of_module = [item for item in request.session.items if item.path == request.path]
    values = [getattr(item, "callspec", None) for item in of_module]
    found: list[Cell | None] = [v.params["cell"] for v in values if v is not None]
    is_left_out = test_unsupported_cells_fail_without_tfpreempt_too.__name__
    return found + [None for item in of_module if item.name == is_left_out]


@pytest.fixture(scope="module")
def lines(
    request: pytest.FixtureRequest, zygote_of: Callable[[str], Zygote]
) -> Iterator[dict[str, Runner]]:
    with runners(zygote_of, selected(request)) as made:
        yield made


def check(result: dict[str, Any], cell: Cell) -> None:
    assert "error" not in result, result["error"]
    assert result["missed"] == []
    assert result["codes"] == [143] * len(cuts(cell))
    assert result["differs"] == []


with_processes = (pytest.mark.tensorflow, pytest.mark.timeout(LIMIT + 60))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=c.id, marks=with_processes) for c in pairwise(cells())],
)
def test_equals_a_run_without_interruption(
    lines: dict[str, Runner], cell: Cell
) -> None:
    """Weights, optimizer, metrics, History, CSV, and the order of the samples."""
    check(lines[cell.line].result(cell.id), cell)


@pytest.mark.tensorflow
@pytest.mark.timeout(LIMIT + 60)
def test_unsupported_cells_fail_without_tfpreempt_too(lines: dict[str, Runner]) -> None:
    """If this test fails, Keras has fixed the error: see `fails_by_itself`."""
    result = lines["keras"].result("alone")
    assert "You must feed a value for placeholder" in result["error"]


def test_the_matrix_is_whole_and_the_cover_covers_it() -> None:
    every, few = cells(), pairwise(cells())
    on_jax = (4 + len(DATA_ON_JAX)) * 2 * 7 * len(KINDS)
    assert len(every) == 2 * 4 * 2 * 2 * 6 - 24 + on_jax
    assert len(set(every)) == len(every)
    assert not any(map(fails_by_itself, every))
    for on_jax, most in ((False, 30), (True, 70)):
        here = [cell for cell in few if (cell.line == "jax") is on_jax]
        all_here = [cell for cell in every if (cell.line == "jax") is on_jax]
        assert len(here) <= most
        covered = set().union(*map(pairs, here))
        assert covered == set(itertools.chain.from_iterable(map(pairs, all_here)))
