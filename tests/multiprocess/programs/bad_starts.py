"""Two workers that start wrongly; the test reads the errors of both."""

from __future__ import annotations

import os
import sys

import tensorflow as tf
from toy_model import INDEX, log_to_stdout, make_strategy, say

from tfpreempt import PreemptionCheckpointHandler

directory, what = sys.argv[1:3]
log_to_stdout()
strategy = make_strategy("mwms")
resolver = strategy.cluster_resolver
with strategy.scope():
    weights = tf.Variable(tf.ones([3]))
checkpoint = tf.train.Checkpoint(weights=weights)


def attempt(name: str, *arguments: object) -> PreemptionCheckpointHandler | None:
    try:
        handler = PreemptionCheckpointHandler(*arguments)
    except Exception as error:
        say(name, type(error).__name__, str(error).replace("\n", " "))
        return None
    say(name, "works")
    return handler


if what == "world":
    if INDEX == 1:
        addresses = [*resolver.cluster_spec().as_dict()["worker"], "127.0.0.1:1"]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=1
        )
    attempt("world", resolver, checkpoint, directory)
    sys.exit(7)

# The same path is a different directory in each process, as without a shared disk.
os.makedirs(f"own-{INDEX}")
os.chdir(f"own-{INDEX}")
attempt("storage", resolver, checkpoint, "/proc/self/cwd/ckpt")
os.chdir("..")
attempt("file", resolver, checkpoint, __file__)
mine = attempt("good", resolver, checkpoint, directory)
assert mine is not None
with mine:
    mine.run(lambda: weights.assign_add(tf.ones([3])))

other = tf.train.Checkpoint(kernel=tf.Variable(tf.zeros([5])))
attempt("model", resolver, other, directory)
assert other.kernel.numpy().tolist() == [0.0] * 5
