"""Trains on the TPU of this VM; resumes after a restart, also on another VM."""

import tfpreempt

config = tfpreempt.GceTpuTerminationConfig()
tfpreempt.handle_early_notices(config)  # handles notices from here on

import tensorflow as tf  # noqa: E402 - TensorFlow and the TPU take a while

resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
tf.tpu.experimental.initialize_tpu_system(resolver)
strategy = tf.distribute.TPUStrategy(resolver)

with strategy.scope():
    weights = tf.Variable(tf.zeros([8, 1]))


@tf.function
def train_step(step):
    """Runs one step on all cores of the TPU."""

    def on_core():
        x = tf.random.stateless_normal([16, 8], seed=tf.stack([step, 1]))
        y = tf.reduce_sum(x, axis=1, keepdims=True)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        gradient = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        weights.assign_sub(0.01 * context.all_reduce("MEAN", gradient))

    strategy.run(on_core)


with tfpreempt.PreemptionCheckpointHandler(
    None,  # one process uses the TPU of this machine
    tf.train.Checkpoint(weights=weights),
    "/srv/ckpt/train",
    config,
    save_freq=1000,
) as handler:
    for step in range(handler.total_run_calls, 10_000):
        handler.run(train_step, tf.constant(step))
