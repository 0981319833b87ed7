"""The training program of the demo on JAX: a custom loop, or `model.fit`.

Every worker process runs this file under `tfpreempt run`, which sets the address of
JAX's coordination service and starts the file again after every preemption. Numbered
comments mark the lines that tfpreempt needs.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tfpreempt
from tfpreempt.cli.demo import training
from tfpreempt.states import PyTreeState


def train_by_loop(model: keras.Model, steps: int, seed: int) -> None:
    """Trains in a custom loop; after a restart, continues to the last step.

    Args:
        model: compiled model.
        steps: number of training steps over all restarts.
        seed: seed of the batches.
    """
    (images, labels), _ = training.load_digits()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(array: Any, sharding: NamedSharding = everywhere) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    variables = [model.trainable_variables, model.non_trainable_variables]
    variables.append(model.optimizer.variables)
    # 1. Each commit has the arrays of the State; a restart puts them in again.
    state = PyTreeState("training", jax.tree.map(place, variables))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def update(values: Any, x: jax.Array, y: jax.Array) -> Any:
        trainable, others, optimizer = values

        def loss_of(trainable: Any) -> Any:
            guesses, new = model.stateless_call(trainable, others, x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, guesses)
            return losses.mean(), new

        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), gradients = gradient(trainable)
        new = model.optimizer.stateless_apply(optimizer, gradients, trainable)
        return [new[0], others, new[1]], loss

    def step_function(step: int) -> float:
        rows = training.draw_batch(seed, step, jax.process_count())
        batch = place(images[rows], by_row), place(labels[rows], by_row)
        state.value, loss = update(state.value, *batch)
        return float(loss)

    # 2. The handler restores the newest committed checkpoint, if there is one.
    handler = tfpreempt.PreemptionCheckpointHandler(None, None, training.CHECKPOINTS)
    with handler:
        # 3. The handler knows how many steps are done, over all restarts.
        for step in range(handler.total_run_calls, steps):
            # 4. Every step is run by `run()`. The batch depends only on the step, so no
            # position in the data must be saved.
            training.report(step, handler.run(step_function, step))
    pairs = zip(*map(jax.tree.leaves, (variables, state.value)), strict=True)
    for variable, value in pairs:
        variable.assign(np.asarray(value))


def main(out: Path, way: str, steps: int, seed: int) -> None:
    """Trains the model, prints every step, and saves the result."""
    if (workers := int(os.environ.get("JAX_NUM_PROCESSES", "1"))) > 1:
        worker = int(os.environ["JAX_PROCESS_ID"])
        jax.distributed.initialize(num_processes=workers, process_id=worker)
    # Not by keras.utils.set_random_seed, which imports TensorFlow if it is installed.
    random.seed(seed)
    np.random.seed(seed)
    model = training.build_model()
    if way == "fit":
        training.fit(model, steps, workers)
    else:
        train_by_loop(model, steps, seed)
    training.save_result(out, jax.process_index(), model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
