"""The program of the bench `path`: trains until it is preempted, or for one step.

Usage: python -m benchmarks.path_program KIND PHASE PACKAGE DIRECTORY TRACE

KIND is `loop` or `fit`. PHASE is `preemption`: the program receives SIGTERM during a
step, and writes the calls from the signal to its end to TRACE; `restart`: the program
writes the calls from the handler's construction to the end of the first step to TRACE;
or `train`: neither. PACKAGE is the directory of the `tfpreempt` to use. The program is
one worker of the cluster that TF_CONFIG describes, if the variable is set.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.tracer import Tracer

STRUCK = 3
"""Steps that were done when the signal comes."""
STEPS = 10_000
OTHERS_SECONDS = 0.5
NOTICE_SECONDS = 1.0


class Moments:
    """The moments at which the trace begins and ends.

    Args:
        phase: PHASE of the command line.
        tracer: tracer, not yet started.
    """

    def __init__(self, phase: str, tracer: Tracer) -> None:
        self._phase = phase
        self._tracer = tracer

    def begins(self) -> None:
        """Called before the handler is created."""
        if self._phase == "restart":
            self._tracer.start()

    def in_step(self, number: int) -> None:
        """Called in a step, while the other workers wait for this worker in the step.

        The pauses make all runs alike: before the signal the other workers have entered
        the step, too. Threads that the signal wakes are idle before the step continues.
        """
        if self._phase == "preemption" and number == STRUCK:
            time.sleep(OTHERS_SECONDS)
            self._tracer.start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(NOTICE_SECONDS)

    def step_done(self, number: int) -> None:
        """Called after the call that runs the step."""
        if self._phase == "restart":
            if number != STRUCK + 1:
                raise RuntimeError(f"went on at step {number}, not at {STRUCK + 1}")
            self._tracer.leave(0)


def loop(directory: str, moments: Moments) -> None:
    """Trains by the custom loop of README.md."""
    import tfpreempt

    make_handler = tfpreempt.PreemptionCheckpointHandler
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([8]), aggregation=tf.VariableAggregation.MEAN)
    batches = iter(tf.data.Dataset.range(STEPS))
    checkpoint = tf.train.Checkpoint(weights=weights, batches=batches)

    @tf.function
    def train(number: Any) -> None:
        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            ones = tf.fill([8], tf.cast(number, tf.float32))
            weights.assign_add(context.all_reduce(tf.distribute.ReduceOp.MEAN, ones))

        strategy.run(on_replica)

    def step() -> None:
        number = next(batches)
        moments.in_step(int(number))
        train(number)

    moments.begins()
    with make_handler(strategy.cluster_resolver, checkpoint, directory) as handler:
        for number in range(handler.total_run_calls, STEPS):
            handler.run(step)
            moments.step_done(number)


def fit(directory: str, moments: Moments) -> None:
    """Trains by `model.fit` with the callback."""
    from tfpreempt.keras import PreemptionCallback, enable_multi_worker

    enable_multi_worker()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    rows = tf.ones([STEPS, 4])
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(2)

    model.make_train_function()
    inner = model.train_function
    steps = iter(range(STEPS))

    def train(iterator: Any) -> Any:
        moments.in_step(next(steps))
        return inner(iterator)

    model.train_function = train
    moments.begins()
    ours = PreemptionCallback(directory)
    done = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: moments.step_done(batch)
    )
    model.fit(data, verbose=0, callbacks=[ours, done])


def main(kind: str, phase: str, package: Path, directory: str, trace: Path) -> None:
    """Runs the program of a kind with the `tfpreempt` in the directory `package`."""
    sys.path.insert(0, str(package))
    import tfpreempt

    if Path(tfpreempt.__file__).parents[1] != package:
        raise RuntimeError(f"wanted tfpreempt of {package}, got {tfpreempt.__file__}")
    moments = Moments(phase, Tracer(package / "tfpreempt", trace))
    {"loop": loop, "fit": fit}[kind](directory, moments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
