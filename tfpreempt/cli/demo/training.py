"""The parts of the demo's training programs that TensorFlow and JAX share.

The digits, the model, the call of `model.fit`, and the files with the result. Keras
uses the backend that the environment variable KERAS_BACKEND names.
"""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np
import numpy.typing as npt
import sklearn.datasets

import tfpreempt
from tfpreempt.cli.demo.job import EPOCH_STEPS, print_step

BATCH = 32  # images per worker
CHECKPOINTS = os.environ["TFPREEMPT_CHECKPOINT_DIR"]  # set by `tfpreempt run`
TRAIN_IMAGES = 1437  # of 1797; the accuracy is measured on the other images

Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]


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


def draw_batch(seed: int, step: int, workers: int) -> npt.NDArray[np.int64]:
    """Returns the indexes of the images in a step's batch, for all workers together."""
    return np.random.default_rng([seed, step]).choice(TRAIN_IMAGES, workers * BATCH)


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


def fit(model: keras.Model, steps: int, workers: int) -> None:
    """Trains with `model.fit`; after a restart, continues to the last epoch.

    Args:
        model: compiled model.
        steps: number of training steps over all restarts.
        workers: number of workers.
    """
    (images, labels), test = load_digits()
    size = workers * BATCH
    rows = np.arange(EPOCH_STEPS * size) % TRAIN_IMAGES  # some twice in an epoch
    epochs: list[int] = []
    steps_told = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
        on_train_batch_end=lambda batch, logs: report(
            epochs[-1] * EPOCH_STEPS + batch, logs["loss"]
        ),
    )
    # The callback restores the newest commit; on a notice it commits and exits.
    preemption = tfpreempt.keras.PreemptionCallback(CHECKPOINTS)
    model.fit(
        *(images[rows], labels[rows]),
        batch_size=size,
        epochs=steps // EPOCH_STEPS,
        validation_data=test,
        callbacks=[preemption, steps_told],
        verbose=0,
    )


def report(step: int, loss: float) -> None:
    """Prints a trained step, with the number of restarts before this step."""
    print_step(step, tfpreempt.num_restarts(), loss)


def save_result(out: Path, worker: int, model: keras.Model) -> None:
    """Writes the final weights, and the accuracy on images not used for training."""
    _, (images, labels) = load_digits()
    guesses = keras.ops.argmax(model(images, training=False), axis=1)
    accuracy = np.mean(keras.ops.convert_to_numpy(guesses) == labels)
    (out / f"accuracy-{worker}.txt").write_text(str(float(accuracy)))
    weights = b"".join(np.asarray(each).tobytes() for each in model.get_weights())
    (out / f"weights-{worker}.bin").write_bytes(weights)
