"""Trains with JAX on the TPU of this VM; resumes after a restart, also on a new VM."""

import tfpreempt

config = tfpreempt.GceTpuTerminationConfig()
tfpreempt.handle_early_notices(config)  # handles notices from here on

import jax  # noqa: E402 - JAX takes a while to initialize the TPU
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from tfpreempt.states import PyTreeState  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("data",))
by_row = NamedSharding(mesh, PartitionSpec("data"))
everywhere = NamedSharding(mesh, PartitionSpec())
weights = jax.device_put(jnp.zeros([8, 1]), everywhere)
state = PyTreeState("training", {"weights": weights, "key": jax.random.key(1)})


@jax.jit
def update(value):
    """Trains on one batch, which is divided among the cores of the TPU."""
    key, batch_key = jax.random.split(value["key"])
    x = jax.random.normal(batch_key, [1024, 8])
    x = jax.lax.with_sharding_constraint(x, by_row)

    def loss(weights):
        return jnp.mean((x @ weights - x.sum(axis=1, keepdims=True)) ** 2)

    weights = value["weights"] - 0.01 * jax.grad(loss)(value["weights"])
    return {"weights": weights, "key": key}


def train_step():
    """Runs one step."""
    state.value = update(state.value)


with tfpreempt.PreemptionCheckpointHandler(
    None, None, "/srv/ckpt/train", config, save_freq=1000
) as handler:
    while handler.total_run_calls < 10_000:
        handler.run(train_step)
