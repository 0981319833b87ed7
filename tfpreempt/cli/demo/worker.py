"""The training program of the demo: a custom loop, or `model.fit`, made preemptible.

Every worker process runs this file under `tfpreempt run`, which sets TF_CONFIG and
starts the file again after every preemption. Numbered comments mark the lines that
tfpreempt needs; the other lines are the same as in any program with
MultiWorkerMirroredStrategy. The other modules of the demo do not import TensorFlow.

Usage: worker.py OUT loop|fit STEPS SEED
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import sklearn.datasets
import tensorflow as tf

import tfpreempt
from tfpreempt.cli.demo.job import EPOCH_STEPS, print_step

BATCH = 32  # images per worker
CHECKPOINTS = os.environ["TFPREEMPT_CHECKPOINT_DIR"]  # set by `tfpreempt run`
TRAIN_IMAGES = 1437  # of 1797; the accuracy is measured on the other images

Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]
Report = Callable[[int, float], None]  # called with a step and its loss


def load_digits() -> tuple[Pair, Pair]:
    """Returns images and labels for training, and images and labels for testing.

    Images have the shape (n, 8, 8, 1) and values from 0 to 1.
    """
    raw = sklearn.datasets.load_digits()
    images = (raw.images[..., np.newaxis] / 16.0).astype(np.float32)
    labels = raw.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def build_model() -> keras.Model:
    """Returns a small convolutional network for 8x8 grey images, ready to train."""
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def train_by_loop(
    strategy: tf.distribute.Strategy, steps: int, seed: int, report: Report
) -> keras.Model:
    """Trains in a custom loop; after a restart, continues to the last step.

    Args:
        strategy: distribution strategy of the worker.
        steps: number of training steps over all restarts.
        seed: seed of the batches.
        report: function called with every trained step and its loss.
    """
    (images, labels), _ = load_digits()
    resolver = strategy.cluster_resolver
    worker, workers = resolver.task_id or 0, strategy.num_replicas_in_sync
    with strategy.scope():
        model = build_model()

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def update(*batch: Any) -> Any:
        logs = strategy.run(model.train_step, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, logs["loss"], axis=None)

    # 1. The handler restores the newest committed checkpoint, if there is one.
    handler = tfpreempt.PreemptionCheckpointHandler(
        resolver, tf.train.Checkpoint(model=model), CHECKPOINTS
    )

    def step_function(step: int) -> float:
        drawn = np.random.default_rng([seed, step])
        rows = drawn.choice(len(labels), workers * BATCH)[worker::workers]
        return float(update(tf.constant(images[rows]), tf.constant(labels[rows])))

    with handler:
        # 2. The handler knows how many steps are done, over all restarts.
        for step in range(handler.total_run_calls, steps):
            # 3. Every step is run by `run()`. The batch depends only on the step, so no
            # position in the data must be saved.
            report(step, handler.run(step_function, step))
    return model


def train_by_fit(
    strategy: tf.distribute.Strategy, steps: int, seed: int, report: Report
) -> keras.Model:
    """Trains with `model.fit`; after a restart, continues to the last epoch.

    Args:
        strategy: distribution strategy of the worker.
        steps: number of training steps over all restarts.
        seed: seed of the order of the images.
        report: function called with every trained step and its loss.
    """
    train, test = load_digits()
    batch_size = BATCH * strategy.num_replicas_in_sync
    with strategy.scope():
        model = build_model()
    images = tf.data.Dataset.from_tensor_slices(train)
    images = images.shuffle(TRAIN_IMAGES, seed=seed).repeat()
    steps_told = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: report(
            int(model.optimizer.iterations.numpy()) - 1, logs["loss"]
        )
    )
    # 1. The callback restores the newest commit; on a notice it commits and exits.
    preemption = tfpreempt.keras.PreemptionCallback(CHECKPOINTS)
    model.fit(
        images.batch(batch_size),
        epochs=steps // EPOCH_STEPS,
        steps_per_epoch=EPOCH_STEPS,
        validation_data=test,
        validation_batch_size=batch_size,
        callbacks=[preemption, steps_told],
        verbose=0,
    )
    return model


def save_result(out: Path, worker: int, model: keras.Model) -> None:
    """Writes the final weights, and the accuracy on images not used for training."""
    _, (images, labels) = load_digits()
    guesses = np.argmax(model(tf.constant(images), training=False), axis=1)
    accuracy = np.mean(guesses == labels)
    (out / f"accuracy-{worker}.txt").write_text(str(float(accuracy)))
    weights = b"".join(np.asarray(each).tobytes() for each in model.get_weights())
    (out / f"weights-{worker}.bin").write_bytes(weights)


def make_repeatable(seed: int) -> None:
    """Makes training deterministic: runs with the same seed give equal weights."""
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def main(out: Path, way: str, steps: int, seed: int) -> None:
    """Trains the model, prints every step, and saves the result."""
    make_repeatable(seed)
    if way == "fit":
        tfpreempt.keras.enable_multi_worker()  # needed by Keras 3 for several workers
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id or 0
    restart = tfpreempt.num_restarts()

    def report(step: int, loss: float) -> None:
        print_step(step, restart, loss)

    train = train_by_fit if way == "fit" else train_by_loop
    save_result(out, worker, train(strategy, steps, seed, report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
