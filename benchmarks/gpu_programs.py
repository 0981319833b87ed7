"""The programs that `benchmarks.gpu` starts.

Usage: python -m benchmarks.gpu_programs fit FRAMEWORK DIRECTORY BATCH
       python -m benchmarks.gpu_programs notice DIRECTORY MEBIBYTES
       python -m benchmarks.gpu_programs save DIRECTORY MEBIBYTES
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SAMPLES, SIZE, BATCH = 128, 32, 8
NOTICED_WITHIN = 1.0  # seconds in which a thread takes the notice


def fit(framework: str, directory: str, preempted_at: str) -> None:
    """Trains a small convolutional network for two epochs.

    Args:
        framework: the backend of Keras.
        directory: checkpoint directory.
        preempted_at: number of batches after which the process gets SIGTERM; "0":
            none.
    """
    os.environ["KERAS_BACKEND"] = framework
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_deterministic_ops=true"]
    ).strip()
    import keras

    import tfpreempt

    keras.utils.set_random_seed(1)
    if framework == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
        devices = [each.name for each in tf.config.list_logical_devices()]
    else:
        import jax

        devices = [str(each) for each in jax.devices()]
    keras.mixed_precision.set_global_policy("mixed_float16")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, SIZE, SIZE, 3)).astype("float32")
    y = rng.integers(0, 10, SAMPLES)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((SIZE, SIZE, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=True)
    done: list[int] = []

    class Preempted(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            done.append(batch)
            if len(done) == int(preempted_at):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(NOTICED_WITHIN)

    ours = tfpreempt.keras.PreemptionCallback(directory)
    model.fit(x, y, BATCH, epochs=2, verbose=0, callbacks=[Preempted(), ours])
    variables = [*model.variables, *model.optimizer.variables]
    data = b"".join(np.asarray(each.value).tobytes() for each in variables)
    found = {
        "digest": hashlib.sha256(data).hexdigest(),
        "resumed_at": done[0] if done else None,
        "devices": devices,
    }
    print(json.dumps(found), flush=True)


def _variables(mebibytes: int) -> tuple[list[Any], Any, Callable[[], Any]]:
    """Returns 16 variables, their checkpoint, and a step that changes them."""
    import tensorflow as tf

    size = mebibytes * 2**20 // 16 // 4
    values = [tf.Variable(tf.random.normal([size])) for _ in range(16)]

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        for each in values:
            each.assign_add(tf.ones([size]) * 1e-3)
        return values[0][0]

    return values, tf.train.Checkpoint(values=values), lambda: step().numpy()


def notice(directory: str, mebibytes: str) -> None:
    """Prints the time on the monotonic clock at which the process gets SIGTERM."""
    import tfpreempt

    _, state, step = _variables(int(mebibytes))
    handler = tfpreempt.PreemptionCheckpointHandler(None, state, directory)
    for number in range(100):
        handler.run(step)
        if number == 5:
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)


def save(directory: str, mebibytes: str, rounds: int = 3) -> None:
    """Prints the times for which saves stop the loop, and times of plain copies."""
    import tfpreempt

    values, state, step = _variables(int(mebibytes))
    every = 40
    handler = tfpreempt.PreemptionCheckpointHandler(
        None, state, directory, save_freq=every, max_to_keep=1
    )
    stalls, copies = [], []
    for number in range(every * (rounds + 1) + 1):
        began = time.perf_counter()
        handler.run(step)
        lasted = time.perf_counter() - began
        if number and number % every == 0:
            stalls.append(lasted)
            handler.checkpoints()
        elif number % every == every - 1:
            began = time.perf_counter()
            for each in values:
                np.array(each)
            copies.append(time.perf_counter() - began)
    handler.close()
    # The first save and copy search for the objects, and make the memory's pages.
    print(json.dumps({"stalls": stalls[1:], "copies": copies[1:]}), flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "fit": fit,
        "notice": notice,
        "save": save,
    }
    programs[sys.argv[1]](*sys.argv[2:])
