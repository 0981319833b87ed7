"""What `tfpreempt.keras.data` gives in another process, with two logical devices.

Reads the path of a saved position from its arguments; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.keras.positions import deserialize, numbers, serialize
from tfpreempt.keras import data
from tfpreempt.keras.data.replica_slices import replica_slices

SIZE, BATCH, SEED = 50, 8, 3


def dataset(drop_remainder=False):
    samples = np.arange(SIZE)
    return data.from_arrays(
        (samples, {"half": samples / 2}),
        batch_size=BATCH,
        seed=SEED,
        drop_remainder=drop_remainder,
    )


def continued(path, dropped):
    """The rest of the interrupted epoch and two more, with and without drops."""
    fresh = dataset()
    for _ in range(dropped):
        iter(fresh)
    iterator = iter(fresh)
    deserialize(iterator, path.read_bytes())
    return [numbers(iterator), numbers(fresh), numbers(fresh)]


def local(strategy, batch):
    return [
        part.numpy().tolist() for part in strategy.experimental_local_results(batch)
    ]


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    path = Path(sys.argv[1])
    found = {"continued": [continued(path, 2), continued(path, 0)]}
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for key, drop in (("whole", False), ("dropped", True)):
        theirs = strategy.experimental_distribute_dataset(dataset(drop))
        found[f"{key}_theirs"] = [
            [local(strategy, batch[0]) for batch in theirs] for _ in range(2)
        ]
        distributed = strategy.experimental_distribute_dataset(dataset(drop))
        ours = replica_slices(distributed)
        found[f"{key}_ours"] = [numbers(ours) for _ in range(2)]
        found[f"{key}_same_spec"] = ours.element_spec == (
            distributed._cloned_datasets[0].element_spec
        )
    distributed = strategy.experimental_distribute_dataset(dataset())
    iter(replica_slices(distributed))
    iterator = iter(replica_slices(distributed))
    for _ in range(6):
        next(iterator)
    state = serialize(iterator)
    found["slices_bytes"] = len(state)
    again = replica_slices(strategy.experimental_distribute_dataset(dataset()))
    iterator = iter(again)
    deserialize(iterator, state)
    found["slices_continued"] = [numbers(iterator), numbers(again)]
    plain = tf.data.Dataset.range(SIZE).batch(BATCH)
    others = strategy.experimental_distribute_dataset(plain)
    found["slices_of_others"] = replica_slices(others) is None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
