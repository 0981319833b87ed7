"""A user's program with a loop, on TensorFlow or JAX, in whose data a batch is bad.

    loop_bad_steps.py FRAMEWORK DIRECTORY FEED BAD KIND [NOTICE]

FEED is "iterator", or "number" if the step gets the number of the batch. KIND is
"loss", or "variable" if the batch makes a variable NaN, and the loss stays finite, or
"unclosed" if the program does not close its handler.
In step NOTICE the program sends itself SIGTERM. After the loop, the program trains on
data without the batch, and prints whether the results are equal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tfpreempt
from tfpreempt.states import JsonState, PyTreeState

framework, directory, feed, kind = (*sys.argv[1:4], sys.argv[5])
bad, notice = int(sys.argv[4]), [int(each) for each in sys.argv[6:]]
STEPS = 9
batches = np.random.default_rng(0).normal(size=(STEPS, 4, 3)).astype("float32")
batches[bad] = np.nan
Step = Callable[[Any], Any]


class Position(Iterator[Any]):
    """An iterator over batches, whose position is saved."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.at = JsonState("position", 0)

    def __next__(self) -> Any:
        self.at.value += 1
        return batches[self.numbers[self.at.value - 1]]


def on_tensorflow(numbers: list[int]) -> tuple[Any, Any, Step, Callable[[], Any]]:
    """Returns the checkpoint, the iterator, the step and the final values."""
    import tensorflow as tf

    tf.random.set_seed(3)
    tf.random.get_global_generator().reset_from_seed(3)
    weights = tf.Variable(tf.zeros([3]))
    objects = tf.train.Checkpoint(weights=weights)
    data = iter(tf.data.Dataset.from_tensor_slices(batches[numbers]))
    objects.data = data

    @tf.function
    def update(batch: Any) -> Any:
        batch += tf.random.get_global_generator().normal([4, 3])
        objects.momentum.assign(0.9 * objects.momentum + tf.reduce_mean(batch, 0))
        weights.assign_sub(0.1 * objects.momentum)
        loss = tf.reduce_sum(batch**2)
        return loss if kind != "variable" else tf.where(tf.math.is_nan(loss), 0.0, loss)

    def step(batch: Any) -> Any:
        if not hasattr(objects, "momentum"):  # created by the first step
            objects.momentum = tf.Variable(tf.zeros([3]))
        return update(next(batch) if batch is data else batches[numbers[batch]])

    def values() -> Any:
        return [each.numpy().tobytes() for each in (weights, objects.momentum)]

    return objects, data, step, values


def on_jax(numbers: list[int]) -> tuple[Any, Any, Step, Callable[[], Any]]:
    """Like `on_tensorflow`; the checkpoint is None."""
    import jax
    import jax.numpy as jnp

    tree = {"w": jnp.zeros(3), "key": jax.random.key(1)}
    state, data = PyTreeState("training", tree), Position(numbers)

    @jax.jit
    def update(tree: Any, batch: Any) -> Any:
        key, noise = jax.random.split(tree["key"])
        batch += jax.random.normal(noise, batch.shape)
        loss = jnp.sum(batch**2)
        loss = loss if kind != "variable" else jnp.nan_to_num(loss)
        return {"w": tree["w"] - 0.1 * batch.mean(0), "key": key}, loss

    def step(batch: Any) -> Any:
        given = next(batch) if batch is data else batches[numbers[batch]]
        state.value, loss = update(state.value, given)
        return {"loss": loss}

    def values() -> Any:
        state.unregister()
        data.at.unregister()
        assert data.at.value == (len(numbers) if feed == "iterator" else 0)
        arrays = state.value["w"], jax.random.key_data(state.value["key"])
        return [np.asarray(each).tobytes() for each in arrays]

    return None, data, step, values


def trained(numbers: list[int], *, is_resumable: bool) -> Any:
    on = on_tensorflow if framework == "tensorflow" else on_jax
    checkpoint, data, step, values = on(numbers)
    if not is_resumable:
        for number in range(len(numbers)):
            step(data if feed == "iterator" else number)
        return values()
    handler = tfpreempt.PreemptionCheckpointHandler(
        None,
        checkpoint,
        directory,
        save_freq=3 if kind == "unclosed" else 2,
        on_bad_step=tfpreempt.BadSteps(),
    )
    with contextlib.nullcontext() if kind == "unclosed" else handler:
        for number in range(handler.total_run_calls, len(numbers)):
            if number in notice:
                os.kill(os.getpid(), signal.SIGTERM)
            given = data if feed == "iterator" else number
            handler.run(step, given)
    return values()


result = trained([*range(STEPS)], is_resumable=True)
rest = [each for each in range(STEPS) if each != bad]
print("equal", result == trained(rest, is_resumable=False))
