"""The recipe's fit in fewer epochs, which holds before it logs one of them.

Usage: tracked_fit_program.py CHECKPOINTS EPOCH
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import mlflow

from tests.multiprocess.programs.toy_model import hold, say

RECIPE = Path(__file__).parents[2] / "docs/recipes/trackers/fit_with_mlflow.py"
EPOCHS, SAVE_FREQ = 6, 25

log_metrics = mlflow.log_metrics


def log(metrics: dict[str, float], step: int) -> None:
    """Says what is logged."""
    if step == int(sys.argv[2]):
        hold()
    say("logged", step, float(metrics["loss"]).hex())
    log_metrics(metrics, step=step)


mlflow.log_metrics = log
runpy.run_path(str(RECIPE))["train"](sys.argv[1], EPOCHS, SAVE_FREQ)
