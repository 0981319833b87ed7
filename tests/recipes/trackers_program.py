"""A tracker's recipe in fewer steps, which holds before one of them.

Usage: trackers_program.py CHECKPOINTS FILE STEP [ARGUMENT], where FILE is the recipe's
and STEP, where it holds, may be past the end; ARGUMENT is the recipe's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import tfpreempt
from tests.multiprocess.programs.toy_model import hold, say

RECIPES = Path(__file__).parents[2] / "docs" / "recipes" / "trackers"
STEPS, SAVE_EVERY = 16, 4


class HoldingHandler(tfpreempt.PreemptionCheckpointHandler):
    """Says each step, and holds before one."""

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.total_run_calls
        if step == int(sys.argv[3]):
            hold()
        value = super().run(function, *args, **kwargs)
        say("trained", step, float(value).hex())
        return value


def main(directory: str, file: str, _step: str, *more: str) -> None:
    """Trains as the recipe does."""
    sys.path.insert(0, str(RECIPES))  # as when it is run as a program
    sys.dont_write_bytecode = True  # there is what the page links, and no more
    recipe = runpy.run_path(str(RECIPES / file))
    tfpreempt.PreemptionCheckpointHandler = HoldingHandler  # type: ignore[misc]
    recipe["train"](directory, *more, steps=STEPS, save_freq=SAVE_EVERY)


main(*sys.argv[1:])
