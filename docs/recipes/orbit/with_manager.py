"""Trains with an `orbit.Controller` that keeps its CheckpointManager."""

import functools
import tempfile

import orbit
import tensorflow as tf

import tfpreempt


def train(trainer, directory, steps, steps_per_loop):
    """Trains up to a step, starting from the newest checkpoint in the directory."""
    strategy = trainer.strategy
    is_chief = strategy.extended.should_checkpoint
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(trainer=trainer),  # with its data position
        directory if is_chief else tempfile.mkdtemp(),
        max_to_keep=3,
        step_counter=trainer.global_step,
        checkpoint_interval=2 * steps_per_loop,
    )
    # Before the Controller, which restores on the chief the checkpoint agreed here.
    with tfpreempt.PreemptionCheckpointHandler(
        strategy.cluster_resolver, manager
    ) as handler:
        trainer.train = functools.partial(handler.run, trainer.train)  # <- add this
        controller = orbit.Controller(
            trainer=trainer,
            global_step=trainer.global_step,
            strategy=strategy,
            steps_per_loop=steps_per_loop,
            checkpoint_manager=manager,
        )
        controller.train(steps)
