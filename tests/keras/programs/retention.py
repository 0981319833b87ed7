"""A fit with rules for its commits; prints why each commit stays, and its metrics.

Usage: retention.py DIRECTORY EPOCH. After that epoch SIGTERM arrives, once; -1: never.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import keras
import numpy as np

import tfpreempt

directory, cut = sys.argv[1], int(sys.argv[2])
is_first = not os.path.exists(directory)


class Cut(keras.callbacks.Callback):
    """The validation loss of a course of its own, and SIGTERM between two epochs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["course"] = [5, 1, 7.0, 2.0, float("nan"), 6.0, 3.0, 8.0][epoch]
        logs[epoch] = 0.5  # a name that is no text is not recorded
        if is_first and epoch == cut:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.5)


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).random((32, 3), dtype=np.float32)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
callback = tfpreempt.keras.PreemptionCallback(
    directory, keep_every=12, best_by=("course", "min", 2), async_save=False
)
model.fit(x, x, batch_size=8, epochs=8, verbose=0, callbacks=[Cut(), callback])
print(json.dumps({each.step: each.kept_because for each in callback.checkpoints()}))
