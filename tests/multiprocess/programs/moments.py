"""One process that blocks at a named moment, at which the test signals it."""

from __future__ import annotations

import sys

from toy_model import (
    IS_ALONE,
    Model,
    hold,
    hold_file,
    log_to_stdout,
    make_strategy,
    say,
)

from tfpreempt import PreemptionCheckpointHandler, TerminationConfig

STEPS = 12
directory, moment = sys.argv[1:3]
log_to_stdout()


def finish(model: Model, handler: PreemptionCheckpointHandler, last: int) -> None:
    while model.steps < last:
        handler.run(step_of(model))
        say("step", handler.total_run_calls)


def step_of(model: Model):
    def step() -> None:
        if model.steps == 3:
            hold("step")
        model.step()

    return step


def make() -> tuple[Model, PreemptionCheckpointHandler]:
    model = Model(make_strategy("none" if IS_ALONE else "mwms"))
    if moment == "before the handler":
        hold("start")
    resolver = None if IS_ALONE else model.strategy.cluster_resolver
    handler = PreemptionCheckpointHandler(resolver, model.checkpoint, directory)
    say("restored", handler.total_run_calls, model.steps)
    return model, handler


def ordinary() -> None:
    """Two epochs with an evaluation between, and a tail that is not training."""
    model, handler = make()
    if moment == "before the first step":
        hold("start")
    if moment == "before the handler":
        finish(model, handler, 1 << 40)
    finish(model, handler, 6)
    if moment == "between two loops":
        hold("start")
    finish(model, handler, STEPS)
    if moment == "before close":
        hold("start")
    handler.close()
    if moment == "after close":
        hold("start")
    model.report(runs=handler.total_run_calls, worker=0)


def second_strategy() -> None:
    """Creates the handler first; the strategy then removes Python's signal handlers."""
    handler = PreemptionCheckpointHandler(None, None, directory)
    model = Model(make_strategy("mwms"))
    finish(model, handler, STEPS)
    handler.close()


def long_op() -> None:
    """Keeps the main thread in one call of C++ until the file is deleted."""
    import tensorflow as tf

    model, handler = make()
    file = str(hold_file("step"))

    @tf.function
    def busy() -> tf.Tensor:
        def goes_on(_: tf.Tensor) -> tf.Tensor:
            return tf.size(tf.io.matching_files(file)) > 0

        return tf.while_loop(goes_on, lambda x: [tf.tanh(x) + 0.1], [tf.zeros([64])])[0]

    handler.run(model.step)
    say("holding", "step")
    handler.run(busy)
    handler.run(model.step)
    say("passed the boundary")


def faulty_watcher() -> None:
    """The watcher raises, then is right."""
    asked = []

    def watcher() -> bool:
        asked.append(None)
        say("asked", len(asked))
        if len(asked) == 1:
            raise OSError("the metadata server does not answer")
        return True

    model = Model(make_strategy("none"))
    config = TerminationConfig(watcher)
    handler = PreemptionCheckpointHandler(None, model.checkpoint, directory, config)
    while True:
        handler.run(model.step)


def no_close() -> None:
    """Runs without `close()`, which TensorFlow's handler does not have."""
    model, handler = make()
    finish(model, handler, 6)
    hold("start")
    say("leaving")


match moment:
    case "second strategy":
        second_strategy()
    case "long op":
        long_op()
    case "faulty watcher":
        faulty_watcher()
    case "no close, in a function":
        no_close()
    case "no close":
        model, handler = make()
        finish(model, handler, 6)
        hold("start")
        say("leaving")
    case _:
        ordinary()
