"""Trains with JAX on the nodes of a SkyPilot job; resumes on other nodes."""

import os

import tfpreempt

tfpreempt.handle_early_notices()  # from here on, of the cloud that is detected

import jax  # noqa: E402 - JAX takes a while to connect the processes
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from tfpreempt.states import PyTreeState  # noqa: E402

jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
    process_id=int(os.environ["JAX_PROCESS_ID"]),
)
mesh = Mesh(np.array(jax.devices()), ("data",))
by_row = NamedSharding(mesh, PartitionSpec("data"))
everywhere = NamedSharding(mesh, PartitionSpec())


def place(array, sharding):
    """Returns a NumPy array on the devices of all processes."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def batch(step):
    """Returns the batch of a step, which is equal in every start."""
    x = np.random.default_rng(step).normal(size=(1024, 8)).astype("float32")
    return place(x, by_row), place(x.sum(axis=1, keepdims=True), by_row)


@jax.jit
def update(weights, x, y):
    """Returns the weights after a step of gradient descent."""

    def loss(weights):
        return jnp.mean((x @ weights - y) ** 2)

    return weights - 0.01 * jax.grad(loss)(weights)


weights = place(np.zeros([8, 1], "float32"), everywhere)
state = PyTreeState("training", {"weights": weights})


def train_step(step):
    """Runs one step on all processes."""
    state.value = {"weights": update(state.value["weights"], *batch(step))}


with tfpreempt.PreemptionCheckpointHandler(
    None, None, os.environ["CHECKPOINT_DIR"], save_freq=1000
) as handler:
    for step in range(handler.total_run_calls, 10_000):
        handler.run(train_step, step)
