"""Trains some steps of a run that changes its numbers of workers and replicas.

Usage: elastic_program.py CHECKPOINTS LOOP DATA DEVICES HOW [BATCH], where LOOP is
"loop" or "fit", DATA names the data, DEVICES is the number of replicas of each worker,
and HOW is "preempted" (worker 0 gets a SIGTERM after its first step) or "whole". With
TF_CONFIG the strategy is MultiWorkerMirroredStrategy, otherwise MirroredStrategy.

The program prints the samples of this worker's replicas as `took STEP [[ids], ...]`,
and finally the weights, which record the step of each sample: a sample of step s of
epoch e adds 16**e * (s + 1).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf

import tfpreempt
from tfpreempt.handler import current_session

SIZE = 60
EPOCHS = 3


def make_strategy(devices):
    """Creates the strategy, with a number of logical devices in this process."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    some = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(cpu, some)
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])


def preempt():
    """Sends SIGTERM to this process; returns when the step's end sees the notice."""
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3000):
        if current_session.current().step_flag.flag:
            return
        time.sleep(0.01)
    raise AssertionError("no notice within 30 seconds")


def make_data(kind, batch):
    """Batches of sample numbers."""
    ids = np.arange(SIZE)
    if kind == "index":
        return tfpreempt.data.from_index(
            lambda index: index, SIZE, batch_size=batch, seed=3
        )
    if kind == "grain":
        import grain

        return grain.MapDataset.source(list(ids)).shuffle(seed=3).batch(batch)
    if kind == "nested":  # a shuffle draws for itself, below another one
        groups = tf.data.Dataset.range(0, SIZE, 5).shuffle(12, seed=4)
        whole = groups.flat_map(lambda first: tf.data.Dataset.range(first, first + 5))
        whole = whole.apply(tf.data.experimental.assert_cardinality(SIZE))
    else:
        whole = tf.data.Dataset.range(SIZE)
    whole = whole.shuffle(20, seed=5).batch(batch)
    if kind == "auto":
        return whole
    policy = tf.data.Options()
    policy.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return whole.with_options(policy)


