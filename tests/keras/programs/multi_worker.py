"""Trains small models with Keras 3, and prints the results as `result {...}`.

    multi_worker.py DIRECTORY workers DEVICES   a worker of TF_CONFIG's cluster
    multi_worker.py DIRECTORY process           the same in one process

The single process has two logical devices, and trains on both or without a strategy. If
DEVICES is two, each worker has two replicas, on logical devices.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf

from tfpreempt.keras.multi_worker import enable_multi_worker

rng = np.random.default_rng(0)
# Few steps, since each has a dozen collectives. Batches of 8 over 12 and 11 rows: the
# last one is smaller and, in the second, does not split evenly either.
x, x_val = (rng.random((rows, 8), np.float32) for rows in (12, 11))
y, y_val = ((each.sum(axis=1) > 4).astype("int32") for each in (x, x_val))
weights = rng.random(12, np.float32)

layers = keras.layers


class Look(keras.callbacks.Callback):
    """Records the objects at the beginning of a training, and later additions."""

    def __init__(self, read):
        super().__init__()
        self._read = read
        self.seen = {}

    def _counts(self):
        model = self.model
        kinds = (model, model.optimizer)
        own = [len(each.variables) for each in kinds]
        return [*own, len(model.metrics_variables)]

    def on_train_begin(self, logs=None):
        model = self.model
        parts = (*model.layers, model._compile_metrics, model._compile_loss)
        self.seen["rows_read"] = len(self._read)
        self.seen["built"] = [bool(each.built) for each in (*parts, model.optimizer)]
        self.seen["made"] = self._counts()

    def on_train_end(self, logs=None):
        self.seen["made_later"] = np.subtract(
            self._counts(), self.seen["made"]
        ).tolist()
        self.seen["rows_read_later"] = len(self._read)


class Cases:
    """Each public method makes a model, uses it, and returns comparable values."""

    def __init__(self, strategy, steps_per_execution=1):
        self.strategy = strategy
        self._steps_per_execution = steps_per_execution
        self.seen = {}

    def _compiled(self, layers_of_model, optimizer=keras.optimizers.Adam, **options):
        """An unbuilt model."""
        keras.utils.set_random_seed(7)
        with self.strategy.scope():
            model = keras.Sequential(layers_of_model())
            options = {"metrics": ["accuracy"]} | options
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer(), loss, **options)
        return model

    def _simple(self, **options):
        dense = layers.Dense
        return self._compiled(
            lambda: [dense(4, activation="relu"), dense(2)], **options
        )

    def _fit(self, model, *data, **options):
        # shuffle=False: building reads a batch in one process and none with workers,
        # so a data set that shuffles is an epoch ahead there.
        options = {"epochs": 2, "verbose": 0, "shuffle": False} | options
        history = model.fit(*data, **options).history
        parts = [
            self.strategy.experimental_local_results(each.value)
            for each in model.weights
        ]
        return {
            "history": history,
            "steps": int(model.optimizer.iterations.numpy()),
            # by local replica, then by variable
            "weights": [
                [np.asarray(part).tolist() for part in replica]
                for replica in zip(*parts, strict=True)
            ],
        }

    def layers(self):
        """Dropout, BatchNormalization, sample weights; fit, evaluate and predict."""
        model = self._compiled(
            lambda: [
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(2),
            ],
            lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            metrics=None,
            weighted_metrics=["accuracy"],
        )
        validation = (x_val, y_val, weights[:11])
        found = self._fit(
            *(model, x, y),
            batch_size=8,
            epochs=1,
            sample_weight=weights,
            validation_data=validation,
        )
        found["evaluate"] = model.evaluate(x_val, y_val, batch_size=8, verbose=0)
        found["predict"] = model.predict(x_val, batch_size=8, verbose=0).tolist()
        return found

    def schedule(self):
        """Trains with a LearningRateSchedule, class weights, and unknown shapes.

        Then trains single batches, which every replica gets as a whole.
        """
        spec = (tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int32))
        data = tf.data.Dataset.from_generator(
            lambda: zip(x, y, strict=True), output_signature=spec
        )
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        model = self._compiled(
            lambda: [layers.Dense(4), layers.Dense(2)],
            lambda: keras.optimizers.SGD(decay),
        )
        found = self._fit(model, data.batch(8), epochs=1, class_weight={0: 1.0, 1: 3.0})
        found["on_batch"] = [
            *model.train_on_batch(x[:8], y[:8]),
            *model.test_on_batch(x[:8], y[:8]),
            model.predict_on_batch(x[:8]).tolist(),
        ]
        return found

    def callbacks(self):
        """Callbacks that set the rate and end the training; several steps at a time.

        The rows are counted as they are read.
        """
        read = []

        def rows():
            for row in zip(x, y, strict=True):
                read.append(row)
                yield row

        spec = (tf.TensorSpec([8], tf.float32), tf.TensorSpec([], tf.int32))
        data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(4)
        model = self._simple(steps_per_execution=self._steps_per_execution)
        look = Look(read)
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.EarlyStopping("val_loss", min_delta=1.0, patience=1),
            look,
        ]
        found = self._fit(
            *(model, data),
            epochs=5,
            callbacks=callbacks,
            validation_data=(x_val, y_val),
            # Under a MirroredStrategy, Keras cannot begin with an uneven batch.
            validation_batch_size=8,
        )
        self.seen = look.seen
        return found

    def order(self):
        """Returns the numbers of rows from a model, and twice these numbers."""
        with self.strategy.scope():
            given = keras.Input([1])
            outputs = {str(n): layers.Rescaling(float(n))(given) for n in (1, 2)}
            model = keras.Model(given, outputs)
            model.compile(steps_per_execution=self._steps_per_execution)
        rows = np.arange(11, dtype="float32")[:, None]
        data = tf.data.Dataset.from_tensor_slices(rows).batch(4)
        found = [
            model.predict(rows, batch_size=3, verbose=0),
            model.predict(data, verbose=0),
        ]
        return [
            {name: value[:, 0].tolist() for name, value in each.items()}
            for each in found
        ]

    def smooth(self):
        """Returns the values that depend on the split of a batch only by rounding."""
        model = self._compiled(
            lambda: [layers.Dense(4, activation="tanh"), layers.Dense(2)],
            lambda: keras.optimizers.SGD(0.1),
        )
        validation = (x_val, y_val)
        found = self._fit(
            *(model, x, y), batch_size=8, epochs=1, validation_data=validation
        )
        found["predict"] = model.predict(x_val, batch_size=8, verbose=0).tolist()
        return found

    def stray_metric(self):
        """A metric from outside of the scope."""
        outside = keras.metrics.SparseCategoricalAccuracy(name="outside")
        self._simple(metrics=[outside]).evaluate(x, y, batch_size=8, verbose=0)

    def run(self, *names):
        return {name: getattr(self, name)() for name in names}


EXACT = ("layers", "schedule", "callbacks", "order")


def error(function):
    try:
        function()
    except Exception as raised:
        return [type(raised).__name__, str(raised)]
    return None


def logical_devices(count):
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )


def two_replicas_in_a_worker():
    """A worker has a replica for each GPU, or one on its CPU; here it has two."""
    from tensorflow.python.distribute import collective_all_reduce_strategy as module

    logical_devices(2)
    module.CollectiveAllReduceExtended._initialize_local_devices = (
        lambda self, resolver, worker: (
            (f"{worker}/device:CPU:0", f"{worker}/device:CPU:1"),
            "CPU",
        )
    )


def as_worker(devices):
    if devices == 2:
        two_replicas_in_a_worker()
    patch = enable_multi_worker()
    # 2 does not divide the 3 steps of an epoch.
    cases = Cases(tf.distribute.MultiWorkerMirroredStrategy(), steps_per_execution=2)
    assert cases.strategy.num_replicas_in_sync == 2 * devices
    if devices == 2:
        return cases.run("smooth")
    patch.remove()
    without = error(cases.callbacks)
    enable_multi_worker()
    found = cases.run(*EXACT)
    errors = {"without": without, "stray_metric": error(cases.stray_metric)}
    return found | errors | {"seen": cases.seen}


def as_one_process():
    logical_devices(2)
    # steps_per_execution above 1 fails in Keras under a MirroredStrategy.
    return Cases(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])).run(*EXACT)


def without_strategy():
    return Cases(tf.distribute.get_strategy()).run("smooth")


tf.config.experimental.enable_op_determinism()
mode, *more = sys.argv[2:]
modes = {
    "workers": lambda: as_worker(int(more[0])),
    "process": as_one_process,
    "plain": without_strategy,
}
result = modes[mode]()
print("result", json.dumps(result), flush=True)
