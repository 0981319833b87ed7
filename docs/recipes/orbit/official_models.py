"""`train_lib.run_experiment` of the official models, with tfpreempt's handler."""

import functools
import os

from official.core import train_lib

import tfpreempt


def run_experiment(strategy, task, mode, params, model_dir, **more):
    """Replaces `train_lib.run_experiment`, and resumes after a restart."""
    params.trainer.preemption_on_demand_checkpoint = False  # TensorFlow's handler
    every, params.trainer.checkpoint_interval = params.trainer.checkpoint_interval, 0
    runner = train_lib.OrbitExperimentRunner(
        strategy, task, mode, params, model_dir, **more
    )
    trainer = runner.trainer
    trainer.train_dataset = trainer.checkpoint.data = tfpreempt.data.distribute(
        lambda context: task.build_inputs(params.task.train_data, context), strategy
    )
    with tfpreempt.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        trainer.checkpoint,
        os.path.join(model_dir, "tfpreempt"),
        save_freq=max(1, every // params.trainer.steps_per_loop),
        max_to_keep=params.trainer.max_to_keep,
    ) as handler:
        trainer.train = functools.partial(handler.run, trainer.train)
        return runner.run()
