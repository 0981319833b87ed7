"""Arrays of JAX that a step replaces and no commit holds are named, once."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.process import new_process

pytestmark = pytest.mark.slow  # imports JAX
jax = pytest.importorskip("jax")
jnp = jax.numpy

from tfpreempt import PreemptionCheckpointHandler  # noqa: E402
from tfpreempt.checkpoint.state.state import REGISTRY  # noqa: E402
from tfpreempt.jax import values  # noqa: E402
from tfpreempt.states import (  # noqa: E402
    ArrayDictState,
    NumpyRandomState,
    PyTreeState,
    StepCounter,
)

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

    with new_process():
        yield run


def test_global_trees_that_no_state_holds(
    warned: Callable[..., list[str]],
) -> None:
    global params, momentum
    params, momentum = {"w": jnp.zeros(3)}, jnp.zeros(3)
    counter = StepCounter()
    [line] = warned(step_of_globals)
    assert names(line) == ["momentum", "params"]
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


@jax.tree_util.register_pytree_node_class
class Module:
    """A pytree that replaces its arrays, like a module of Flax NNX."""

    def __init__(self, weights: Any, count: Any) -> None:
        self.weights, self.count = weights, count

    def update(self) -> None:
        self.__init__(self.weights * 0.5, self.count + 1)  # type: ignore[misc]

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.weights, self.count), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Module:
        return cls(*children)


class Keys:
    """An iterator of random keys, which replaces its key in several statements."""

    def __init__(self) -> None:
        self.key = jax.random.key(0)

    def __iter__(self) -> Keys:
        return self

    def __next__(self) -> Any:
        key, other = jax.random.split(self.key)
        self.key = key
        return other


def changing(made: dict[str, Any]) -> Callable[[], None]:
    """Returns a step with objects that replace their own arrays."""
    module = made["module"] = Module(jnp.ones(4), jnp.int32(0))
    other = made["other"] = Module(jnp.ones(2), jnp.int32(0))
    keys, settings = Keys(), argparse.Namespace(key=jax.random.key(1))

    def step() -> None:
        module.update()
        other.update()
        next(keys)
        vars(settings)["key"] = jax.random.split(settings.key)[0]

    return step


def names(line: str) -> list[str]:
    return sorted(re.findall("commits: (.*?)\\. A restarted", line)[0].split(", "))


def test_objects_that_replace_their_arrays(warned: Callable[..., list[str]]) -> None:
    counter = StepCounter()
    [line] = warned(changing({}))
    assert names(line) == ["keys.key", "module", "other", "settings"]
    counter.unregister()


def test_a_reference_of_jax(warned: Callable[..., list[str]]) -> None:
    if not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no references")
    counter, total = StepCounter(), jax.new_ref(jnp.zeros(3))

    def step() -> None:
        total[...] += 1.0

    [line] = warned(step)
    assert names(line) == ["total"]
    counter.unregister()


@pytest.mark.parametrize("copied", [list, jax.device_get, copy.deepcopy])
def test_arrays_that_a_state_has_or_has_copied_are_saved(
    copied: Callable[[Any], Any], warned: Callable[..., list[str]]
) -> None:
    made: dict[str, Any] = {}
    update, state = changing(made), PyTreeState("trained", None)

    def step() -> None:
        update()
        state.value = copied([*made.values()])

    [line] = warned(step)
    assert names(line) == ["keys.key", "settings"]
    state.unregister()


def test_a_copy_of_a_counter_does_not_save_an_equal_counter(
    warned: Callable[..., list[str]],
) -> None:
    made: dict[str, Any] = {}
    update, state = changing(made), PyTreeState("trained", None)
    one, other = made.values()

    def step() -> None:
        update()
        state.value = jax.device_get([one, other.weights])

    [line] = warned(step)
    assert "other" in names(line)
    state.unregister()


def test_arrays_copied_to_numpy_are_saved_and_a_list_that_grows_is_not(
    warned: Callable[..., list[str]],
) -> None:
    trainer, kept = Trainer(), ArrayDictState("kept")
    average = np.zeros(3)

    losses: list[Any] = []

    def step() -> None:
        nonlocal average
        losses.append(jnp.float32(1))
        average = 0.9 * average + 1
        trainer.params, _ = train(trainer.params)
        kept.arrays["w"] = np.array(trainer.params["w"])

    [line] = warned(step)
    assert names(line) == ["average", "losses"]
    kept.unregister()


@pytest.mark.parametrize("skips", [False, True])
def test_a_batch_of_numpy_that_a_step_reads_itself_is_compared(
    tmp_path: Path, skips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A State has its first value again in each second step, and is no batch."""
    batches = np.arange(24.0).reshape(6, 4)
    state = PyTreeState("sums", jnp.zeros(4))
    counts = ArrayDictState("counts", {"n": np.zeros(4)})

    def step(batch: Any) -> None:
        state.value = jnp.zeros(4) if state.value.any() else state.value + batch + 1
        counts.arrays["n"] = np.asarray(state.value)

    for _ in range(2):
        with (
            contextlib.suppress(InterruptedError),
            new_process(),
            PreemptionCheckpointHandler(
                None, None, tmp_path / "ckpt", save_freq=2
            ) as handler,
        ):
            begin = handler.total_run_calls if skips else 0
            for batch in batches[begin : begin + 3]:
                handler.run(lambda: step(batch))  # noqa: B023
            raise InterruptedError
    found = [each for each in caplog.messages if "does not get the values" in each]
    assert len(found) == (not skips)
    assert skips or "without the restart: batch. " in found[0]
    state.unregister()
    counts.unregister()


