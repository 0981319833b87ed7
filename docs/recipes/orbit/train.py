"""Trains with `orbit.Controller`; resumes after a restart.

Usage: train.py DIRECTORY, on each worker of a cluster (TF_CONFIG) or on one machine.
"""

import functools
import sys

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

import tfpreempt

BATCH = 32


class Trainer(orbit.StandardTrainer):
    """The trainer: data, model, and the training step."""

    def __init__(self, strategy):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(1000, 8)).astype("float32")
        y = x @ rng.normal(size=(8, 1)).astype("float32")
        dataset = tfpreempt.data.from_arrays((x, y), batch_size=BATCH, seed=1)
        # Unlike strategy.experimental_distribute_dataset, has a position to save.
        super().__init__(tfpreempt.data.distribute(dataset.repeat(), strategy))
        self.strategy = strategy
        with strategy.scope():
            self.global_step = orbit.utils.create_global_step()
            self.model = tf_keras.Sequential(
                [
                    tf_keras.layers.Dense(64, "relu", input_shape=(8,)),
                    tf_keras.layers.Dropout(0.1),
                    tf_keras.layers.Dense(1),
                ]
            )
            self.optimizer = tf_keras.optimizers.Adam()
            self.optimizer.build(self.model.trainable_variables)
            self.loss = tf_keras.metrics.Mean("loss")

    def train_loop_begin(self):
        """Resets the loss for each loop."""
        self.loss.reset_state()

    def train_step(self, iterator):
        """Takes the batch inside the step."""
        self.strategy.run(self.update, args=next(iterator))
        self.global_step.assign_add(1)

    def update(self, x, y):
        """Updates the weights on one replica."""
        with tf.GradientTape() as tape:
            errors = (self.model(x, training=True) - y) ** 2
            loss = tf.reduce_sum(errors) / BATCH
        weights = self.model.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss.update_state(errors)

    def train_loop_end(self):
        """Returns values for the Controller's output and actions."""
        return {"loss": self.loss.result()}


def train(trainer, directory, steps, steps_per_loop):
    """Trains up to a step, starting from the newest commit in the directory."""
    checkpoint = tf.train.Checkpoint(trainer=trainer)  # with its data position
    with tfpreempt.PreemptionCheckpointHandler(
        trainer.strategy.cluster_resolver, checkpoint, directory, save_freq=10
    ) as handler:
        trainer.train = functools.partial(handler.run, trainer.train)  # <- add this
        controller = orbit.Controller(
            trainer=trainer,
            global_step=trainer.global_step,
            strategy=trainer.strategy,
            steps_per_loop=steps_per_loop,
        )
        controller.train(steps)


def make_exact():
    """Makes runs reproducible, and gives Dropout generators that are saved."""
    tf_keras.backend.experimental.enable_tf_random_generator()
    tf_keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()


if __name__ == "__main__":
    make_exact()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train(Trainer(strategy), sys.argv[1], steps=2000, steps_per_loop=50)
