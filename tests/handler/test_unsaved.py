"""Values that a step changes and no commit has are named once; others are not named."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import fractions
import functools
import gc
import itertools
import logging
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica

from tests.fakes.process import new_process
from tests.handler.program import Program
from tfpreempt import PreemptionCheckpointHandler, State, errors
from tfpreempt.data import distribute
from tfpreempt.handler.training_end import close_unfinished
from tfpreempt.states import ArrayDictState, JsonState, LoaderState, StepCounter

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]

COUNT = 0
BATCH: Any = None
LOSSES: list[float] = []
SETTINGS = {"seen": 0, "rate": 0.5, "last": 0.0}


class Trainer:
    """A user's object, whose methods are steps."""

    def __init__(self, **attributes: Any) -> None:
        self.number = 0
        self.loss = 0.0
        vars(self).update(attributes)

    def count(self) -> None:
        self.number += 1

    def evaluate(self, data: Iterator[Any]) -> Any:
        return next(data)

    def step(self) -> None:
        self.count()
        self.loss = random.random()  # said, never read

    @tf.function
    def compiled(self) -> None:
        self.parts["forgotten"].assign_add(1.0)

    def __call__(self) -> None:
        self.parts["forgotten"].assign_add(1.0)


@pytest.fixture(autouse=True)
def _only_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Removes normal events, such as commits, from `caplog`."""
    caplog.set_level(logging.WARNING)


def optimizer() -> Any:
    return keras.optimizers.SGD(0.1)


def apply(made: Any, kept: tf.Variable) -> None:
    made.apply_gradients([(tf.ones_like(kept), kept)])


def an_optimizer(kept: tf.Variable) -> Callable[[], Any]:
    forgotten = optimizer()
    return lambda: apply(forgotten, kept)


def functions_in_a_list(kept: tf.Variable) -> Callable[[], Any]:
    steps = [an_optimizer(kept), a_nonlocal(kept), a_nonlocal(kept)]

    def step() -> None:
        for each in steps:
            each()

    return step


def in_a_list(kept: tf.Variable) -> Callable[[], Any]:
    forgotten = [optimizer(), {"one": optimizer()}]

    def step() -> None:
        for made in (forgotten[0], forgotten[1]["one"]):
            apply(made, kept)

    return step


def compiled(kept: tf.Variable) -> Callable[[], Any]:
    forgotten = tf.Variable(0.0)

    @tf.function
    def inner() -> None:
        forgotten.assign_add(1.0)

    return lambda: inner()


def a_metric(kept: tf.Variable) -> Callable[[], Any]:
    forgotten = keras.metrics.Mean()
    return lambda: forgotten.update_state(kept)


def moving_averages(kept: tf.Variable) -> Callable[[], Any]:
    forgotten = tf.train.ExponentialMovingAverage(0.9)
    return lambda: (kept.assign_add(tf.ones_like(kept)), forgotten.apply([kept]))


def a_nonlocal(kept: tf.Variable) -> Callable[[], Any]:
    forgotten = 0

    def step() -> None:
        nonlocal forgotten
        forgotten += 1

    return step


def a_global(kept: tf.Variable) -> Callable[[], Any]:
    def step() -> None:
        global COUNT
        COUNT = COUNT + 1
        SETTINGS["last"] = kept.numpy().sum()
        SETTINGS["seen"] += 1

    return step


def a_compiled_method(kept: tf.Variable) -> Callable[[], Any]:
    trainer = Trainer(parts={"forgotten": tf.Variable(0.0)})
    step = trainer.compiled  # which does not keep its object alive
    return lambda: (trainer, step())


def a_target_network(kept: tf.Variable) -> Callable[[], Any]:
    return Trainer(target=tf.Module()).step


def a_list(kept: tf.Variable) -> Callable[[], Any]:
    forgotten: list[float] = []
    return lambda: forgotten.append(float(tf.reduce_sum(kept)))


def a_global_list(kept: tf.Variable) -> Callable[[], Any]:
    return lambda: LOSSES.append(1.0)


def what_was_seen(kept: tf.Variable) -> Callable[[], Any]:
    last: Any = collections.deque(maxlen=9)
    trainer = Trainer(seen={}, words=set(), names=["a"])

    def step() -> None:
        trainer.seen[len(trainer.seen)] = trainer.names[0]
        trainer.words.add(len(trainer.words))
        last.append(1.0)

    return step


class Net(keras.Model):
    """A user's model, whose base class has its own lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.norms: list[float] = []

    def call(self, batch: Any) -> Any:
        made = self.layer(batch)
        self.add_loss(tf.reduce_sum(self.layer.kernel))
        return made


def a_list_of_a_model(kept: tf.Variable) -> Callable[[], Any]:
    net = Net()

    def step() -> None:
        net(tf.ones([1, 2]))
        net.norms.append(float(tf.norm(net.layer.kernel)))

    return step


def numbers(kept: tf.Variable) -> Callable[[], Any]:
    rng, forgotten = np.random.default_rng(0), np.zeros(3)

    def step() -> None:
        forgotten[:] += rng.normal(size=3)

    return step


def an_initializer(kept: tf.Variable) -> Callable[[], Any]:
    seeds = keras.random.SeedGenerator(1)
    initializer = keras.initializers.RandomNormal(seed=seeds)
    return lambda: kept.assign_add(initializer([2]))


