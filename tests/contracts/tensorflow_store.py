"""The store of a real coordination service: this process is a cluster of one worker."""

from __future__ import annotations

import functools
import json
import os

from tests.ports import free_ports
from tfpreempt.coordination.key_value_store import KeyValueStore


def make() -> tuple[KeyValueStore, None]:
    """The store, emptied; its service lives as long as the process."""
    from tfpreempt.handler.tensorflow_adapter import TensorFlowStore

    start_service()
    store = TensorFlowStore([("worker", 1)])
    store.delete("c")
    return store, None


@functools.cache
def start_service() -> None:
    (port,) = free_ports(1)
    cluster = {"worker": [f"127.0.0.1:{port}"]}
    task = {"type": "worker", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()
