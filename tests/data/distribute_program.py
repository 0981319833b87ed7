"""Compares `distribute` with TensorFlow's function; prints the differences.

Usage: distribute_program.py CHECKPOINTS STRATEGY [DEVICES], where STRATEGY is "one",
"mirrored" with DEVICES logical devices, or "mwms" with TF_CONFIG. In each case both
iterators are read to the end. Then an iterator of tfpreempt is read for a while, and
saved by a `tf.train.Checkpoint`. A new iterator must yield the rest after the restore.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.data.cases import make_cases, read
from tfpreempt.data import distribute

READ = 2  # batches before the save


def make_strategy(name: str, devices: int) -> Any:
    """The strategy; logical devices are made for it."""
    if name == "mwms":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "one":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    cpu = tf.config.list_physical_devices("CPU")[0]
    some = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(cpu, some)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])


def theirs(strategy: Any, data: Any) -> Any:
    """TensorFlow's iterator."""
    if callable(data):
        return iter(strategy.distribute_datasets_from_function(data))
    return iter(strategy.experimental_distribute_dataset(data))


def compare(
    strategy: Any, make: Any, directory: Path, is_ahead: bool
) -> dict[str, Any]:
    """Facts of one case; with batches that are copied to the devices ahead, or not."""
    options = tf.distribute.InputOptions() if is_ahead else None
    try:
        expected = read(strategy, theirs(strategy, make()))
    except Exception as error:
        expected = [type(error).__name__]
    try:
        whole = read(strategy, distribute(make(), strategy, options))
    except Exception as error:
        return {"same": [type(error).__name__] == expected, "refused": str(error)}
    found: dict[str, Any] = {"same": whole == expected, "batches": len(expected)}
    if not found["same"]:
        found |= {"ours": whole[-2:], "theirs": expected[-2:]}
    ours = distribute(make(), strategy, options)
    read(strategy, ours, READ)
    prefix = str(directory / "ckpt")
    try:
        path = tf.train.Checkpoint(data=ours).write(prefix)
    except tf.errors.OpError as error:
        return found | {"unsaved": error.message[:300]}
    again = distribute(make(), strategy, options)
    tf.train.Checkpoint(data=again).read(path).assert_consumed()
    rest = read(strategy, again, len(whole) - READ)
    return found | {"continued": rest == whole[READ:]}


def main(checkpoints: str, name: str, devices: str = "1") -> None:
    """Prints the facts of all cases."""
    del checkpoints
    strategy = make_strategy(name, int(devices))
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for case, make in make_cases(Path(directory)).items():
            is_ahead = case.endswith("_ahead")
            found[case] = compare(strategy, make, Path(directory), is_ahead)
    print("result", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
