"""The model of these programs on TensorFlow; see toy_model.py."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from toy_model import INDEX, say


def make_strategy(name: str) -> Any:
    """The strategy of that name, on CPU."""
    if name == "none":
        return tf.distribute.get_strategy()
    if name == "mwms":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, logical)
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


class Model:
    """Mirrored weights and momentum, an ON_READ sum, a data iterator, three generators.

    Args:
        strategy: value of `make_strategy`.
        mebibytes: size of additional weights, which change in each step.
    """

    def __init__(self, strategy: Any, mebibytes: int = 0) -> None:
        self.strategy = strategy
        reading = tf.VariableSynchronization.ON_READ
        summing = tf.VariableAggregation.SUM
        with strategy.scope():
            self.weights = tf.Variable(tf.linspace(-1.0, 1.0, 7))
            self.momentum = tf.Variable(tf.zeros([7]), trainable=False)
            self.trained = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.total = tf.Variable(
                0.0, synchronization=reading, aggregation=summing, trainable=False
            )
        data = tf.data.Dataset.range(1000).shuffle(20, seed=INDEX).repeat()
        self.data = iter(data)
        self.checkpoint = tf.train.Checkpoint(
            weights=self.weights,
            momentum=self.momentum,
            trained=self.trained,
            total=self.total,
            data=self.data,
        )
        self._more = None
        if mebibytes:
            with strategy.scope():
                self._more = tf.Variable(tf.zeros([mebibytes << 18]))
            self.checkpoint.more = self._more
        np.random.seed(100 + INDEX)
        random.seed(200 + INDEX)
        tf.random.set_seed(300 + INDEX)

    @property
    def steps(self) -> int:
        """How many steps it has trained."""
        return int(self.trained.numpy())

    def weights_text(self) -> str:
        """The bytes of the weights, as text."""
        return str(self.weights.numpy().tobytes().hex())

    def draw(self) -> Any:
        """Returns this worker's batch, from the worker's own data and generators."""
        row = float(next(self.data)) / 1000.0
        noise = np.random.rand(7) + random.random() + row
        return tf.constant(noise, tf.float32) + tf.random.normal([7])

    def step(self) -> None:
        """Trains one step, written like the step of a user."""
        self._distributed(self.draw())
        self.trained.assign_add(1)
        if self._more is not None:
            self._more.assign_add(tf.random.uniform(self._more.shape))

    def traced(self) -> None:
        """Called while the step is traced, and not in later steps."""

    @tf.function
    def _distributed(self, batch: Any) -> None:
        self.strategy.run(self._replica, args=(batch,))

    def _replica(self, batch: Any) -> None:
        self.traced()
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
        x = batch + 0.37 * replica
        gradient = context.all_reduce(
            tf.distribute.ReduceOp.MEAN, tf.tanh(self.weights) * x
        )
        self.momentum.assign(0.9 * self.momentum + gradient)
        self.weights.assign_sub(0.05 * self.momentum)
        self.total.assign_add(tf.reduce_sum(x * x) / 3.0)

    def digest(self) -> str:
        """Returns a digest of all values that a step changes."""
        parts = self.strategy.experimental_local_results(self.total)
        held = (self.weights, self.momentum, *parts)
        return hashlib.sha256(b"".join(v.numpy() for v in held)).hexdigest()[:16]

    def report(self, **more: object) -> None:
        """Prints everything that an exact resume must have kept."""
        parts = self.strategy.experimental_local_results(self.total)
        state = {
            "weights": self.weights_text(),
            "momentum": self.momentum.numpy().tobytes().hex(),
            "trained": self.steps,
            "total_parts": [part.numpy().tobytes().hex() for part in parts],
            "next_draw": self.draw().numpy().tobytes().hex(),
        }
        say("result", json.dumps(state | more))

    def forget_kernels(self) -> None:
        """Frees kernels: TensorFlow keeps 36 KB for each seed of an eager random op."""
        context.context().clear_kernel_cache()
