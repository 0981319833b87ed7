"""A remote worker, which serves every client until its machine is deleted."""

from __future__ import annotations

import json
import sys

import tensorflow as tf
from toy_model import say

_, _, index, cluster = sys.argv
server = tf.distribute.Server(
    json.loads(cluster), job_name="worker", task_index=int(index), protocol="grpc"
)
say("serving")
server.join()
