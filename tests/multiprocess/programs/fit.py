"""A user's program with `model.fit`, on either Keras, that a test can interrupt.

It prints `began` before the fit, `trained EPOCH BATCH` after each batch, `validates EPOCH
BATCH` before each batch of the validation, and what it ended with as `result {...}`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import time
from typing import Any

import numpy as np
import tensorflow as tf
from toy_model import hold, log_to_stdout, make_strategy, say

import tfpreempt.keras

BATCH = 8
VALIDATION_BATCHES = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint_dir")
    parser.add_argument("--line", default="keras", help="keras or tf_keras")
    parser.add_argument("--data", default="tfdata")
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6, help="of an epoch")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, each batch")
    parser.add_argument("--hold-at", default="", help="such as begin:1:4; see Watch")
    parser.add_argument("--save-every", type=int, help="batches; not each epoch")
    parser.add_argument("--plain", action="store_true", help="without our callback")
    return parser.parse_args()


options = parse()
keras = importlib.import_module(options.line)
rng = np.random.default_rng(0)
# The first column numbers the rows; a layer takes it off.
rows = np.arange(options.batches * BATCH, dtype="float32")
x = np.column_stack([rows, rng.standard_normal((len(rows), 5), "float32")])
y = x[:, 1:2] * 2 + x[:, 2:3]
validation = x[: VALIDATION_BATCHES * BATCH], y[: VALIDATION_BATCHES * BATCH]


class Order(keras.layers.Layer):
    """Takes off the numbers of the rows; a weight remembers which came in which order.

    Each replica has its own value, as it has its own rows.
    """

    def build(self, input_shape: Any) -> None:
        more: dict[str, Any] = {}
        if options.line == "tf_keras":  # Keras 3 lets each replica assign its own
            more["synchronization"] = tf.VariableSynchronization.ON_READ
            more["aggregation"] = tf.VariableAggregation.SUM
        self.seen = self.add_weight(
            name="seen", shape=(), dtype="int64", trainable=False, **more,
            initializer="zeros",
        )  # fmt: skip

    def call(self, inputs: Any, training: Any = None) -> Any:
        if training:
            numbers = tf.cast(inputs[:, 0], tf.int64) + 1
            factors = tf.math.cumprod(tf.fill(tf.shape(numbers), tf.int64.limits[0]+3))
            self.seen.assign(self.seen * 1_000_003 + tf.reduce_sum(numbers * factors))
        return inputs[:, 1:]
