"""`model.fit` that logs to a tracker; a restart continues the same run.

Usage: fit.py CHECKPOINTS
"""

import sys

import keras
import numpy as np

import tfpreempt


def train(directory, tracker, epochs=20, save_freq=100):
    """Trains up to an epoch, starting from the newest commit in the directory."""
    keras.utils.set_random_seed(7)
    x = np.random.rand(640, 3).astype("float32")
    y = x @ np.float32([[1.0], [2.0], [3.0]])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    callback = tfpreempt.keras.PreemptionCallback(directory, save_freq=save_freq)
    model.fit(
        x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[callback, tracker]
    )


if __name__ == "__main__":
    tracker = tfpreempt.trackers.tensorboard("logs", config={"optimizer": "adam"})
    train(sys.argv[1], tracker)
