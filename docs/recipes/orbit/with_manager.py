"""For a program whose Controller has a CheckpointManager, and is to keep it."""

import functools
import tempfile

import orbit
import tensorflow as tf

import tfpreempt


def train(trainer, directory, steps, steps_per_loop):
    """Trains up to a step, from the newest checkpoint in the directory on."""
    strategy = trainer.strategy
    is_chief = strategy.extended.should_checkpoint
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(trainer=trainer),  # with its place in the data
        directory if is_chief else tempfile.mkdtemp(),
        max_to_keep=3,
        step_counter=trainer.global_step,
        checkpoint_interval=2 * steps_per_loop,
    )
    # Before the Controller: on the chief that restores what all have agreed on here.
    with tfpreempt.PreemptionCheckpointHandler(
        strategy.cluster_resolver, manager
    ) as handler:
        trainer.train = functools.partial(handler.run, trainer.train)  # the one line
        controller = orbit.Controller(
            trainer=trainer,
            global_step=trainer.global_step,
            strategy=strategy,
            steps_per_loop=steps_per_loop,
            checkpoint_manager=manager,
        )
        controller.train(steps)