@pytest.mark.parametrize(
    ("is_in_front", "saves", "named"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_states_that_a_restarted_loop_changes_in_front_of_its_step_are_named(
    tmp_path: Path,
    is_in_front: bool,
    saves: bool,
    named: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A commit at the beginning of `run()` has the key after the split, and the restart
    splits the key again. A commit of `save()` has the key before the split."""
    first = {"w": jnp.zeros(3), "key": jax.random.key(0), "rate": 0.0}
    state, rng = PyTreeState("training", first), np.random.default_rng(1)
    numbers = NumpyRandomState("numbers", rng)

    def step(key: Any) -> None:
        state.value = {**state.value, "w": jax.random.normal(key, 3)}

    for end in (3, 6):
        with (
            contextlib.suppress(InterruptedError),
            new_process(),
            PreemptionCheckpointHandler(
                None, None, tmp_path / "ckpt", save_freq=None if saves else 2
            ) as handler,
        ):
            assert handler.total_run_calls == (0 if end == 3 else 2)
            for number in range(handler.total_run_calls, end):
                state.value = {**state.value, "rate": number / 2}  # as in the commit
                key, other = jax.random.split(state.value["key"])
                if is_in_front:
                    state.value = {**state.value, "key": key}
                    rng.random()
                handler.run(step, other)
                state.value = {**state.value, "key": key}
                if saves and number == 1:
                    handler.save()
            raise InterruptedError
    begins = "the program has changed variables after the restore and before the first"
    found = [each for each in caplog.messages if each.startswith(begins)]
    assert len(found) == named
    assert not named or " step: numbers, training['key']. So this run" in found[0]
    state.unregister()
    numbers.unregister()


def test_arrays_that_a_step_has_donated_are_not_named(
    warned: Callable[..., list[str]],
) -> None:
    global params
    params = old = (jnp.zeros(3), jnp.zeros(3))
    state = PyTreeState("donated", params)
    double = jax.jit(lambda tree: jax.tree.map(jnp.sin, tree), donate_argnums=0)

    def step() -> None:
        global params
        params = params if old[0].is_deleted() else old
        state.value = double(state.value)

    assert warned(step) == []
    assert old[0].is_deleted()
    state.unregister()


def test_attributes_that_jax_cannot_flatten_cost_no_recursion_limit() -> None:
    """JAX loses some levels with each error: a long loop ended with RecursionError."""
    cycle: list[Any] = []
    cycle.append(cycle)
    array = jnp.zeros(1)
    of_library = argparse.Namespace(mixed=[[{1: [2], "a": 3}]], cycle=cycle, x=array)

    def recurse(left: int) -> None:
        if left:
            recurse(left - 1)

    for _ in range(300):
        assert values.arrays(of_library) == [array]
    recurse(500)


def test_iterators_and_views_are_leaves() -> None:
    """A later version of JAX raises an error for them, says its warning."""
    array = jnp.zeros(3)
    tree = {"a": array, "views": {}.values(), "items": [iter([1]), map(abs, [1])]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values.arrays(tree) == [array]
        assert values.arrays(number for number in [1]) == []


def test_a_handler_without_any_state_is_named(
    warned: Callable[..., list[str]],
) -> None:
    for left_by_other_tests in REGISTRY.in_order():
        left_by_other_tests.unregister()
    [line] = warned(lambda: None)
    assert line.startswith("no State is registered, so the commits hold only")
