"""Results of `tfpreempt.data` in another process, with two logical devices.

Reads the path of a saved position from its arguments; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.keras.positions import deserialize, numbers, serialize
from tfpreempt import data
from tfpreempt.data.iterators import make_iterator, owned_iterators

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


def joined(iterator, strategy):
    """Returns the global batches, joined from the batches of the replicas."""
    parts = (strategy.experimental_local_results(batch[0]) for batch in iterator)
    return [np.concatenate(each).tolist() for each in parts]


def retraced(strategy):
    """Returns the sums of a function that is traced again only for general shapes."""

    @tf.function(reduce_retracing=True)
    def total(iterator):
        added = strategy.run(tf.reduce_sum, (next(iterator),))
        return strategy.reduce("SUM", added, axis=None)

    found = []
    for size in (8, 12, 6, 7):
        ones = tf.data.Dataset.from_tensors(tf.ones([size, 3])).repeat()
        found.append(float(total(data.distribute(ones, strategy))) / 3)
    return found


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    path = Path(sys.argv[1])
    found = {"continued": [continued(path, 2), continued(path, 0)]}
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for key, drop in (("whole", False), ("dropped", True)):
        found[key] = joined(data.distribute(dataset(drop), strategy), strategy)
    distributed = strategy.experimental_distribute_dataset(dataset())
    make_iterator(distributed)
    iterator = make_iterator(distributed)
    for _ in range(3):
        next(iterator)
    [host] = owned_iterators(iterator)
    state = serialize(host)
    found["slices_bytes"] = len(state)
    again = strategy.experimental_distribute_dataset(dataset())
    iterator = make_iterator(again)
    [host] = owned_iterators(iterator)
    deserialize(host, state)
    epochs = (iterator, make_iterator(again))
    found["slices_continued"] = [joined(each, strategy) for each in epochs]
    found["sizes"] = retraced(strategy)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
