"""Each worker's own State is restored by its rule if the number of workers changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from tests.checkpoint.fakes import Words, open_directory, write_part
from tfpreempt.checkpoint.state.state import State, StateRegistry
from tfpreempt.errors import CheckpointMismatchError
from tfpreempt.states import NumpyRandomState, PythonRandomState

Make = Callable[[StateRegistry, int], State]


class Joined(Words):
    """The words of all workers, on worker 0."""

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, world: int
    ) -> None:
        words = [file.read().decode() for file in files if file is not None]
        self.text = " ".join(words) if worker == 0 else ""


def save(directory: Path, world: int, make: Make) -> list[State]:
    """Saves the States of a number of workers; returns their values."""
    states, staged = [], []
    savers = []
    for worker in range(world):
        registry = StateRegistry()
        states.append(make(registry, worker))
        savers.append(
            open_directory(directory, worker=worker, world=world, registry=registry)
        )
    for saver in reversed(savers):  # the chief last: it commits
        staged.append(write_part(saver, 5, "run-5"))
    staged[-1].publish("save", range(world))
    return states


def restore(directory: Path, world: int, make: Make) -> list[State]:
    """Returns the States of a number of workers after a restart."""
    states = []
    for worker in range(world):
        registry = StateRegistry()
        states.append(make(registry, worker))
        saver = open_directory(directory, worker=worker, world=world, registry=registry)
        saver.restore(saver.newest())
    return states


def words(registry: StateRegistry, worker: int) -> State:
    return Words("w", f"of {worker}", per_worker=True, registry=registry)


def test_without_a_rule_the_restart_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2, words)
    with pytest.raises(
        CheckpointMismatchError, match=r"by 2 workers, and this run has 3"
    ):
        restore(tmp_path, 3, words)
    assert [state.text for state in restore(tmp_path, 2, words)] == ["of 0", "of 1"]


def test_a_reshard_rule_gets_the_files_of_all_workers(tmp_path: Path) -> None:
    def joined(registry: StateRegistry, worker: int) -> State:
        return Joined("w", f"of {worker}", per_worker=True, registry=registry)

    save(tmp_path, 3, joined)
    found = restore(tmp_path, 2, joined)
    assert [state.text for state in found] == ["of 0 of 1 of 2", ""]


def test_a_state_of_the_chief_needs_no_rule(tmp_path: Path) -> None:
    def shared(registry: StateRegistry, worker: int) -> State:
        return Words("w", f"of {worker}", registry=registry)

    save(tmp_path, 2, shared)
    assert [state.text for state in restore(tmp_path, 3, shared)] == ["of 0"] * 3


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_the_generator_of_a_new_worker_is_derived_from_the_chiefs(
    tmp_path: Path, kind: str
) -> None:
    def make(registry: StateRegistry, worker: int) -> State:
        if kind == "python":
            made: State = PythonRandomState(
                "rng", random.Random(worker), per_worker=True, registry=registry
            )
        else:
            made = NumpyRandomState(
                "rng", np.random.default_rng(worker), per_worker=True, registry=registry
            )
        return made

    def draws(states: Sequence[State]) -> list[float]:
        return [float(state._generator.random()) for state in states]

    before = save(tmp_path, 2, make)
    first, second = (draws(restore(tmp_path, 4, make)) for _ in range(2))
    assert first == second  # each restart derives the same
    assert first[:2] == draws(before)
    assert len(set(first)) == 4
