"""The program that the demo trains with: an ordinary custom loop, made preemptible.

Every worker process runs this file under `tfpreempt run`, which sets TF_CONFIG and
starts it again after each preemption. What tfpreempt asks of it is marked 1 to 3;
everything else is what any MultiWorkerMirroredStrategy program has. This is the only
part of the demo that imports TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import keras
import numpy as np
import tensorflow as tf

import tfpreempt
from tfpreempt.cli.demo.data import Digits, load_digits

BATCH_PER_WORKER = 32


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def build_model() -> keras.Model:
    """A small convolutional network for 8x8 grey images, without Dropout."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_update(
    strategy: tf.distribute.Strategy, model: keras.Model, optimizer: Any
) -> Callable[[Any, Any], Any]:
    """The compiled step on all replicas; returns the loss over the global batch."""

    def on_replica(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(images, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def update(images: Any, labels: Any) -> Any:
        losses = strategy.run(on_replica, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return update  # type: ignore[no-any-return]  # tf.function is untyped


def train(arguments: argparse.Namespace, digits: Digits) -> None:
    """Trains to the last step, however often it is interrupted."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    worker, workers = resolver.task_id or 0, strategy.num_replicas_in_sync
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(2e-3)
        optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    update = make_update(strategy, model, optimizer)

    # 1. The handler restores the newest committed checkpoint, if there is one.
    handler = tfpreempt.PreemptionCheckpointHandler(
        resolver, checkpoint, str(arguments.checkpoint_dir)
    )

    def step_function(step: int) -> float:
        images, labels = digits.batch(
            arguments.seed, step, worker, workers, BATCH_PER_WORKER
        )
        return float(update(tf.constant(images), tf.constant(labels)))

    with handler, open_progress(arguments.out, worker) as progress:
        # 2. The handler knows how many steps are done, over all restarts.
        for step in range(handler.total_run_calls, arguments.steps):
            # 3. Each step goes through `run()`; the batch is fetched inside, from the
            #    step alone, so that the place in the data can't be lost.
            loss = handler.run(step_function, step)
            write_progress(progress, step, loss)
    save_result(arguments.out, worker, model, digits)


def open_progress(out: Path, worker: int) -> TextIO:
    """Opens this worker's record of trained steps; restarts add to it."""
    out.mkdir(parents=True, exist_ok=True)
    return (out / f"progress-{worker}.jsonl").open("a", encoding="utf-8")


def write_progress(progress: TextIO, step: int, loss: float) -> None:
    """Tells the driver that a step is trained, and by which process."""
    record = {
        "step": step,
        "loss": loss,
        "pid": os.getpid(),
        "restart": int(os.environ.get("TFPREEMPT_NUM_RESTARTS", "0")),
        "wall": time.time(),
    }
    progress.write(json.dumps(record) + "\n")
    progress.flush()


def save_result(out: Path, worker: int, model: keras.Model, digits: Digits) -> None:
    """Writes the final weights, and the accuracy on images never trained on."""
    logits = np.asarray(model(tf.constant(digits.test_images), training=False))
    accuracy = float(np.mean(logits.argmax(axis=1) == digits.test_labels))
    weights = {str(i): np.asarray(v) for i, v in enumerate(model.get_weights())}
    np.savez(out / f"weights-{worker}.npz", **weights)  # type: ignore[arg-type]
    result = json.dumps({"accuracy": accuracy})
    (out / f"result-{worker}.json").write_text(result, encoding="utf-8")


def make_repeatable(seed: int) -> None:
    """Makes two runs equal, byte for byte."""
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def main() -> None:
    """Makes the run repeatable, and trains."""
    arguments = parse_arguments()
    make_repeatable(arguments.seed)
    train(arguments, load_digits())


if __name__ == "__main__":
    main()
