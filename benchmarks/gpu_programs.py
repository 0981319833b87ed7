"""The programs that `benchmarks.gpu` starts.

Usage: python -m benchmarks.gpu_programs fit FRAMEWORK DIRECTORY BATCH
       python -m benchmarks.gpu_programs notice FRAMEWORK DIRECTORY MEBIBYTES
       python -m benchmarks.gpu_programs save FRAMEWORK DIRECTORY MEBIBYTES
       python -m benchmarks.gpu_programs overhead FRAMEWORK DIRECTORY
"""

from __future__ import annotations

import dataclasses
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
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
    else:
        import jax

        on_gpu = jax.default_backend() == "gpu"
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
        "on_gpu": on_gpu,
    }
    print(json.dumps(found), flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """The state of a loop, and the operations of the loop.

    Attributes:
        checkpoint: argument of the handler.
        step: changes all arrays, and returns after the computation.
        copy: copies all arrays to NumPy arrays.
    """

    checkpoint: Any
    step: Callable[[], None]
    copy: Callable[[], None]


ARRAYS = 16


def loop_of_tensorflow(mebibytes: int) -> Loop:
    """Returns a loop on 16 variables of TensorFlow."""
    import tensorflow as tf

    size = mebibytes * 2**20 // ARRAYS // 4
    values = [tf.Variable(tf.random.normal([size])) for _ in range(ARRAYS)]

    @tf.function  # type: ignore[untyped-decorator]
    def update() -> Any:
        for each in values:
            each.assign_add(tf.ones([size]) * 1e-3)
        return values[0][0]

    def copy() -> None:
        for each in values:
            np.array(each)

    checkpoint = tf.train.Checkpoint(values=values)
    return Loop(checkpoint, lambda: update().numpy(), copy)


def loop_of_jax(mebibytes: int) -> Loop:
    """Returns a loop on 16 arrays of JAX, whose step reuses their memory."""
    import jax

    from tfpreempt.states import PyTreeState

    size = mebibytes * 2**20 // ARRAYS // 4
    keys = jax.random.split(jax.random.key(1), ARRAYS)
    state = PyTreeState("values", [jax.random.normal(key, [size]) for key in keys])
    update = jax.jit(lambda values: [each + 1e-3 for each in values], donate_argnums=0)

    def step() -> None:
        state.value = update(state.value)
        jax.block_until_ready(state.value)

    def copy() -> None:
        for each in state.value:
            np.array(each)

    return Loop(None, step, copy)


LOOPS = {"tensorflow": loop_of_tensorflow, "jax": loop_of_jax}


def notice(framework: str, directory: str, mebibytes: str) -> None:
    """Prints the time on the monotonic clock at which the process gets SIGTERM."""
    import tfpreempt

    loop = LOOPS[framework](int(mebibytes))
    handler = tfpreempt.PreemptionCheckpointHandler(None, loop.checkpoint, directory)
    for number in range(100):
        handler.run(loop.step)
        if number == 5:
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)


def save(framework: str, directory: str, mebibytes: str, rounds: int = 3) -> None:
    """Prints the times for which saves stop the loop, and times of plain copies."""
    import tfpreempt

    loop = LOOPS[framework](int(mebibytes))
    every = 40
    handler = tfpreempt.PreemptionCheckpointHandler(
        None, loop.checkpoint, directory, save_freq=every, max_to_keep=1
    )
    stalls, copies = [], []
    for number in range(every * (rounds + 1) + 1):
        began = time.perf_counter()
        handler.run(loop.step)
        lasted = time.perf_counter() - began
        if number and number % every == 0:
            stalls.append(lasted)
            handler.checkpoints()
        elif number % every == every - 1:
            began = time.perf_counter()
            loop.copy()
            copies.append(time.perf_counter() - began)
    handler.close()
    # The first save and copy search for the objects, and make the memory's pages.
    print(json.dumps({"stalls": stalls[1:], "copies": copies[1:]}), flush=True)


def overhead(framework: str, directory: str, rounds: int = 21) -> None:
    """Prints the times of steps, and the times that `run()` adds, in microseconds."""
    import tfpreempt

    loop, number_of_steps = LOOPS[framework](1), 200
    handler = tfpreempt.PreemptionCheckpointHandler(None, loop.checkpoint, directory)

    def microseconds(step: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(number_of_steps):
            step()
        return 1e6 * (time.perf_counter() - began) / number_of_steps

    steps, added = [], []
    for _ in range(rounds):
        steps.append(microseconds(loop.step))
        added.append(microseconds(lambda: handler.run(loop.step)) - steps[-1])
    handler.close()
    print(json.dumps({"steps": steps[1:], "added": added[1:]}), flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "fit": fit,
        "notice": notice,
        "save": save,
        "overhead": overhead,
    }
    programs[sys.argv[1]](*sys.argv[2:])
