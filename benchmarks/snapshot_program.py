"""Trains a state of a given size until SIGTERM; prints each step.

Usage: snapshot_program.py MEBIBYTES STEP_SECONDS COMMIT_SECONDS
"""

from __future__ import annotations

import datetime
import os
import sys
import time

import tensorflow as tf

import tfpreempt

mebibytes, step_seconds, commit_seconds = map(float, sys.argv[1:])
counter = tf.Variable(0.0)
state = [tf.Variable(tf.zeros([int(mebibytes * 2**15)])) for _ in range(8)]


def step() -> None:
    time.sleep(step_seconds)
    counter.assign_add(1.0)


with tfpreempt.PreemptionCheckpointHandler(
    None,
    tf.train.Checkpoint(state=state, counter=counter),
    os.environ["TFPREEMPT_CHECKPOINT_DIR"],
    save_freq=datetime.timedelta(seconds=commit_seconds),
) as handler:
    print(f"begins, restart {tfpreempt.num_restarts()}", flush=True)
    while True:
        handler.run(step)
        print("step", handler.total_run_calls, flush=True)
