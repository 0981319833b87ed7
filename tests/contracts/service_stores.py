"""The stores of real coordination services: this process is a cluster of one worker."""

from __future__ import annotations

import functools
import json
import os

from tests.ports import free_ports
from tfpreempt.coordination.key_value_store import KeyValueStore


def tensorflow() -> tuple[KeyValueStore, None]:
    """The store, emptied; its service lives as long as the process."""
    from tfpreempt.handler.tensorflow_adapter import TensorFlowStore

    start_tensorflow()
    store = TensorFlowStore([("worker", 1)])
    store.delete("c")
    return store, None


@functools.cache
def start_tensorflow() -> None:
    (port,) = free_ports(1)
    cluster = {"worker": [f"127.0.0.1:{port}"]}
    task = {"type": "worker", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()


def jax() -> tuple[KeyValueStore, None]:
    """The store, emptied; its service lives as long as the process."""
    from tfpreempt.jax.distributed import JaxStore

    start_jax()
    store = JaxStore()
    store.delete("c")
    return store, None


@functools.cache
def start_jax() -> None:
    import jax

    (port,) = free_ports(1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
