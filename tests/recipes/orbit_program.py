"""The recipe's trainer with fewer steps, which print their samples.

Usage: orbit_program.py CHECKPOINTS FILE [LOOP]. FILE is the recipe's program. The
workers block in loop LOOP, counted from 0.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.multiprocess.programs.toy_model import hold, say

RECIPES = Path(__file__).parents[2] / "docs" / "recipes" / "orbit"
STEPS, STEPS_PER_LOOP = 20, 4

recipe = runpy.run_path(str(RECIPES / "train.py"))
BaseTrainer: Any = recipe["Trainer"]


class Trainer(BaseTrainer):
    """Identifies samples by the bits of their first number."""

    def __init__(self, strategy: Any, hold_in: int) -> None:
        super().__init__(strategy)
        self.hold_in = hold_in

    def train_loop_begin(self) -> None:
        super().train_loop_begin()
        if int(self.global_step.numpy()) == self.hold_in * STEPS_PER_LOOP:
            hold()

    def update(self, x: Any, y: Any) -> None:
        tf.print("samples", tf.bitcast(x[:, 0], tf.int32), summarize=-1)
        super().update(x, y)


def main(directory: str, file: str, hold_in: str = "-1") -> None:
    """Trains; prints everything that an exact resume must have kept."""
    tempfile.tempdir = str(Path.cwd())  # deleted at the end of the test
    recipe["make_exact"]()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    trainer = Trainer(strategy, int(hold_in))
    train = runpy.run_path(str(RECIPES / file))["train"]
    train(trainer, directory, STEPS, STEPS_PER_LOOP)
    values = [*trainer.model.variables, *trainer.optimizer.variables]
    state = {each.name: each.numpy().tobytes().hex() for each in values}
    say("result", json.dumps(state))


main(*sys.argv[1:])
