"""Arrays of JAX that a step replaces and no commit holds are named, once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tfpreempt.handler import current_session

pytestmark = pytest.mark.slow  # imports JAX
jax = pytest.importorskip("jax")
jnp = jax.numpy

from tfpreempt import PreemptionCheckpointHandler  # noqa: E402
from tfpreempt.checkpoint.state.state import REGISTRY  # noqa: E402
from tfpreempt.states import PyTreeState, StepCounter  # noqa: E402

params: Any = None
momentum: Any = None
loss: Any = None


class Trainer:
    """Holds its arrays in attributes."""

    def __init__(self) -> None:
        self.params, self.key = {"w": jnp.zeros(3)}, jax.random.key(0)

    def step(self) -> None:
        self.params, self.loss = train(self.params)
        self.key, _ = jax.random.split(self.key)


@jax.jit
def train(tree: Any, more: float = 1.0) -> Any:
    return jax.tree.map(lambda leaf: leaf + more, tree), 0.0


def step_of_globals() -> None:
    global params, momentum, loss
    params, loss = train(params)
    momentum, _ = train(momentum)


@pytest.fixture
def warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., list[str]]]:
    """Returns the warnings of a run of three steps."""

    def run(step: Callable[[], None]) -> list[str]:
        with (
            caplog.at_level(logging.WARNING),
            PreemptionCheckpointHandler(None, None, tmp_path / "ckpt") as handler,
        ):
            for _ in range(3):
                handler.run(step)
        return [each.getMessage() for each in caplog.records]

    with current_session.new_process():
        yield run


def test_global_trees_that_no_state_holds(
    warned: Callable[..., list[str]],
) -> None:
    global params, momentum
    params, momentum = {"w": jnp.zeros(3)}, jnp.zeros(3)
    counter = StepCounter()
    [line] = warned(step_of_globals)
    named = re.findall("not in the commits: (.*?)\\. A restarted", line)[0]
    assert sorted(named.split(", ")) == ["momentum", "params"]
    assert "into a tfpreempt.states.PyTreeState" in line
    counter.unregister()


def test_attributes_of_an_object_that_no_state_holds(
    warned: Callable[..., list[str]],
) -> None:
    counter, trainer = StepCounter(), Trainer()
    [line] = warned(trainer.step)
    assert "self.params" in line
    assert "self.key" in line
    assert "self.loss" not in line
    counter.unregister()


def test_a_tree_in_a_state_is_saved(warned: Callable[..., list[str]]) -> None:
    state = PyTreeState("params", {"w": jnp.zeros(3)})

    def step() -> None:
        state.value, _ = train(state.value)

    assert warned(step) == []
    state.unregister()


def test_a_handler_without_any_state_is_named(
    warned: Callable[..., list[str]],
) -> None:
    for left_by_other_tests in REGISTRY.in_order():
        left_by_other_tests.unregister()
    [line] = warned(lambda: None)
    assert line.startswith("no State is registered, so the commits hold only")
