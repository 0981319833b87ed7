"""The program that `tfpreempt demo --keras` trains with: `model.fit`, made preemptible.

Every worker process runs this file under `tfpreempt run`, which sets TF_CONFIG and
starts it again after each preemption. What tfpreempt asks of it is marked 1 and 2;
everything else is what any program with Keras 3 and MultiWorkerMirroredStrategy has.
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf

import tfpreempt
from tfpreempt.cli.demo.data import Digits, load_digits
from tfpreempt.cli.demo.plan import EPOCH_STEPS
from tfpreempt.cli.demo.worker import (
    BATCH_PER_WORKER,
    make_repeatable,
    open_progress,
    parse_arguments,
    save_result,
    write_progress,
)


def build_model() -> keras.Model:
    """A small convolutional network for 8x8 grey images, with Dropout."""
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(arguments: argparse.Namespace, digits: Digits) -> None:
    """Trains to the last epoch, however often it is interrupted."""
    # 1. Keras 3 by itself fails with two workers or more.
    tfpreempt.keras.enable_multi_worker()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id or 0
    batch_size = BATCH_PER_WORKER * strategy.num_replicas_in_sync
    with strategy.scope():
        model = build_model()
    images = tf.data.Dataset.from_tensor_slices(
        (digits.train_images, digits.train_labels)
    )
    images = images.shuffle(len(digits.train_images), seed=arguments.seed).repeat()

    with open_progress(arguments.out, worker) as progress:
        tell = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: write_progress(
                progress, int(model.optimizer.iterations.numpy()) - 1, logs["loss"]
            )
        )
        # 2. The callback restores the newest commit, commits on a notice and leaves.
        preemption = tfpreempt.keras.PreemptionCallback(arguments.checkpoint_dir)
        model.fit(
            images.batch(batch_size),
            epochs=arguments.steps // EPOCH_STEPS,
            steps_per_epoch=EPOCH_STEPS,
            validation_data=(digits.test_images, digits.test_labels),
            validation_batch_size=batch_size,
            callbacks=[preemption, tell],
            verbose=2,
        )
    save_result(arguments.out, worker, model, digits)


def main() -> None:
    """Makes the run repeatable, byte for byte, and trains."""
    arguments = parse_arguments()
    make_repeatable(arguments.seed)
    train(arguments, load_digits())


if __name__ == "__main__":
    main()
