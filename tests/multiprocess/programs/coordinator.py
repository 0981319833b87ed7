"""The client of a cluster of remote workers, written like a TPU program.

The program prints `connected`, `trained STEP` after each step, `ended` after an
interrupted incarnation, and `result {...}` at the end.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import tensorflow as tf
from toy_model import hold, log_to_stdout, say

import tfpreempt

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint_dir")
parser.add_argument("--cluster", required=True)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--hold-at", type=int, nargs="*", default=[])
parser.add_argument("--exit", choices=("process", "raise", "ignore"), default="process")
parser.add_argument("--save-freq", type=int)
parser.add_argument("--grace", type=float)
parser.add_argument("--read-at", type=int, help="holds before a read of a result")
parser.add_argument("--run", action="store_true", help="steps by handler.run()")
options = parser.parse_args()


@tf.function
def endless(value: Any) -> Any:
    for _ in tf.range(1 << 60):
        value = tf.identity(value)
    return value


class Model:
    """Weights on one worker, momentum on the other; rows and noise from the client."""

    def __init__(self) -> None:
        with tf.device("/job:worker/task:0/device:CPU:0"):
            self.momentum = tf.Variable(tf.zeros([7]))
        with tf.device("/job:worker/task:1/device:CPU:0"):
            self.weights = tf.Variable(tf.linspace(-1.0, 1.0, 7))
        self.data = iter(tf.data.Dataset.range(1000).shuffle(20, seed=3).repeat())
        self.checkpoint = tf.train.Checkpoint(
            weights=self.weights, momentum=self.momentum, data=self.data
        )
        np.random.seed(1)
        tf.random.set_seed(2)

    @tf.function
    def _update(self, batch: Any) -> None:
        with tf.device(self.momentum.device):
            gradient = tf.tanh(self.weights) * batch
            self.momentum.assign(0.9 * self.momentum + gradient)
        with tf.device(self.weights.device):
            self.weights.assign_sub(0.05 * self.momentum)

    def step(self, number: int) -> None:
        row = tf.cast(next(self.data), tf.float32) / 1000.0
        self._update(np.random.rand(7).astype("float32") + row)
        if number == options.read_at:
            with tf.device(self.weights.device):
                awaited = endless(self.weights)
            hold(f"read-{number}")
            awaited.numpy()

    def report(self) -> None:
        parts = {"weights": self.weights, "momentum": self.momentum}
        found = {name: value.numpy().tobytes().hex() for name, value in parts.items()}
        say("result", json.dumps(found | {"next": int(next(self.data).numpy())}))


class PreemptedError(Exception):
    """Ends an incarnation, and not the process."""


def leave() -> None:
    say("leaves")
    if options.exit == "raise":
        raise PreemptedError


def step(model: Model, number: int) -> None:
    if number in options.hold_at:
        hold(f"at-{number}")
    model.step(number)


def train() -> bool:
    """Runs one incarnation; returns whether training is complete."""
    tfpreempt.connect_to_cluster(tf.train.ClusterSpec(json.loads(options.cluster)))
    say("connected")
    model = Model()
    handler = tfpreempt.PreemptionCheckpointHandler(
        None,
        model.checkpoint,
        options.checkpoint_dir,
        tfpreempt.GenericTerminationConfig(
            exit_fn=None if options.exit == "process" else leave,
            grace_period=options.grace,
        ),
        save_freq=options.save_freq,
    )
    try:
        with handler, handler.watch_preemption_scope():
            while handler.total_run_calls < options.steps:
                number = handler.total_run_calls + 1
                if options.run:
                    handler.run(step, model, number)
                else:
                    handler.save_checkpoint_if_preempted()
                    step(model, number)
                say("trained", number)
    except PreemptedError:
        return False
    if handler.total_run_calls < options.steps:
        return False
    model.report()
    return True


log_to_stdout()
while not train():
    say("ended")
    hold("replaced")
