"""The training program of the demo on TensorFlow: a custom loop, or `model.fit`.

Every worker process runs this file under `tfpreempt run`, which sets TF_CONFIG and
starts the file again after every preemption. Numbered comments mark the lines that
tfpreempt needs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfpreempt
from tfpreempt.cli.demo import training


def train_by_loop(
    strategy: tf.distribute.Strategy, model: keras.Model, steps: int, seed: int
) -> None:
    """Trains in a custom loop; after a restart, continues to the last step.

    Args:
        strategy: distribution strategy of the worker.
        model: compiled model.
        steps: number of training steps over all restarts.
        seed: seed of the batches.
    """
    (images, labels), _ = training.load_digits()
    resolver = strategy.cluster_resolver
    worker, workers = resolver.task_id or 0, strategy.num_replicas_in_sync

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def update(*batch: Any) -> Any:
        logs = strategy.run(model.train_step, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, logs["loss"], axis=None)

    # 1. The handler restores the newest committed checkpoint, if there is one.
    handler = tfpreempt.PreemptionCheckpointHandler(
        resolver, tf.train.Checkpoint(model=model), training.CHECKPOINTS
    )

    def step_function(step: int) -> float:
        rows = training.draw_batch(seed, step, workers)[worker::workers]
        return float(update(tf.constant(images[rows]), tf.constant(labels[rows])))

    with handler:
        # 2. The handler knows how many steps are done, over all restarts.
        for step in range(handler.total_run_calls, steps):
            # 3. Every step is run by `run()`. The batch depends only on the step, so no
            # position in the data must be saved.
            training.report(step, handler.run(step_function, step))


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
    with strategy.scope():
        model = training.build_model()
    if way == "fit":
        training.fit(model, steps, strategy.num_replicas_in_sync)
    else:
        train_by_loop(strategy, model, steps, seed)
    training.save_result(out, strategy.cluster_resolver.task_id or 0, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
