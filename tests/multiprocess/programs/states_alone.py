"""A loop of plain Python and NumPy with named States, which asks for its preemptions.

Usage: states_alone.py DIRECTORY [STEP ...] [--late-tensorflow]

The first process of a run gets SIGTERM in the first STEP, the second in the second, and
so on. The last line is the same in each run that comes to the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import sys
import time

import numpy as np

import tfpreempt
from tfpreempt.states import ArrayDictState, JsonState

STEPS = 12
HEARD_WITHIN = 0.5  # seconds until the handler has a signal

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("preempted_in", nargs="*", type=int)
parser.add_argument("--late-tensorflow", action="store_true")
options = parser.parse_args()

random.seed(1)
np.random.seed(2)
state = ArrayDictState("state", {"weights": np.zeros(3)})
losses = JsonState("losses", [])
restart = tfpreempt.num_restarts()
preempted_in = dict(enumerate(options.preempted_in)).get(restart)


def draw() -> float:
    """A random number of TensorFlow, which no module has imported before."""
    if not options.late_tensorflow:
        return 0.0
    is_new = "tensorflow" not in sys.modules
    import tensorflow as tf

    if is_new and restart == 0:
        tf.random.set_seed(3)
    return float(tf.random.uniform([]))


def train() -> None:
    if handler.total_run_calls == preempted_in:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HEARD_WITHIN)
    state.arrays["weights"] += np.random.normal(size=3) * random.random() + draw()
    losses.value.append(float(state.arrays["weights"].sum()))


print("TensorFlow", importlib.util.find_spec("tensorflow") is not None, flush=True)
with tfpreempt.PreemptionCheckpointHandler(
    None, None, options.directory, save_freq=4
) as handler:
    print("starts", handler.total_run_calls, flush=True)
    while handler.total_run_calls < STEPS:
        handler.run(train)
print("final", state.arrays["weights"].tobytes().hex(), losses.value, flush=True)
