"""Trains on data with a cache in files; kills itself after so many steps.

Usage: cached.py CHECKPOINT_DIR KIND STEPS. KIND is "keras", "tf_keras" or "loop". STEPS
0 means that the program is not killed, and -1 that the program is killed while it
writes the cache, before the journal has a record of the cache. Prints the weights as
"result".
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpreempt import PreemptionCheckpointHandler
from tfpreempt.checkpoint.state.unfinished_caches import written_caches
from tfpreempt.handler import run
from tfpreempt.keras import PreemptionCallback

DIRECTORY, KIND, KILL_AFTER = sys.argv[1], sys.argv[2], int(sys.argv[3])
EPOCHS, BATCHES = 2, 8
made = 0


def made_step(*_: Any, **__: Any) -> None:
    global made
    made += 1
    if made == KILL_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_before_the_record() -> list[tuple[str, int]]:
    if written_caches():
        os.kill(os.getpid(), signal.SIGKILL)
    return []


if KILL_AFTER < 0:
    run.written_caches = killed_before_the_record


def data() -> Any:
    cache = Path(DIRECTORY).with_name("cache")
    cache.mkdir(exist_ok=True)
    numbers = tf.data.Dataset.range(4 * BATCHES).map(lambda n: tf.cast([n], tf.float32))
    numbers = numbers.map(lambda n: (n / 10.0, n)).cache(str(cache / "numbers"))
    return numbers.shuffle(6, seed=3).batch(4)


def train_fit() -> Any:
    keras = importlib.import_module(KIND)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    last = keras.callbacks.LambdaCallback(on_train_batch_end=made_step)
    ours = PreemptionCallback(DIRECTORY)
    model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=[ours, last])
    return model.get_weights()


def train_loop() -> Any:
    weight, iterator = tf.Variable(1.0), iter(data().repeat(EPOCHS))
    checkpoint = tf.train.Checkpoint(weight=weight, iterator=iterator)

    def step() -> None:
        x, y = next(iterator)
        weight.assign_sub(1e-3 * tf.reduce_mean((weight * x - y) * x))

    with PreemptionCheckpointHandler(None, checkpoint, DIRECTORY) as handler:
        while handler.total_run_calls < EPOCHS * BATCHES:
            handler.run(step)
            made_step()
    return [weight.numpy()]


weights = train_loop() if KIND == "loop" else train_fit()
print("result", b"".join(each.tobytes() for each in weights).hex(), flush=True)
