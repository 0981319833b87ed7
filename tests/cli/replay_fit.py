"""A user's program with a fit of Keras 3, for `tfpreempt verify --replay`.

    replay_fit.py DIRECTORY [wrong|crash EPOCH BATCH]

After the batch a weight changes a little, or an error is raised.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from tfpreempt.keras import PreemptionCallback

directory, *fault = sys.argv[1:]
keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
layers = [keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


class Fault(keras.callbacks.Callback):
    """Changes the weight, or raises the error."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.params["now"] = str(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if fault[1:] != [self.params["now"], str(batch)]:
            return
        if fault[0] == "crash":
            raise RuntimeError("the crash of the test")
        if keras.backend.backend() == "jax":
            model.jax_state_sync()
        kernel = layers[0].kernel
        kernel.assign(kernel * 1.000001)


ours = PreemptionCallback(directory, save_freq=4)
y = x.sum(axis=1, keepdims=True)
model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[ours, Fault()])
print("at the end")
