"""Variables of custom loops that contain NaN, on JAX and on TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.process import new_process
from tfpreempt import BadSteps, PreemptionCheckpointHandler, errors
from tfpreempt.checkpoint.state.state import REGISTRY

pytestmark = pytest.mark.slow  # imports JAX
jax = pytest.importorskip("jax")
jnp = jax.numpy

from tfpreempt.jax import values  # noqa: E402
from tfpreempt.states import PyTreeState  # noqa: E402


@pytest.fixture(autouse=True)
def no_states() -> Iterator[None]:
    with new_process():
        yield
    for left in REGISTRY.in_order():
        left.unregister()


def trained(
    directory: Path, *added: float, start: float = 0, dtype: Any = None, **options: Any
) -> Any:
    """Runs a loop in whose steps a number is added to a leaf; returns the leaf.

    Args:
        directory: checkpoint directory.
        *added: the numbers.
        start: initial value of an element.
        dtype: dtype of the leaf.
        **options: arguments of the handler.
    """
    for each in REGISTRY.in_order():
        each.unregister()
    mask = jnp.array([0, -jnp.inf])
    tree = {"w": jnp.array([0, start], dtype or jnp.float32), "mask": mask}
    state = PyTreeState("tree", tree)

    def step(number: int) -> float:
        state.value = state.value | {"w": state.value["w"] + added[number]}
        return 0.0

    with PreemptionCheckpointHandler(None, None, directory, **options) as handler:
        for number in range(handler.total_run_calls, len(added)):
            handler.run(step, number)
    return state.value["w"].tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_step_that_makes_a_leaf_bad_is_found(tmp_path: Path, dtype: Any) -> None:
    """A mask that is infinite is not bad."""
    added = [1, 1, 1, np.nan, 1, np.nan, 1]
    options = {"on_bad_step": BadSteps(), "dtype": dtype}
    for _ in range(3):  # one search finds both steps
        with pytest.raises(SystemExit):
            trained(tmp_path, *added, **options)
    assert trained(tmp_path, *added, **options) == [5, 5]
    with pytest.raises(errors.BadStepsError, match="step 3, step 5"):
        trained(tmp_path, *added, on_bad_step=BadSteps(limit=1), dtype=dtype)


def test_a_leaf_that_becomes_infinite_is_not_bad(tmp_path: Path) -> None:
    """A restart must not change which steps are bad: a program may set the smallest
    loss to infinity in each epoch."""
    added = [1, np.inf, 1]
    assert trained(tmp_path, *added, on_bad_step=BadSteps()) == [np.inf] * 2


def test_a_commit_with_nan_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, np.nan)
    text = r"In the newest commit of .* The leaf \['w'\] of .* contains NaN"
    with pytest.raises(errors.BadStepsError, match=text):
        trained(tmp_path, 1, 1, on_bad_step=BadSteps())


def test_nan_before_the_first_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.BadStepsError, match="before the first step"):
        trained(tmp_path, 1, start=np.nan, on_bad_step=BadSteps())


def test_finite_leaves_with_an_infinite_sum_are_not_named() -> None:
    leaves = {
        "large": jnp.full(4, 3e38, jnp.float32),
        "half": np.full(4, 6e4, np.float16),
        "count": jnp.zeros(2, int),
        "key": jax.random.key(0),
        "rate": 0.5,
        "nan": np.array([np.nan, 1.0]),
    }
    state = PyTreeState("leaves", leaves)
    found = list(values.with_nan(None, [state]))
    assert found == [f"The leaf ['nan'] of {state!r}"]


@pytest.mark.tensorflow
def test_variables_of_a_checkpoint_are_named_by_path() -> None:
    tf = pytest.importorskip("tensorflow")
    from tfpreempt.checkpoint.tensors import program_values

    model = tf.Module()
    model.blocks = [tf.Variable([1.0, np.nan]), tf.Variable([3e38, 3e38])]
    model.rate = tf.Variable(np.inf, dtype=tf.bfloat16, trainable=False)
    model.count = tf.Variable(1)
    found = program_values.with_nan(tf.train.Checkpoint(model=model), ())
    assert list(found) == ["the variable 'model/blocks/0'"]
    assert list(program_values.with_nan(None, ())) == []


@pytest.mark.tensorflow
@pytest.mark.slow  # a process with two devices
def test_each_replica_of_a_variable_that_is_reduced_is_checked() -> None:
    """The replicas of an ON_READ variable differ, and a save reduces them."""
    program = textwrap.dedent(
        """
        import numpy as np, tensorflow as tf
        from tfpreempt.checkpoint.tensors import program_values
        [cpu] = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, logical)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            kind = tf.VariableSynchronization.ON_READ
            how = tf.VariableAggregation.MEAN
            mean = tf.Variable(0.0, synchronization=kind, aggregation=how)
        checkpoint = tf.train.Checkpoint(mean=mean)
        assert not list(program_values.with_nan(checkpoint, ()))
        mean.values[1].assign(np.nan)
        print(*program_values.with_nan(checkpoint, ()))
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert result.stdout.startswith("the variable 'mean'")