def an_average(kept: tf.Variable) -> Callable[[], Any]:
    holder = types.SimpleNamespace(average=tf.zeros([]))

    def step() -> None:
        holder.average = 0.9 * holder.average + tf.reduce_sum(kept)

    return step


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (an_optimizer, "forgotten"),
        (in_a_list, "forgotten[0], forgotten[1]['one']"),
        (
            functions_in_a_list,
            "forgotten, forgotten (2), forgotten (3)",
        ),
        (compiled, "forgotten"),
        (a_metric, "forgotten"),
        (moving_averages, "forgotten"),
        (a_nonlocal, "forgotten"),
        (a_global, "COUNT, SETTINGS['seen']"),
        (a_list, "forgotten"),
        (a_global_list, "LOSSES"),
        (what_was_seen, "last, trainer.seen, trainer.words"),
        (a_list_of_a_model, "net.norms"),
        (numbers, "forgotten, rng"),
        (an_average, "holder.average"),
        (an_initializer, "initializer"),
        (lambda kept: Trainer().step, "self.number"),
        (a_target_network, "self.number"),
        (a_compiled_method, "trainer.parts['forgotten']"),
        (
            lambda kept: Trainer(parts={"forgotten": tf.Variable(0.0)}),
            "self.parts['forgotten']",
        ),
        (
            lambda kept: functools.partial(apply, optimizer(), kept=kept),
            "made",
        ),
    ],
)
def test_an_unsaved_value_is_named_once(
    program: Program, make: Any, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = make(program.variable)
    with program.handler() as handler:
        handler.run(step)
        handler.run(step)
        assert caplog.text == ""
        for _ in range(3):
            handler.run(step)
    [said] = [r.getMessage() for r in caplog.records if "the commits" in r.getMessage()]
    assert f"commits: {names}. " in said


def read(iterator: Any) -> Any:
    return next(iterator)


def numbers_to(count: int) -> Any:
    return tf.data.Dataset.range(count).shuffle(3)


def test_steps_that_take_turns_are_both_searched(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tf.Variable(0.0), tf.Variable(0.0)
    steps = [lambda: first.assign_add(1.0), lambda: second.assign_add(1.0)]
    with program.handler() as handler:
        for number in range(6):
            handler.run(steps[number % 2])
    assert caplog.text.count("commits: first. ") == 1
    assert caplog.text.count("commits: second. ") == 1


def test_the_advice_is_of_the_framework_of_the_checkpoint(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """A program may import JAX beside TensorFlow."""
    pytest.importorskip("jax")
    forgotten = tf.Variable(0.0)
    with program.handler() as handler:
        for _ in range(3):
            handler.run(lambda: forgotten.assign_add(1.0))
    assert "into the tf.train.Checkpoint" in caplog.text
    assert "PyTreeState" not in caplog.text


def test_the_contents_of_a_save_fn_are_unknown(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tf.Variable(0.0)
    with program.handler(config={"save_fn": lambda: None}) as handler:
        for _ in range(4):
            handler.run(lambda: mine.assign_add(1.0))
    assert "the commits" not in caplog.text


def test_a_step_that_a_strategy_runs_is_searched(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, forgotten = tf.distribute.get_strategy(), tf.Variable(0.0)

    def step(iterator: Any) -> None:
        forgotten.assign_add(next(iterator))

    data = iter(tf.data.Dataset.from_tensors(1.0).repeat())
    with program.handler() as handler:
        for _ in range(3):
            handler.run(strategy.run, step, args=(data,))
    assert "commits: forgotten. " in caplog.text
    assert "reads from args[0], " in caplog.text


@pytest.mark.parametrize(
    ("make", "is_named"),
    [
        (lambda: iter(numbers_to(9)), True),
        (lambda: numbers_to(9).as_numpy_iterator(), True),
        (
            lambda: iter(
                tf.distribute.MirroredStrategy(
                    ["CPU:0"]
                ).experimental_distribute_dataset(numbers_to(9).batch(1))
            ),
            True,
        ),
        (lambda: iter(numbers_to(9).skip(0).prefetch(1)), False),
        (lambda: iter(tf.data.Dataset.range(3, 9)), False),
    ],
)
def test_an_iterator_that_starts_from_the_beginning_is_named(
    program: Program, make: Any, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An iterator that skips the consumed elements is as good as a saved iterator."""
    iterator = make()
    with program.handler() as handler:
        for _ in range(3):
            handler.run(read, iterator)
    assert ("reads from iterator" in caplog.text) == is_named
    assert ("total_run_calls" in caplog.text) == is_named


@pytest.mark.parametrize("is_argument", [False, True])
def test_an_iterator_of_a_step_that_the_loop_has_skipped_is_not_named(
    program: Program, is_argument: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with program.handler() as handler:
        numbers = itertools.islice(range(9), handler.total_run_calls, None)
        for _ in range(3):
            if is_argument:
                handler.run(read, numbers)
            else:
                handler.run(lambda: next(numbers))
    assert "reads from" not in caplog.text


def test_a_generator_is_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = (number for number in range(9))
    with program.handler() as handler:
        for _ in range(3):
            handler.run(lambda: next(numbers))
    assert "reads from numbers, " in caplog.text
    assert "skip the items that were read" in caplog.text


class Loader:
    """A user's loader, whose iterator is a generator."""

    def __init__(self) -> None:
        self.number = 0
        self.numbers = iter([*range(9)])

    def __iter__(self) -> Iterator[int]:
        while True:
            self.number += 1
            yield self.number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def over_a_list(handler: Any) -> None:
    batches = iter([*range(9)])
    for _ in range(handler.total_run_calls, 4):
        handler.run(abs, next(batches))


def over_a_generator_for_each_epoch(handler: Any) -> None:
    for _ in range(2):
        batches = (number for number in range(9))
        for _ in range(2):
            handler.run(abs, next(batches))


def over_an_attribute(handler: Any) -> None:
    reader = Loader()
    for _ in range(4):
        handler.run(abs, next(reader.numbers))


def over_get_next(handler: Any) -> None:
    batches = iter(numbers_to(9))
    for _ in range(4):
        batch = batches.get_next()
        handler.run(lambda batch: batch, batch)


def over_a_dataset(handler: Any) -> None:
    batches = iter(numbers_to(9))
    for _ in range(4):
        handler.run(lambda batch: batch, next(batches))


def with_evaluations(handler: Any) -> None:
    @tf.function
    def evaluate(data: Any) -> Any:
        return next(data) + next(data)

    batches = iter(numbers_to(99))
    for _ in range(4):
        handler.run(abs, 1)
        _ = sum(float(evaluate(batches)) for _ in range(2))


def with_evaluations_by_a_method(handler: Any) -> None:
    trainer, batches = Trainer(), iter([*range(9)])
    for _ in range(4):
        trainer.evaluate(batches)
        handler.run(abs, 1)


def with_an_iterator_for_each_evaluation(handler: Any) -> None:
    trainer, data = Trainer(), numbers_to(99)
    for _ in range(4):
        handler.run(abs, 1)
        batches = iter(data)
        trainer.evaluate(batches)


def with_islice(handler: Any) -> None:
    begin = handler.total_run_calls
    batches = itertools.islice(range(9), begin, None)
    for _ in range(4):
        handler.run(abs, next(batches))


def with_a_loop_that_skips(handler: Any) -> None:
    batches = iter([*range(9)])
    for _ in range(handler.total_run_calls):
        next(batches)
    for _ in range(4):
        handler.run(abs, next(batches))


def with_a_call_that_skips(handler: Any) -> None:
    begin = handler.total_run_calls
    batches = iter([*range(9)])
    next(itertools.islice(batches, begin, begin), None)
    for _ in range(4):
        handler.run(abs, next(batches))


def with_skipped_batches_in_a_variable(handler: Any) -> None:
    begin = handler.total_run_calls
    batches = iter([*range(9)])
    for _ in range(begin):
        _ = next(batches)
    for _ in range(4):
        handler.run(abs, next(batches))


def with_a_saved_loader(handler: Any) -> None:
    loader = Loader()
    kept = LoaderState("loader", loader)
    batches = iter(loader)
    for _ in range(4):
        handler.run(abs, next(batches))
    kept.unregister()


def in_a_generator(handler: Any) -> None:
    def train() -> Iterator[Any]:
        while True:
            yield handler.run(abs, 1)

    training = train()
    for _ in range(4):
        next(training)


def check_named(
    caplog: pytest.LogCaptureFixture, begins: str, named: str | None, then: str
) -> None:
    """Checks that one warning begins with these texts; that none does without names."""
    found = [each for each in caplog.messages if begins.rstrip() in each]
    expected = f"{begins}{named}{then}"
    assert [each[: len(expected)] for each in found] == ([expected] if named else [])


def test_a_saved_iterator_that_a_loop_reads_outside_of_its_step_is_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """Each restart lost the batch that was fetched before the save."""
    batches = iter(numbers_to(9))
    with program.handler(tf.train.Checkpoint(data=batches)) as handler:
        for batch in batches:
            handler.run(lambda batch: batch, batch)
    begins = "the loop fetches batches outside of its step, from "
    check_named(caplog, begins, "batches", ". If run()")


def test_a_batch_that_is_trained_before_the_boundary_is_not_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning said that each restart lost a batch."""
    batches = iter(numbers_to(9))
    with program.handler(tf.train.Checkpoint(data=batches)) as handler:
        for batch in batches:
            train_one(handler, batch)
    check_named(caplog, "the loop fetches batches", None, "")


def train_one(handler: Any, batch: Any) -> None:
    assert batch is not None
    handler.save_checkpoint_if_preempted()


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (over_a_list, "batches"),
        (over_a_generator_for_each_epoch, "batches"),
        (over_an_attribute, "reader.numbers"),
        (over_a_dataset, "batches"),
        (over_get_next, "batches"),
        (with_evaluations, "batches"),
        (with_evaluations_by_a_method, "batches"),
        (with_an_iterator_for_each_evaluation, None),
        (with_islice, None),
        (with_a_loop_that_skips, None),
        (with_a_call_that_skips, None),
        (with_skipped_batches_in_a_variable, None),
        (with_a_saved_loader, None),
        (in_a_generator, None),
    ],
)
def test_an_iterator_that_a_loop_reads_outside_of_its_step_is_named(
    program: Program, loop: Any, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The step gets the batch, `next(iterator)`, so the step cannot reach the
    iterator: a restarted loop trained with the first batches again without a word."""
    with program.handler() as handler:
        loop(handler)
    check_named(caplog, "The loop reads from ", named, ", but the commits lack ")


def drawn_batches(count: int) -> Iterator[Any]:
    yield from np.random.permutation(count)


def seeded_batches(count: int, epoch: int) -> Iterator[Any]:
    np.random.seed(epoch)
    yield from np.random.permutation(count)


def train_a_permutation(handler: Any) -> None:
    for _ in range(2):
        order = np.random.permutation(2)
        for number in order:
            handler.run(abs, number)


def train_a_shuffled_list(handler: Any) -> None:
    order = [0, 1]
    while handler.run_calls < 4:
        random.shuffle(order)
        for number in order:
            handler.run(abs, number)


def train_drawn_batches(handler: Any) -> None:
    for _ in range(2):
        for number in drawn_batches(2):
            handler.run(abs, number)


def train_seeded_epochs(handler: Any) -> None:
    np.random.permutation(2)  # before the loop
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(2)
        for number, _ in zip(order, seeded_batches(2, epoch), strict=True):
            handler.run(lambda number: number + np.random.normal(), number)


def train_a_kept_order(handler: Any) -> None:
    kept = JsonState("order", [])
    for _ in range(2):
        kept.value = np.random.permutation(2).tolist()
        for number in kept.value:
            handler.run(abs, number)
    kept.unregister()


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (train_a_permutation, "np.random.permutation(2)"),
        (train_a_shuffled_list, "random.shuffle(order)"),
        (train_drawn_batches, "drawn_batches(2)"),
        (train_seeded_epochs, None),
        (train_a_kept_order, None),
    ],
)
def test_random_numbers_that_a_loop_draws_outside_of_its_step_are_named(
    program: Program, train: Any, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart in the middle of an epoch drew another permutation without a word."""
    with program.handler() as handler:
        train(handler)
    begins = "the loop draws random numbers outside of its step: "
    check_named(caplog, begins, named, ". A commit has the state of ")


def add(number: float) -> float:
    return number


def train_with_a_milestone(handler: Any) -> None:
    noise = 0.5
    for step in range(handler.total_run_calls, 3):
        if step == 1:
            noise = 1.0
        scaled = 2 * noise
        handler.run(add, scaled)


def train_with_a_milestone_in_a_while_loop(handler: Any) -> None:
    noise = 0.5
    while handler.total_run_calls < 3:
        step = handler.total_run_calls
        if step == 1:
            noise = 1.0
        handler.run(add, noise)


def train_from_a_milestone_on(handler: Any) -> None:
    noise = 0.5 if handler.total_run_calls < 1 else 1.0
    size = 1
    for step in range(handler.total_run_calls, 3):
        if step == 1:
            noise = 1.0
        if step >= 1:
            size = 2
        if step % 2 == 0:
            shown = noise
            rate = 0.1
        else:
            rate = 0.2
        handler.run(add, noise + size + rate)
        print(shown)


def test_callbacks_of_keras_in_a_loop_are_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """ReduceLROnPlateau counted the epochs from 0 after a restart, without a word."""
    kinds = keras.callbacks
    plateau = kinds.ReduceLROnPlateau("loss")
    both = kinds.CallbackList([plateau], model=keras.Sequential())
    history = kinds.History()
    history.set_model(keras.Sequential())
    both.on_train_begin()
    history.on_train_begin()
    with program.handler() as handler:
        for epoch in range(2):
            handler.run(add, 1.0)
            keras.Sequential()  # `keras.callbacks` is a module
            for each in (both, history):
                each.on_train_batch_end(0)
            history.on_epoch_end(epoch, {})
            if epoch > 5:
                both.on_epoch_end(epoch, {"loss": 1.0})
    found = [each for each in caplog.messages if "The loop changes state" in each]
    [message] = found
    assert message.startswith(
        "The loop changes state that is not in the commits: both. A restarted run"
    )


def unfreeze(model: Any) -> None:
    for layer in model.layers:
        layer.trainable = True


def train_with_unfreezing(handler: Any) -> None:
    model = keras.Sequential([keras.layers.Normalization(input_shape=(1,))])
    step = handler.total_run_calls
    while step < 3:
        if step == 1:
            unfreeze(model)
        if step in (1, 2):
            model.layers[0].adapt(np.ones((2, 1)))
        handler.run(add, 1.0)
        step += 1


def train_in_phases(handler: Any) -> None:
    trainer = Trainer(phase=1)
    for epoch in range(2):
        if epoch == 1:
            trainer.phase = 2
        for _ in range(2):
            handler.run(add, trainer.phase)


def train_with_changes_that_a_restart_repeats(handler: Any) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    learner: Any = types.SimpleNamespace(adapt=add)
    meter = Trainer()
    start, warmup, loss = handler.total_run_calls, False, 0.0
    for step in range(start, 3):
        if step % 2 == 0:
            model.trainable = True
        else:
            model.trainable = False
        if step == 1:
            model.layers[0].trainable = False
            model.layers[0].trainable = True
        for phase in ("train", "test"):
            if phase == "train":
                model.layers[0].trainable = True
        if step == start:
            warmup = True
        if step == 1:
            loss = learner.adapt(loss)
        handler.run(lambda on: model.loss if on else None, warmup)
        if step % 2 == 0:
            loss = add(1.0)
            meter.loss = 0.5
    assert loss == 1.0


def train_folds(handler: Any) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    for fold in range(2):
        if fold == 0:
            model.trainable = False
        train_from_a_milestone_on(handler)


def train_in_saved_phases(handler: Any) -> None:
    kept = JsonState("phase", 1)
    for step in range(3):
        if step == 1:
            kept.value = 2
        phase = kept.value
        handler.run(add, phase)
    kept.unregister()


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (train_with_a_milestone, "noise = 1.0"),
        (train_with_a_milestone_in_a_while_loop, "noise = 1.0"),
        (train_from_a_milestone_on, None),
        (
            train_with_unfreezing,
            "unfreeze(model); model.layers[0].adapt(np.ones((2, 1)))",
        ),
        (train_in_phases, "trainer.phase = 2"),
        (train_in_saved_phases, None),
        (train_with_changes_that_a_restart_repeats, None),
        (train_folds, None),
    ],
)
def test_changes_at_certain_steps_of_a_loop_are_named(
    program: Program, train: Any, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that restarted after the step had the earlier value, without a word."""
    with program.handler() as handler:
        train(handler)
    begins = "the loop changes state at certain steps only: "
    check_named(caplog, begins, named, ". A run that restarts after")


def add_noise(noise: Callable[[], Any]) -> Callable[[], Any]:
    """Returns an eager step that calls a traced function."""
    kept = tf.function(lambda: noise())
    return lambda: kept()


@pytest.mark.parametrize(
    ("noise", "seed", "is_named"),
    [
        (lambda: tf.random.normal([]), 7, True),
        (lambda: tf.random.normal([]), None, False),
        (lambda: tf.random.stateless_normal([], [1, 2]), 7, False),
        (lambda: keras.random.normal(()), 7, False),
    ],
)
def test_random_ops_of_a_step_are_named(
    program: Program,
    noise: Any,
    seed: int | None,
    is_named: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restarted step drew the first numbers of the run again without a word."""
    tf.random.set_seed(seed)
    step = add_noise(noise)
    with program.handler() as handler:
        for _ in range(4):
            handler.run(step)
    found = [each for each in caplog.messages if "the step draws random" in each]
    assert len(found) == is_named
    assert not is_named or "with RandomStandardNormal (random_normal/" in found[0]


def on_two_replicas(batch: Any) -> Any:
    """Returns a batch as two replicas of a strategy receive the batch."""
    return PerReplica(tf.split(batch, 2))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    "part_of", [tf.identity, tf.sparse.from_dense, on_two_replicas]
)
def test_a_loop_over_a_dataset_that_starts_again_is_named(
    program: Program, part_of: Any, skips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The iterator of a for loop is in no commit, and a step cannot reach it."""
    data = tf.data.Dataset.range(1, 13).batch(2)
    for _ in range(2):
        crash = contextlib.suppress(InterruptedError)
        with crash, program.handler(save_freq=2) as handler:
            begin = handler.total_run_calls if skips else 0
            for batch in data.skip(begin).take(3):
                handler.run(lambda numbers: None, part_of(batch))
            raise InterruptedError
    again = "have got without the restart: args[0]. "
    assert (again in caplog.text) != skips


@pytest.mark.parametrize("is_exact", [False, True])
def test_an_epoch_that_starts_again_in_another_order_is_named(
    program: Program, is_exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that repeats the beginning of an epoch after each restart. No batch is
    equal to the first batch of the run, so earlier versions logged no warning."""
    for _ in range(2):
        crash = contextlib.suppress(InterruptedError)
        with crash, program.handler(save_freq=5) as handler:
            epoch, skipped = divmod(handler.total_run_calls, 4)
            data = tf.data.Dataset.range(4).shuffle(4, seed=epoch)
            for number in data.skip(skipped if is_exact else 0):
                handler.run(lambda number: None, number)
            for number in tf.data.Dataset.range(4).shuffle(4, seed=epoch + 1):
                handler.run(lambda number: None, number)
                if handler.run_calls == 6:
                    raise InterruptedError
    named = "have got without the restart: args[0]. " in caplog.text
    assert named != is_exact


class Reader:
    """A trainer whose loop puts the batch into an attribute."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def step(self) -> Any:
        return self.batch[0]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("steps", [3, 7])
def test_a_loop_that_restarts_with_a_new_epoch_is_not_named(
    program: Program, steps: int, saves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The data have a fixed order, so each epoch of two batches begins equally."""
    data = tf.data.Dataset.range(1, 5).batch(2).repeat()
    for last in (steps, 9):
        crash = contextlib.suppress(InterruptedError)
        every = None if saves else 2
        with crash, program.handler(save_freq=every) as handler:
            assert handler.total_run_calls == (0 if last == steps else steps - 1)
            for batch in data.skip(handler.total_run_calls):
                handler.run(lambda numbers: None, batch)
                if handler.total_run_calls == last:
                    raise InterruptedError
                if saves and handler.total_run_calls % 2 == 0:
                    handler.save()
    assert "does not get the values" not in caplog.text


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("calls", ["lambda", "partial", "global", "attribute"])
def test_a_batch_that_is_no_argument_is_compared_too(
    program: Program, calls: str, skips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as in `run(lambda: step(x, y))`."""
    data = tf.data.Dataset.range(1, 13).batch(2)
    weights = tf.Variable([1.0, 1.0])  # has its first value again
    program.checkpoint.weights = weights

    def add_one(numbers: tf.Tensor) -> None:
        weights.assign([1.0 + 2 * (handler.run_calls % 3), 1.0])

    for _ in range(2):
        crash = contextlib.suppress(InterruptedError)
        with crash, program.handler(save_freq=2) as handler:
            begin = handler.total_run_calls if skips else 0
            for batch in data.skip(begin).take(3):
                step = lambda: add_one(batch)  # noqa: E731, B023
                if calls == "partial":
                    step = functools.partial(add_one, batch)
                elif calls == "global":
                    globals()["BATCH"] = batch
                    step = lambda: add_one(BATCH)  # noqa: E731
                elif calls == "attribute":
                    step = Reader((batch, 1)).step
                handler.run(step)
            raise InterruptedError
    found = [each for each in caplog.messages if "does not get the values" in each]
    assert len(found) == (not skips)
    names = {"lambda": "batch", "partial": "numbers", "global": "BATCH"}
    name = names.get(calls, "self.batch[0]")
    assert skips or f"without the restart: {name}. " in found[0]


def test_a_queue_and_a_hash_table_are_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    queue = tf.queue.FIFOQueue(9, [tf.float32], shapes=[[]])
    queue.enqueue(0.0)
    forgotten, kept = (
        tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
        for _ in range(2)
    )
    program.checkpoint.kept = kept

    def step() -> None:
        queue.enqueue(queue.dequeue() + 1.0)
        for table in (forgotten, kept):
            table.insert("steps", table.lookup(tf.constant("steps")) + 1)

    with program.handler() as handler:
        for _ in range(3):
            handler.run(step)
    assert "commits: forgotten. " in caplog.text
    assert "reads from queue, " in caplog.text
    assert "keep the contents in a tf.Variable" in caplog.text


def test_a_donated_array_of_jax_does_not_end_the_check(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    jax = pytest.importorskip("jax")
    donated, forgotten = jax.numpy.zeros(2), tf.Variable(0.0)
    donated.delete()
    arrays = {"donated": donated}

    def step() -> None:
        assert arrays
        forgotten.assign_add(1.0)

    with program.handler() as handler:
        for _ in range(3):
            handler.run(step)
    assert "commits: forgotten. " in caplog.text


def test_tensorflows_distributed_iterator_is_named_with_advice(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    numbers = numbers_to(9).batch(1)
    theirs = iter(strategy.experimental_distribute_dataset(numbers))
    with program.handler() as handler:
        for _ in range(3):
            handler.run(read, theirs)
    told = "create the iterator with tfpreempt.data.distribute(dataset, strategy)"
    assert caplog.text.count(told) == 1
    caplog.clear()
    ours = distribute(numbers, strategy)
    program.checkpoint.data = ours
    with program.handler() as handler:
        for _ in range(3):
            handler.run(read, ours)
    assert "reads from" not in caplog.text


def test_a_loop_over_the_data_service_gets_advice_that_applies(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    mode = service.ShardingPolicy.OFF
    distributed = service.distribute(mode, dispatcher.target)
    iterator = iter(tf.data.Dataset.range(9).apply(distributed).prefetch(1))
    with program.handler() as handler:
        for _ in range(3):
            handler.run(read, iterator)
    assert "job_name" in caplog.text
    assert "total_run_calls" not in caplog.text
    program.checkpoint.data = iterator
    with pytest.raises(errors.ConfigurationError, match=r"tf\.data service") as raised:
        program.handler()
    assert "total_run_calls" not in str(raised.value)
    del iterator, worker, dispatcher


class Module(tf.Module):
    """A module whose lists and dicts TensorFlow wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seen = {"steps": 0}
        self.parts = [tf.Variable(0.0)]

    def step(self) -> None:
        self.losses.append(1.0)
        self.seen["steps"] += 1
        self.parts[0].assign_add(1.0)


@pytest.mark.parametrize("is_changed", [True, False])
def test_variables_changed_between_the_restore_and_the_first_step_are_named(
    program: Program, is_changed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An older checkpoint of the program, which it restored after the handler was
    created, replaced the newest values without a word."""
    own = str(program.directory.with_name("own"))
    tf.train.Checkpoint(weights=program.variable).write(own)
    with program.handler() as handler:
        handler.run(program.step)
    again = Program(program.directory)
    again.variable.assign([7.0, 7.0])  # before the restore
    with again.handler() as handler:
        if is_changed:
            tf.train.Checkpoint(weights=again.variable).read(own)
        else:  # a save changes only the counter of saves
            again.checkpoint.save(own)
        handler.run(again.step)
        again.variable.assign([7.0, 7.0])
        handler.run(again.step)
    begins = "the program has changed variables after the restore and before the first"
    check_named(caplog, begins, " step: variable" if is_changed else None, ". So this")


@pytest.mark.parametrize(
    ("is_in_front", "saves"), [(True, False), (False, False), (True, True)]
)
def test_iterators_and_states_changed_in_front_of_the_first_step_are_named(
    tmp_path: Path, is_in_front: bool, saves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart replaced an iterator in the middle of its data, and counted a step
    twice, without a word. A commit of `save()` has the end of the data."""
    dataset = tf.data.Dataset.range(9)
    seen, steps = JsonState("seen", {"samples": 0}), StepCounter("steps")
    arrays = ArrayDictState("arrays", {"sum": np.zeros(2)})
    for end in (3, 6):
        seen.value, steps.value = {"samples": 0}, 0
        checkpoint = tf.train.Checkpoint(data=iter(dataset))
        with (
            contextlib.suppress(InterruptedError),
            new_process(),
            PreemptionCheckpointHandler(
                None, checkpoint, tmp_path / "ckpt", save_freq=None if saves else 2
            ) as handler,
        ):
            assert handler.total_run_calls == (0 if end == 3 else 2)
            if is_in_front:
                checkpoint.data = iter(dataset)
            for number in range(handler.total_run_calls, end):
                for count in (seen, steps, arrays) if is_in_front else ():
                    add_one(count)
                handler.run(next_of, checkpoint)
                if saves and number == 1:
                    handler.save()
            raise InterruptedError
    begins = "the program has changed variables after the restore and before the first"
    names = " step: arrays, seen, steps, data" if is_in_front and not saves else None
    check_named(caplog, begins, names, ". So this")
    for count in (seen, steps, arrays):
        count.unregister()


def next_of(checkpoint: Any) -> None:
    next(checkpoint.data)


def add_one(count: Any) -> None:
    if isinstance(count, JsonState):
        count.value["samples"] += 1
    elif isinstance(count, StepCounter):
        count.increment()
    else:
        count.arrays["sum"] += 1


def test_variables_that_a_repeated_evaluation_sets_are_not_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start is preempted in the evaluation, before it sets the variable."""
    handler = program.handler()
    handler.run(program.step)
    program.button.press()
    handler.check_preemption()
    assert program.exits == 1
    close_unfinished(handler._session, handler._run)
    again = Program(program.directory)
    with again.handler() as handler:
        assert handler.total_run_calls == 1
        handler.check_preemption()
        again.variable.assign([7.0, 7.0])
        handler.run(again.step)
    check_named(caplog, "the program has changed variables", None, "")


def test_a_first_boundary_after_a_step_is_no_change_of_restored_variables(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop in the documentation of TensorFlow's handler calls the method last."""
    for _ in range(2):
        again = Program(program.directory)
        with again.handler() as handler:
            again.step()
            handler.save_checkpoint_if_preempted()
    check_named(caplog, "the program has changed variables", None, "")


def test_plain_values_in_a_saved_module_are_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """A Checkpoint saves the variables in a list, but not the numbers."""
    module = Module()
    program.checkpoint.module = module
    with program.handler() as handler:
        for _ in range(3):
            handler.run(module.step)
    assert "commits: self.losses, self.seen['steps']. " in caplog.text


@pytest.mark.parametrize("is_saved", [False, True])
def test_slots_of_an_old_optimizer_are_named_if_they_are_not_saved(
    program: Program, is_saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow saves slots beside the objects that a Checkpoint tracks."""
    legacy = pytest.importorskip("tf_keras").optimizers.legacy
    weights = [program.variable, tf.Variable([1.0])]
    program.checkpoint.opt = optimizer = legacy.Adam(0.1)
    if is_saved:
        program.checkpoint.other = weights[1]

    def step() -> None:
        optimizer.apply_gradients(zip(map(tf.ones_like, weights), weights, strict=True))

    with program.handler() as handler:
        for _ in range(3):
            handler.run(step)
    begins = "The step changes state that is not in the commits: "
    check_named(caplog, begins, None if is_saved else "optimizer, weights[1]", ". A")


class Agent:
    """An object whose methods a loop calls outside of its step."""

    def __init__(self) -> None:
        self.memory: Any = collections.deque()
        self.noise = np.zeros(2)

    def remember(self, value: float) -> None:
        self.memory.append(value)
        self.noise = self.noise * 0.9 + 1.0


def a_loop_with_its_own_values(handler: Any, step: Any) -> None:
    agent, losses, seen, rate = Agent(), [], 0, 0.1
    sums = [np.zeros(2)]
    done = handler.total_run_calls
    while done < 12:
        agent.remember(float(done))
        handler.run(step)
        losses.append(1.0)
        sums = [each + 1 for each in sums]
        seen += 1
        done += 1
        if done == 4:
            rate *= 0.5


def a_loop_with_saved_values(handler: Any, step: Any) -> None:
    kept = JsonState("loop", {"losses": []})
    rate = kept.value.get("rate", 0.1)
    for _ in range(handler.total_run_calls, 5):
        loss = handler.run(step)
        kept.value["losses"].append(loss)
        rate *= 0.9
        kept.value["rate"] = rate


@pytest.mark.parametrize("is_saved", [False, True])
def test_values_that_a_loop_changes_between_its_steps_are_named(
    program: Program, is_saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay buffer and a learning rate started from scratch without a word."""
    loop = a_loop_with_saved_values if is_saved else a_loop_with_its_own_values
    with program.handler() as handler:
        loop(handler, program.step)
    texts = [each for each in caplog.messages if "The loop changes state" in each]
    found = [each.split("commits: ")[1].split(". A")[0] for each in texts]
    names = ["agent.memory, agent.noise, losses, seen, sums", "rate"]
    assert [", ".join(sorted(each.split(", "))) for each in found] == (
        [] if is_saved else names
    )


@pytest.mark.parametrize("where", ["run", "check_preemption"])
def test_a_value_that_a_loop_changes_shortly_before_a_notice_is_named(
    program: Program, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """At each end of an epoch, the loop copies the student to a teacher."""
    teacher = tf.Variable([0.0, 0.0])

    def step() -> None:
        program.variable.assign_add([1.0, 1.0] + 0.1 * teacher)

    def train() -> None:
        with program.handler(config={"exit_fn": sys.exit}) as handler:
            for number in range(9):
                if number == 6:
                    program.button.press()
                    if where == "check_preemption":
                        handler.check_preemption()
                handler.run(step)
                if number % 5 == 4:
                    teacher.assign(program.variable)

    with pytest.raises(SystemExit):
        train()
    begins = "The loop changes state that is not in the commits: "
    check_named(caplog, begins, "teacher", ". A restarted")


def test_a_list_that_a_long_loop_replaces_is_deleted(program: Program) -> None:
    """Lists have no weak references, and a list may contain much data."""
    shard = [np.zeros(2)]
    first = weakref.ref(shard[0])
    with program.handler() as handler:
        for number in range(1100):
            if number == 1050:
                shard = [np.ones(2)]
            handler.run(program.variable.assign_add, shard[0])
        gc.collect()
        assert first() is None


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that a loop replaces."""

    rate: float = 1.0


def with_full_containers(handler: Any) -> None:
    memory = collections.deque([0.0] * 4, maxlen=4)
    window, seen = [0.0, 1.0], {-1}
    for step in range(handler.total_run_calls, 4):
        handler.run(add, sum(memory) + window[0] + max(seen))
        memory.append(float(step))
        window.pop(0)
        window.append(float(step))
        seen.clear()
        seen.add(step)


def with_changed_buffers(handler: Any) -> None:
    flags, sums = bytearray(2), array.array("d", [0.0])
    for step in range(handler.total_run_calls, 4):
        handler.run(add, flags[0] + sums[0])
        flags[0] += 1
        sums[0] += step


def with_replaced_values(handler: Any) -> None:
    averages, settings = {"weights": np.zeros(2)}, Settings()
    part, number = fractions.Fraction(1), 0
    while handler.total_run_calls < 4:
        handler.run(add, (number := number + 1) + settings.rate + part)
        averages = {name: 0.9 * each + 0.1 for name, each in averages.items()}
        settings = dataclasses.replace(settings, rate=settings.rate / 2)
        part = part / 2


def with_values_of_several_tensors(handler: Any) -> None:
    scale = PerReplica([tf.ones([]), tf.ones([])])
    rows = tf.ragged.constant([[1.0], [2.0, 3.0]], tf.bfloat16)
    while handler.total_run_calls < 4:
        handler.run(add, scale.values[0] + scale.values[1])
        scale = PerReplica([0.9 * each for each in scale.values])
        rows = rows * 2.0


def with_the_best_weights(handler: Any) -> None:
    kept = JsonState("best", {"loss": 9.0})
    weights = np.zeros(2)
    for step in range(handler.total_run_calls, 4):
        loss = 4.0 - handler.run(add, step)
        if loss < kept.value["loss"]:
            kept.value["loss"] = loss
            weights = np.full(2, loss)
    assert weights[0] == 1.0
    kept.unregister()


def with_the_best_value_and_a_state_in_one_statement(handler: Any) -> None:
    kept = JsonState("kept", {"loss": 4.0})
    best, seen, waits = 9.0, 9.0, 0
    for step in range(handler.total_run_calls, 4):
        kept.value["loss"] = 4.0 - handler.run(add, step)
        if kept.value["loss"] < best:
            best, seen, waits = kept.value["loss"], kept.value["loss"], 0
    assert (best, seen, waits) == (1.0, 1.0, 0)
    kept.unregister()


def with_the_names_of_its_caller(handler: Any) -> None:
    def train() -> None:
        number, batches = 0, itertools.cycle([1.0, 2.0])
        while handler.total_run_calls < 4:
            number += 1
            handler.run(add, number + next(batches))

    for number in range(1):
        batches = number + 1
        train()
        assert batches == 1


def with_a_count_in_a_function(handler: Any) -> None:
    step = handler.total_run_calls

    def train() -> None:
        nonlocal step
        step += 1

    while step < 4:
        handler.run(train)


def with_a_count_beside_one_of_the_same_name(handler: Any) -> None:
    def make_step() -> Callable[[], None]:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1

        return step

    step = make_step()
    for count in range(4):
        handler.run(step)
        assert handler.total_run_calls == count + 1


def test_a_variable_of_the_loop_hides_no_variable_of_the_step(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are named `count`."""
    with program.handler() as handler:
        with_a_count_beside_one_of_the_same_name(handler)
    assert "is not in the commits: count. " in caplog.text


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (with_full_containers, "memory, seen, window"),
        (with_replaced_values, "averages, number, part, settings"),
        (with_changed_buffers, "flags, sums"),
        (with_values_of_several_tensors, "rows, scale"),
        (with_the_best_weights, "weights"),
        (with_the_best_value_and_a_state_in_one_statement, "best, seen"),
        (with_the_names_of_its_caller, "number"),
        (with_a_count_in_a_function, None),
    ],
)
def test_values_that_a_loop_exchanges_or_replaces_are_named(
    program: Program, loop: Any, names: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A full replay buffer, which keeps its length, was lost without a word."""
    with program.handler() as handler:
        loop(handler)
    texts = [each for each in caplog.messages if "The loop changes state" in each]
    found = [each.split("commits: ")[1].split(". A")[0] for each in texts]
    assert [", ".join(sorted(each.split(", "))) for each in found] == (
        [names] if names else []
    )
    reads = [each for each in caplog.messages if "The loop reads from batches" in each]
    assert len(reads) == (loop is with_the_names_of_its_caller)


def evaluate_with_a_reset(handler: Any) -> None:
    accuracy = keras.metrics.Mean()

    def evaluate() -> Any:
        accuracy.reset_state()
        accuracy.update_state(handler.run_calls)
        return accuracy.result()

    for _ in range(4):
        handler.run(abs, 1)
        evaluate()


def add_in_the_loop(handler: Any) -> None:
    accuracy = keras.metrics.Mean()

    def evaluate() -> Any:
        accuracy.reset_state()
        return accuracy.result()

    for _ in range(4):
        accuracy.update_state(handler.run(add, 1.0))
    evaluate()


def train_after_a_reset(handler: Any) -> None:
    accuracy = keras.metrics.Mean()

    def train() -> None:
        accuracy.reset_state()
        for _ in range(4):
            handler.run(accuracy.update_state, 1.0)

    def again() -> None:
        accuracy.reset_state()
        accuracy.update_state(handler.run(add, 1.0))

    train()
    again()


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (evaluate_with_a_reset, False),
        (add_in_the_loop, True),
        (train_after_a_reset, True),
    ],
)
def test_a_metric_that_each_evaluation_resets_is_not_named(
    program: Program, train: Any, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with program.handler() as handler:
        train(handler)
    assert ("not in the commits: " in caplog.text) == named


def test_the_result_of_locals_in_a_loop_keeps_its_values(program: Program) -> None:
    """Before Python 3.13, the check reads the same dict."""

    def train(rate: float) -> dict[str, Any]:
        options = locals()
        for _ in range(4):
            handler.run(program.step)
        return options

    with program.handler() as handler:
        assert train(0.5)["rate"] == 0.5


class Gradients:
    """An object that a loop makes again for each step."""


def count_first(numbers: list[int]) -> None:
    numbers[0] += 1


def test_the_check_of_a_loop_keeps_no_object_alive(program: Program) -> None:
    """Also if a function changes an item of another list with the same index."""
    made: list[weakref.ref[Gradients]] = []
    numbers = [0]
    with program.handler() as handler:
        for _ in range(5):
            gradients = Gradients()
            several = [gradients]
            count_first(numbers)
            made.append(weakref.ref(gradients))
            handler.run(program.step)
            assert several
        del gradients, several
        gc.collect()
        assert [each() for each in made] == [None] * 5


class Seen(State):
    """A user's State that saves a value of another object."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__("seen")
        self.trainer = trainer

    def save(self, fileobj: Any) -> None:
        fileobj.write(f"{self.trainer.number} {COUNT}".encode())

    def load(self, fileobj: Any) -> None:
        pass


class Holder(State):
    """A user's State that references a value without saving it."""

    def __init__(self, held: Any) -> None:
        super().__init__("holder")
        self.held = held

    def save(self, fileobj: Any) -> None:
        pass

    def load(self, fileobj: Any) -> None:
        pass


def a_variable_to_read_with_peers() -> Any:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,  # so that a read is an error
            trainable=False,
        )


@pytest.mark.parametrize("make", [a_variable_to_read_with_peers, lambda: np.zeros(3)])
def test_values_held_by_a_state_are_not_compared(
    program: Program, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state, step = Holder(make()), a_nonlocal(program.variable)
    with program.handler() as handler:
        for _ in range(3):
            handler.run(step)
    state.unregister()
    [said] = [record.getMessage() for record in caplog.records]
    assert "commits: forgotten. " in said


def test_a_state_may_save_by_a_checkpoint_of_its_own(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tf.Variable(0.0)
    state = Holder(tf.train.Checkpoint(parts=[mine]))
    with program.handler() as handler:
        for _ in range(3):
            handler.run(mine.assign_add, 1.0)
    state.unregister()
    assert caplog.text == ""


@dataclasses.dataclass
class Step:
    """A user's step with data; two such steps are equal by their fields."""

    weights: np.ndarray[Any, Any]
    number: int = 0

    def __call__(self) -> None:
        self.number += 1


def test_step_functions_are_distinguished_by_identity(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [Step(np.zeros(3)), Step(np.zeros(3))]
    with program.handler() as handler:
        for number in range(6):
            handler.run(steps[number % 2])
    assert caplog.text.count("commits: self.number. ") == 1


def test_no_warning_for_saved_or_unchanged_values(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    global COUNT
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    made, rate, teacher = optimizer(), tf.Variable(0.5), tf.Variable([1.0])
    losses, trainer = JsonState("losses", {"all": []}), Trainer()
    batches = np.random.default_rng(0).normal(size=(9, 1, 2)).astype("float32")
    data = iter(numbers_to(9))
    seen = Seen(trainer)
    log: dict[str, Any] = {}
    given = tf.train.Checkpoint(
        inner=tf.train.Checkpoint(net=model, optimizers=[made]), data=data
    )

    @tf.function
    def update(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch, training=True) * teacher)
        weights = model.trainable_variables
        made.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss * rate

    def step(number: int) -> None:
        global COUNT
        COUNT += 1
        trainer.step()
        next(data)
        log["loss"] = float(update(batches[number]))
        losses.value["all"].append(log["loss"])
        losses.value["newest"] = number

    with program.handler(given) as handler:
        for number in range(4):
            handler.run(step, number)
    assert handler.run_calls == 4
    assert caplog.text == ""
    for state in (losses, seen):
        state.unregister()


@pytest.mark.parametrize("rate", [0.1, 0.05])
def test_a_learning_rate_that_the_program_sets_anew_is_named(
    program: Program, rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart restores the rate, which the loop lowers in each step."""

    def train(rate: float) -> Any:
        made = keras.optimizers.SGD(rate)
        made.build([program.variable])
        checkpoint = tf.train.Checkpoint(made=made, v=program.variable)
        with program.handler(checkpoint, config={"exit_fn": sys.exit}) as handler:
            for number in range(handler.total_run_calls, 4):
                if number == 2 and handler.run_calls:
                    program.button.press()
                handler.run(apply, made, program.variable)
                made.learning_rate.assign(made.learning_rate * 0.5)
        return made

    with pytest.raises(SystemExit):
        train(0.1)
    made = train(rate)
    assert made.learning_rate.numpy() == np.float32(0.1) / 16
    named = "program: made/_learning_rate is 0.05, was 0.1. The rates"
    assert (named in caplog.text) == (rate != 0.1)


def test_a_variable_with_the_name_of_a_learning_rate_may_have_any_value(
    program: Program,
) -> None:
    given = tf.train.Checkpoint(learning_rate=tf.Variable("cosine"))
    with program.handler(given) as handler:
        handler.run(program.step)


@pytest.mark.parametrize("is_closed", [False, True])
def test_variables_that_another_open_handler_saves_are_not_named(
    program: Program, is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two models with two checkpoints, trained in turn: each got a warning."""
    other = Program(program.directory.with_name("other"))

    def step() -> None:
        program.step()
        other.step()

    with other.handler() as second, program.handler() as first:
        if is_closed:
            second.close()
        for _ in range(5):
            first.run(step)
            if not is_closed:
                second.run(other.step)
    named = ["step changes state that is not in the commits: other.variable. A"]
    assert [each for each in named if each in caplog.text] == named * is_closed
    assert is_closed or caplog.text == ""


def test_an_unreadable_object_does_not_stop_training(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    class Shy:
        number = 0

        def step(self) -> None:
            self.number += 1

        @property
        def __dict__(self) -> Any:
            raise TypeError

    shy = Shy()
    with program.handler() as handler:
        for _ in range(3):
            handler.run(shy.step)
    assert caplog.text.count("cannot check whether the step changes state") == 1
