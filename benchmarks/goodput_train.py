"""The worker of the goodput bench: one program for all ways to save.

Usage: python -m benchmarks.goodput_train WAY DIRECTORY LOG SAVE_STEPS

The worker trains until it is struck. Each step multiplies matrices (about 50 ms on one
core), reduces a number over the workers, and counts itself in `trained_steps`. A line
is written to LOG for the restored state, for each step, and for each save that the
program observes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

WIDTH = 1024
PRODUCTS = 2
FOREVER = 10**9


class Log:
    """Log whose lines survive a kill: each line is one write to the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def restored(self, number: int) -> None:
        """Records the restored state."""
        self._write({"restored": number})

    def step(self, number: int, began: float) -> None:
        """Records the end of a step."""
        record = {"step": number, "began": began, "ended": time.monotonic()}
        self._write(record)

    def saved(self, number: int) -> None:
        """Records that the state after the step is saved."""
        self._write({"saved": number})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")


class Work:
    """The state, and the step function that changes the state on each replica."""

    def __init__(self) -> None:
        self.weights = tf.Variable(tf.eye(WIDTH))
        self.trained_steps = tf.Variable(
            0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )

    def on_replica(self) -> Any:
        """Runs one step; returns the reduced number."""
        product = self.weights.read_value()
        for _ in range(PRODUCTS):
            product = tf.matmul(product, self.weights)
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_mean(product))
        self.weights.assign_add(1e-6 * tf.tanh(product) * tf.tanh(total))
        self.trained_steps.assign_add(1)
        return total

    def count(self) -> int:
        """Returns the step of the state."""
        return int(self.trained_steps.numpy())


def main(way: str, directory: str, log: Log, save_steps: int) -> None:
    """Trains until the worker is struck."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        work = Work()
    WAYS[way](strategy, work, directory, log, save_steps)


def with_tfpreempt(
    strategy: Any, work: Work, directory: str, log: Log, save_steps: int | None
) -> None:
    """Trains with tfpreempt's handler; `save_steps` None: saves only after a notice."""
    import tfpreempt

    handler = tfpreempt.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        checkpoint_of(work),
        directory,
        save_freq=save_steps,
    )
    loop(strategy, work, log, handler.run, save_steps)


def with_tensorflow(
    strategy: Any, work: Work, directory: str, log: Log, save_steps: int
) -> None:
    """Trains with TensorFlow's handler and its defaults, without periodic saves."""
    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint_of(work), directory
    )
    loop(strategy, work, log, handler.run, None)


def loop(
    strategy: Any,
    work: Work,
    log: Log,
    run: Callable[[Callable[[], None]], object],
    save_steps: int | None,
) -> None:
    """Trains with a handler.

    Args:
        strategy: strategy of the cluster.
        work: the restored state.
        log: log of this worker.
        run: `run` of the handler, which raises SystemExit after its save.
        save_steps: number of steps between periodic saves, each of which is complete
            when the next step begins. None: no periodic saves.
    """
    reduced = tf.function(lambda: strategy.run(work.on_replica))
    done = work.count()
    first = done
    log.restored(done)

    def step() -> None:
        nonlocal done
        if save_steps and done > first and done % save_steps == 0:
            log.saved(done)
        began = time.monotonic()
        reduced()
        done += 1
        log.step(done, began)

    try:
        while True:
            run(step)
    except SystemExit:
        log.saved(done)
        raise


def with_manager(
    strategy: Any, work: Work, directory: str, log: Log, save_steps: int
) -> None:
    """Trains with periodic saves by the chief; SIGTERM ends the process.

    TensorFlow's own code swallows SIGTERM once there is a strategy, hence the default
    action is set after it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    manager = tf.train.CheckpointManager(checkpoint_of(work), directory, max_to_keep=2)
    manager.restore_or_initialize()
    is_chief = strategy.cluster_resolver.task_id == 0
    reduced = tf.function(lambda: strategy.run(work.on_replica))
    done = work.count()
    log.restored(done)
    while True:
        began = time.monotonic()
        reduced()
        done += 1
        log.step(done, began)
        if is_chief and done % save_steps == 0:
            manager.save()
            log.saved(done)


def with_backup(
    strategy: Any, work: Work, directory: str, log: Log, save_steps: int
) -> None:
    """Trains with Keras' BackupAndRestore, every few batches of one endless epoch.

    The callback is that of tf_keras, because `fit` of Keras 3 does not support two
    workers without a patch. The callback ignores SIGTERM, so training continues until
    the end of the machine. (With `save_before_preemption` it uses TensorFlow's
    handler.)
    """
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tf_keras

    class Model(tf_keras.Model):  # type: ignore[misc]  # tf_keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.held_weights = work.weights
            self.trained_steps = work.trained_steps
            self.built = True

        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": work.on_replica()}

    class Watch:
        done = 0
        began = 0.0

    def begin(batch: int, logs: Any = None) -> None:
        Watch.began = time.monotonic()

    def end(batch: int, logs: Any = None) -> None:
        Watch.done += 1
        log.step(Watch.done, Watch.began)

    def restored(logs: Any = None) -> None:
        Watch.done = work.count()
        log.restored(Watch.done)

    def saved(batch: int, logs: Any = None) -> None:
        if Watch.done % save_steps == 0:
            log.saved(Watch.done)

    with strategy.scope():
        model = Model()
        model.compile(optimizer=tf_keras.optimizers.SGD())
    hooks = tf_keras.callbacks.LambdaCallback
    model.fit(
        endless(strategy),
        steps_per_epoch=FOREVER,
        verbose=0,
        callbacks=[
            hooks(on_train_batch_end=end),
            tf_keras.callbacks.BackupAndRestore(directory, save_freq=save_steps),
            hooks(
                on_train_begin=restored,
                on_train_batch_begin=begin,
                on_train_batch_end=saved,
            ),
        ],
    )


def endless(strategy: Any) -> Any:
    """Returns an endless dataset with one row for each worker."""
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    rows = strategy.num_replicas_in_sync
    data = tf.data.Dataset.from_tensor_slices(tf.zeros([rows, 1]))
    return data.repeat().batch(rows, drop_remainder=True).with_options(options)


def checkpoint_of(work: Work) -> Any:
    """Returns a checkpoint of the state."""
    return tf.train.Checkpoint(weights=work.weights, trained_steps=work.trained_steps)


def final_step(directory: Path) -> int:
    """Returns the step of a directory's newest checkpoint; 0 without a checkpoint."""
    found = [tf.train.latest_checkpoint(directory / room) for room in (".", "chief")]
    counters = [
        int(tf.train.load_variable(path, name))
        for path in found
        if path
        for name, _ in tf.train.list_variables(path)
        if f"/{name}".endswith("/trained_steps/.ATTRIBUTES/VARIABLE_VALUE")
    ]
    return max(counters, default=0)


def _on_notices_only(
    strategy: Any, work: Work, directory: str, log: Log, save_steps: int
) -> None:
    with_tfpreempt(strategy, work, directory, log, None)


WAYS: dict[str, Callable[[Any, Work, str, Log, int], None]] = {
    "tfpreempt": _on_notices_only,
    "tfpreempt_save_every": with_tfpreempt,
    "tensorflow_handler": with_tensorflow,
    "checkpoint_manager": with_manager,
    "backup_and_restore": with_backup,
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Log(Path(sys.argv[3])), int(sys.argv[4]))
