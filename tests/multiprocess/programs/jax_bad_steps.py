"""A user's program with a fit of Keras on JAX, in whose data a batch is bad.

    jax_bad_steps.py DIRECTORY BATCH EPOCHS

After the fit, the program trains on data without the batch, and prints whether the
results are equal.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from tfpreempt.keras import BadSteps, PreemptionCallback

directory, bad, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
x = np.random.default_rng(0).normal(size=(8, 4, 3)).astype("float32")
y = x.sum(axis=2, keepdims=True)
y[bad] = np.nan


class Batches(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return x[self.numbers[index]], y[self.numbers[index]]


def trained(numbers: list[int], *callbacks: Any) -> Any:
    # Not by keras.utils.set_random_seed, which imports an installed TensorFlow.
    random.seed(7)
    np.random.seed(7)
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    fitted = model.fit(
        Batches(numbers), epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    metrics = [each for metric in model.metrics for each in metric.variables]
    found = [*model.variables, *model.optimizer.variables, *metrics]
    return [np.asarray(each).tobytes() for each in found], fitted.history


ours = PreemptionCallback(directory, save_freq=2, on_bad_step=BadSteps())
result = trained([*range(8)], ours)
print("equal", result == trained([each for each in range(8) if each != bad]))
