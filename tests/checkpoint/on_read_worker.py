"""One worker of test_on_read_two_processes: saves, changes everything, restores."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import time


def make_variables(tf, strategy):
    reading = tf.VariableSynchronization.ON_READ
    aggregations = {
        "total": tf.VariableAggregation.SUM,
        "average": tf.VariableAggregation.MEAN,
        "first": tf.VariableAggregation.ONLY_FIRST_REPLICA,
    }
    with strategy.scope():
        found = {
            name: tf.Variable(
                [0.0, 0.0],
                synchronization=reading,
                aggregation=aggregation,
                trainable=False,
            )
            for name, aggregation in aggregations.items()
        }
        found["weights"] = tf.Variable([1.0, 2.0, 3.0])
        found["rate"] = tf.Variable(0.1)  # each worker sets its rate and its bias
        found["bias"] = tf.Variable([0.0])
        import keras

        keras_metric = keras.metrics.Mean()
    found["keras_total"] = keras_metric.total
    found["plain"] = tf.Variable(7.0)  # of each worker, as is the generator
    found["large"] = tf.Variable(tf.zeros([(1 << 18) + 1]))
    found["text"] = tf.Variable("")
    found["random"] = tf.random.Generator.from_seed(1)
    return found


def parts(variables):
    from tfpreempt.checkpoint.tensors.variables import distributed

    return {
        name: [c.numpy().tobytes().hex() for c in distributed(v).values]
        for name, v in variables.items()
        if distributed(v) is not None
    }


def fill(tf, variables, worker, add):
    from tfpreempt.checkpoint.tensors.variables import distributed

    for position, name in enumerate(["total", "average", "first", "keras_total"]):
        for component in distributed(variables[name]).values:
            value = 1.0 / 3 + worker * 0.62 + position + add
            component.assign([value, -0.0] if name != "keras_total" else value)
    variables["plain"].assign(7.0 + worker + add)
    for name in ("rate", "bias"):
        part = distributed(variables[name]).values[0]
        part.assign(tf.fill(part.shape, worker + add))
    variables["large"][0].assign(worker + add)
    variables["text"].assign(f"{worker + add}")
    variables["random"].reset_from_seed(int(100 * (worker + add)))


def local(variables):
    state = variables["random"].state.numpy().tolist()
    values = [variables[name].numpy().tolist() for name in ("plain", "rate")]
    return [*values, state]


def wait_for(path):
    limit = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError(str(path))
        time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint_dir", help="not used")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--form", required=True)
    options = parser.parse_args()
    config = json.loads(os.environ["TF_CONFIG"])
    worker, world = config["task"]["index"], len(config["cluster"]["worker"])
    logging.basicConfig(level=logging.INFO)
    import keras
    import tensorflow as tf

    from tests.checkpoint.fakes import write_part
    from tfpreempt.checkpoint.bundles import bundle_writer
    from tfpreempt.checkpoint.restore import opening
    from tfpreempt.core.cluster import read_cluster

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    variables = make_variables(tf, strategy)
    data = iter(tf.data.Dataset.range(100).shuffle(10, seed=worker))
    outside = keras.optimizers.SGD(0.1)  # variables of Keras, not of the strategy
    checkpoint = tf.train.Checkpoint(data=data, outside=outside, **variables)
    directory = options.out / "checkpoints"
    given = checkpoint
    if options.form == "manager":
        # a non-chief manager may have a directory of its own
        own = directory if worker == 0 else options.out / "elsewhere"
        given = tf.train.CheckpointManager(checkpoint, str(own), max_to_keep=2)
    if options.form == "threads":  # small as it is
        bundle_writer.SMALL_BYTES = bundle_writer.WORTH_BYTES = 0
    saver = opening.open_directory(
        given,
        str(directory),
        cluster=read_cluster(strategy.cluster_resolver),
        chief_directory=str(directory),
    )
    fill(tf, variables, worker, add=0.0)
    before = parts(variables)
    report = {"needs_peers": saver.contents.needs_peers(), "parts": before}
    for step in (3, 4):
        staged = write_part(saver, step, f"test-{step}")
        (options.out / f"done-{step}-{worker}").touch()
        if worker == 0:
            for other in range(world):
                wait_for(options.out / f"done-{step}-{other}")
            commit = staged.publish("save", range(world))
            report["path"] = commit.path
            (options.out / f"committed-{step}").touch()
        wait_for(options.out / f"committed-{step}")
        if step == 3:
            fill(tf, variables, worker, add=1.0 / 7)
            for _ in range(2 + worker):
                next(data)
    report |= {"parts": parts(variables), "local": local(variables)}
    report["counter"] = int(checkpoint.save_counter.numpy())
    report["next"] = [int(next(data)) for _ in range(5)]
    fill(tf, variables, worker, add=5.0)
    variables["weights"].assign([0.0, 0.0, 0.0])
    candidate = saver.newest()
    restored = saver.restore(saver.find(candidate.token))
    report["restored_next"] = [int(next(data)) for _ in range(5)]
    report["restored_parts"] = parts(variables)
    report["restored_local"] = local(variables)
    report["large"] = float(variables.pop("large")[0].numpy())
    report["text"] = variables.pop("text").numpy().decode()
    report["restored_step"] = restored.step
    report["weights"] = [float(x) for x in variables["weights"].numpy()]
    report["reduced"] = {
        name: [float(x) for x in tf.reshape(tf.convert_to_tensor(v), [-1])]
        for name, v in sorted(variables.items())
        if name not in ("plain", "rate", "bias", "random")
    }
    (options.out / f"report-{worker}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
