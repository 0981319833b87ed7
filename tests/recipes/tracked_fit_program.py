"""The recipe's fit with fewer epochs, which blocks before it logs one of them.

Usage: tracked_fit_program.py CHECKPOINTS EPOCH TRACKER [LOGDIR]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import tfpreempt
from tests.multiprocess.programs.toy_model import hold, say

RECIPE = Path(__file__).parents[2] / "docs/recipes/trackers/fit.py"
EPOCHS, SAVE_FREQ = 6, 25


def main(directory: str, held: str, name: str, *more: str) -> None:
    """Trains as the recipe does."""
    tracker = getattr(tfpreempt.trackers, name)(*more, config={"optimizer": "adam"})
    log = tracker.log

    def log_and_say(metrics: dict[str, Any]) -> None:
        if metrics["epoch"] == int(held):
            hold()
        log(metrics)
        say("logged", metrics["epoch"], float(metrics["loss"]).hex())

    tracker.log = log_and_say
    runpy.run_path(str(RECIPE))["train"](directory, tracker, EPOCHS, SAVE_FREQ)


main(*sys.argv[1:])
