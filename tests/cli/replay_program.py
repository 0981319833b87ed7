"""A user's loop without a framework, for `tfpreempt verify --replay`.

    replay_program.py DIRECTORY STEPS [wrong|crash STEP]

In the step the processor computes wrongly, or an error is raised. The program also
saves two States outside of the commits, one of them only once, and has an exit
function.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import tfpreempt
from tfpreempt.states import JsonState, load_state, save_state

directory, steps, *fault = sys.argv[1:]
weights = JsonState("weights", [0.0, 0.0])
seen = JsonState("seen", 0)
plan = JsonState("plan")
plan.unregister()  # in no commit


def leave() -> None:
    Path(directory, "left").touch()
    sys.exit(9)


config = tfpreempt.TerminationConfig(exit_fn=leave)
handler = tfpreempt.PreemptionCheckpointHandler(
    None, None, directory, config, save_freq=4, max_to_keep=None
)
if not load_state(plan):
    plan.value = random.random()
    save_state(plan, directory)


def train_step(step: int) -> None:
    weights.value = [each + math.sin(step + plan.value) for each in weights.value]
    if fault == ["wrong", str(step)]:
        weights.value[1] += 1e-9
    if fault == ["crash", str(step)]:
        raise RuntimeError("the crash of the test")
    seen.value += 1


with handler:
    for step in range(handler.total_run_calls, int(steps)):
        handler.run(train_step, step)
        save_state(seen, directory)
print("at the end", handler.total_run_calls)