def worth(step, batch):
    """Returns the value of a sample in a step; the value identifies the step."""
    in_epoch = SIZE // batch
    return 16 ** (step // in_epoch) * (step % in_epoch + 1)


def loop(checkpoints, data, devices, is_preempted, batch):
    """A custom loop."""
    strategy = make_strategy(devices)
    batches = tfpreempt.data.distribute(make_data(data, batch).repeat(), strategy)
    with strategy.scope():
        seen = tf.Variable(tf.zeros(SIZE, tf.float32))
        mean = tf.Variable(tf.zeros([], tf.float32))
        total = tf.Variable(
            0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )
        generator = tf.random.Generator.from_seed(1)
    checkpoint = tf.train.Checkpoint(
        seen=seen, mean=mean, total=total, generator=generator, data=batches
    )
    handler = tfpreempt.PreemptionCheckpointHandler(
        strategy.cluster_resolver if "TF_CONFIG" in os.environ else None,
        checkpoint,
        checkpoints,
        termination_config=tfpreempt.TerminationConfig(grace_period=0),
    )

    @tf.function
    def step(iterator, value):
        def replica(ids):
            one = tf.reduce_sum(tf.one_hot(ids, SIZE), 0) * value
            context = tf.distribute.get_replica_context()
            seen.assign_add(context.all_reduce(tf.distribute.ReduceOp.SUM, one))
            part = tf.reduce_sum(tf.sqrt(tf.cast(ids, tf.float32))) / batch
            part = context.all_reduce(tf.distribute.ReduceOp.SUM, part)
            mean.assign(0.9 * mean + 0.1 * part)
            total.assign_add(tf.shape(ids)[0])
            return ids

        return strategy.run(replica, (next(iterator),))

    def train(number):
        taken = step(batches, tf.constant(float(worth(number, batch))))
        parts = strategy.experimental_local_results(taken)
        show(number, [part.numpy().tolist() for part in parts])

    while (number := handler.total_run_calls) < EPOCHS * SIZE // batch:
        handler.run(train, number)
        if is_preempted and is_chief(strategy):
            preempt()
            is_preempted = False
    finish(seen, [float(mean.numpy())], int(total.numpy()))


def fit(checkpoints, data, devices, is_preempted, batch):
    """`model.fit`."""
    import keras

    strategy = make_strategy(devices)

    class Counting(keras.Model):
        """Counts its elements."""

        def __init__(self):
            super().__init__()
            zeros = {"initializer": "zeros", "aggregation": "mean"}
            self.seen = self.add_weight(shape=[SIZE], name="seen", **zeros)
            self.step = self.add_weight(shape=[], name="step", **zeros)
            self.metric = keras.metrics.Sum(name="total")
            self.built = True

        def call(self, ids):
            return ids

        def train_step(self, batch_of_ids):
            ids = tf.reshape(tf.nest.flatten(batch_of_ids)[0], [-1])
            in_epoch = SIZE // batch
            epoch = self.step.value // in_epoch
            value = 16.0**epoch * (self.step.value % in_epoch + 1.0)
            one = tf.reduce_sum(tf.one_hot(ids, SIZE), 0) * value
            context = tf.distribute.get_replica_context()
            tf.numpy_function(
                show_replica,
                [self.step.value, context.replica_id_in_sync_group, ids],
                [],
            )
            self.seen.assign_add(context.all_reduce(tf.distribute.ReduceOp.SUM, one))
            self.step.assign_add(1.0)
            self.metric.update_state(tf.ones_like(ids, tf.float32))
            return {"total": self.metric.result()}

    class Strike(keras.callbacks.Callback):
        """The notice."""

        def on_train_batch_end(self, batch, logs=None):
            nonlocal is_preempted
            if is_preempted and is_chief(strategy):
                preempt()
                is_preempted = False

    taken = {}

    def show_replica(number, replica, ids):
        taken.setdefault(int(number), {})[int(replica)] = ids.tolist()

    if "TF_CONFIG" in os.environ:
        tfpreempt.keras.enable_multi_worker()
    with strategy.scope():
        model = Counting()
        model.compile(optimizer="sgd")
    callback = tfpreempt.keras.PreemptionCallback(
        checkpoints, termination_config=tfpreempt.TerminationConfig(grace_period=0)
    )
    if data == "sequence":

        class Numbers(keras.utils.PyDataset):
            def __len__(self):
                return SIZE // batch

            def __getitem__(self, index):
                return (np.arange(SIZE)[index * batch : (index + 1) * batch],)

        x, more = Numbers(), {"shuffle": True}
        keras.utils.set_random_seed(11)
    elif data == "numpy":
        x, more = np.arange(SIZE), {"batch_size": batch, "shuffle": True}
        keras.utils.set_random_seed(11)
    else:
        x, more = make_data(data, batch), {}
    try:
        history = model.fit(
            x, epochs=EPOCHS, verbose=0, callbacks=[Strike(), callback], **more
        )
    finally:
        for number, found in sorted(taken.items()):
            show(number, [ids for _, ids in sorted(found.items())])
    finish(model.seen, history.history["total"], int(model.step.numpy()))


def is_chief(strategy):
    """Whether this is worker 0."""
    resolver = strategy.cluster_resolver
    return "TF_CONFIG" not in os.environ or resolver.task_id == 0


def show(number, parts):
    """Prints the samples of the replicas of this worker in a step, in one write."""
    sys.stdout.write(f"took {number} {json.dumps(parts)}\n")
    sys.stdout.flush()


def finish(seen, means, total):
    """Prints the results."""
    values = np.asarray(seen.numpy()).tolist()
    found = {"seen": values, "means": means, "total": total}
    sys.stdout.write(f"result {json.dumps(found)}\n")


if __name__ == "__main__":
    _, directory, way, data, devices, how, *batch = sys.argv
    train = {"loop": loop, "fit": fit}[way]
    size = int(batch[0]) if batch else 12
    train(directory, data, int(devices), how == "preempted", size)
