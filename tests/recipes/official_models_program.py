"""A task of the official models, run as in docs/recipes/orbit.

Usage: official_models_program.py CHECKPOINTS [LOOP]. The workers block after loop LOOP,
counted from 0.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras
from official.core import base_task, config_definitions
from official.modeling import optimization

from tests.multiprocess.programs.toy_model import INDEX, hold, say

RECIPES = Path(__file__).parents[2] / "docs" / "recipes" / "orbit"
STEPS, STEPS_PER_LOOP = 20, 4


class Task(base_task.Task):  # type: ignore[misc]  # the official models are untyped
    """A regression with dropout, on shuffled data of each worker's own."""

    def build_model(self) -> Any:
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Dense(8, "relu", input_shape=(1,)),
                layers.Dropout(0.1),
                layers.Dense(1),
            ]
        )

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        def sample(number: Any) -> Any:
            x = tf.cast(number, tf.float32)[None] / 100.0
            return x, 3.0 * x

        numbers = tf.data.Dataset.range(INDEX, 100, 2).shuffle(20, seed=7)
        return numbers.repeat().map(sample).batch(4)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any) -> Any:
        return tf.reduce_mean((labels - model_outputs) ** 2)

    def train_step(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        samples = tf.cast(tf.round(inputs[0][:, 0] * 100.0), tf.int32)
        tf.print("samples", samples, summarize=-1)
        return super().train_step(inputs, *args, **kwargs)


def main(directory: str, hold_in: str = "-1") -> None:
    """Trains; prints everything that an exact resume must have kept."""
    tempfile.tempdir = str(Path.cwd())  # deleted at the end of the test
    runpy.run_path(str(RECIPES / "train.py"))["make_exact"]()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    params = config_definitions.ExperimentConfig(
        task=config_definitions.TaskConfig(
            train_data=config_definitions.DataConfig(is_training=True)
        ),
        trainer=config_definitions.TrainerConfig(
            train_steps=STEPS,
            steps_per_loop=STEPS_PER_LOOP,
            summary_interval=STEPS_PER_LOOP,
            checkpoint_interval=2 * STEPS_PER_LOOP,
            optimizer_config=optimization.OptimizationConfig(
                {
                    "optimizer": {"type": "adam_experimental"},
                    "learning_rate": {"type": "constant"},
                }
            ),
        ),
    )
    with strategy.scope():
        task = Task(params.task)
    loops = itertools.count()

    def hold_behind_a_loop(output: Any) -> None:
        if next(loops) == int(hold_in):
            hold()

    run = runpy.run_path(str(RECIPES / "official_models.py"))["run_experiment"]
    model, _ = run(
        strategy,
        task,
        "train",
        params,
        directory,
        save_summary=False,  # needs TensorBoard
        train_actions=[hold_behind_a_loop],
    )
    values = {each.name: each.numpy().tobytes().hex() for each in model.variables}
    say("result", json.dumps(values))


main(*sys.argv[1:])
