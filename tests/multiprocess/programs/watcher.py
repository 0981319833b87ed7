"""A client without a handler, which receives a notice and saves by itself."""

from __future__ import annotations

import json
import sys
import time

import tensorflow as tf
from toy_model import hold, say

import tfpreempt

tfpreempt.connect_to_cluster(tf.train.ClusterSpec(json.loads(sys.argv[2])))
with tf.device("/job:worker/task:1/device:CPU:0"):
    weights = tf.Variable(1.0)
watcher = tfpreempt.PreemptionWatcher()
hold("first")
end = time.monotonic() + 20
while watcher.preemption_message is None and time.monotonic() < end:
    time.sleep(0.05)
say("message", watcher.preemption_message)
say("still", weights.numpy())
say("gone", watcher.block_until_worker_exit(0.2))
hold("second")
say("gone", watcher.block_until_worker_exit(20.0))
watcher.close()
