"""A small model whose every source of state is checked, and how programs hold."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfpreempt.checkpoint.bundles import bundle_writer

INDEX = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
HOLD_LIMIT = 60.0


def say(word: str, *values: object) -> None:
    """One line that the test waits for, in one piece, as threads log there too."""
    print(" ".join(map(str, (word, *values))) + "\n", end="", flush=True)


def log_to_stdout() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format=f"log [{INDEX}] %(relativeCreated)d %(levelname)s %(name)s %(message)s",
    )


def hold_file(name: str) -> Path:
    """What `Place.hold` made on the other side."""
    return Path(os.environ["HOLD_DIRECTORY"]) / f"hold-{name}"


def hold(name: str = "step") -> None:
    """Stays here, as a long step does, while the test's file is there."""
    file = hold_file(name)
    if file.exists():
        say("holding", name)
    end = time.monotonic() + HOLD_LIMIT
    while file.exists():
        if time.monotonic() > end:
            raise TimeoutError("nobody released this worker")
        time.sleep(0.002)


def say_when(word: str, *step: object) -> None:
    """A line with the time, on a clock that all processes of the machine have."""
    say(word, *step, time.monotonic())


def slow_down() -> None:
    """Takes its time in a step if `Place.slow_down` was called on the other side."""
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float(Path(os.environ["HOLD_DIRECTORY"], "slow").read_text()))


def before_asynchronous_writes(call: Callable[[], None]) -> None:
    """Asynchronous saves write each tensor from its copy, in a thread, after a call."""
    bundle_writer.SMALL_BYTES = bundle_writer.WORTH_BYTES = 0
    add = bundle_writer.add

    def held(*args: Any, check: Any, **more: Any) -> Any:
        if check is not None:
            call()
        return add(*args, check=check, **more)

    bundle_writer.add = held


def forget_kernels() -> None:
    """TensorFlow keeps one for each seed that an eager random op has drawn, 36 KB."""
    context.context().clear_kernel_cache()


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
    """Mirrored weights and momentum, an ON_READ sum, a data iterator, three RNGs."""

    def __init__(self, strategy: Any) -> None:
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
        np.random.seed(100 + INDEX)
        random.seed(200 + INDEX)
        tf.random.set_seed(300 + INDEX)

    def draw(self) -> Any:
        """This worker's batch: from its own data and its own generators."""
        row = float(next(self.data)) / 1000.0
        noise = np.random.rand(7) + random.random() + row
        return tf.constant(noise, tf.float32) + tf.random.normal([7])

    def step(self) -> None:
        """One training step, as a user writes it."""
        self._distributed(self.draw())
        self.trained.assign_add(1)

    @tf.function
    def _distributed(self, batch: Any) -> None:
        self.strategy.run(self._replica, args=(batch,))

    def _replica(self, batch: Any) -> None:
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
        """Of all that a step changes; generators and data are in what comes of them."""
        parts = self.strategy.experimental_local_results(self.total)
        held = (self.weights, self.momentum, *parts)
        return hashlib.sha256(b"".join(v.numpy() for v in held)).hexdigest()[:16]

    def report(self, **more: object) -> None:
        """Prints everything that an exact resume must have kept."""
        parts = self.strategy.experimental_local_results(self.total)
        state = {
            "weights": self.weights.numpy().tobytes().hex(),
            "momentum": self.momentum.numpy().tobytes().hex(),
            "trained": int(self.trained.numpy()),
            "total_parts": [part.numpy().tobytes().hex() for part in parts],
            "next_draw": self.draw().numpy().tobytes().hex(),
        }
        say("result", json.dumps(state | more))
