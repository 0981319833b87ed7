"""The recipe's loop in fewer steps, which holds before one of them.

Usage: trackers_program.py CHECKPOINTS STEP TRACKER [LOGDIR], where STEP, where it
holds, may be past the end; LOGDIR is TensorBoard's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import tfpreempt
from tests.multiprocess.programs.toy_model import hold, say

RECIPE = Path(__file__).parents[2] / "docs/recipes/trackers/loop.py"
STEPS, SAVE_EVERY = 16, 4


class HoldingHandler(tfpreempt.PreemptionCheckpointHandler):
    """Prints each step, and blocks before one step."""

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.total_run_calls
        if step == int(sys.argv[2]):
            hold()
        value = super().run(function, *args, **kwargs)
        say("trained", step + 1, float(value).hex())
        return value


def main(directory: str, _step: str, name: str, *more: str) -> None:
    """Trains as the recipe does."""
    recipe = runpy.run_path(str(RECIPE))
    tfpreempt.PreemptionCheckpointHandler = HoldingHandler  # type: ignore[misc]
    tracker = getattr(tfpreempt.trackers, name)(*more, config={"rate": 0.01})
    recipe["train"](directory, tracker, steps=STEPS, save_freq=SAVE_EVERY)


main(*sys.argv[1:])
