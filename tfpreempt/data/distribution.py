"""distribute(): what a strategy makes of a dataset, as an iterator with a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.data.iterators import make_iterator


def distribute(
    dataset: tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    options: tf.distribute.InputOptions | None = None,
) -> Any:
    """An iterator of what a strategy makes of a dataset; a commit can hold its place.

    It gives what `iter(strategy.experimental_distribute_dataset(dataset))` gives, each
    replica the same samples, and is used in the same way: by `next`,
    `get_next_as_optional`, and a `for` in a tf.function. TensorFlow cannot save that
    iterator; this one is put into the `tf.train.Checkpoint`:

        batches = tfpreempt.data.distribute(dataset.repeat(), strategy)
        checkpoint = tf.train.Checkpoint(model=model, data=batches)
        handler = tfpreempt.PreemptionCheckpointHandler(resolver, checkpoint, directory)

        @tf.function
        def step(iterator):
            strategy.run(train, args=(next(iterator),))

        while handler.total_run_calls < STEPS:
            handler.run(step, batches)

    What is saved is the place of training, not of what was read ahead. Where workers
    share batches and not files (`tfpreempt.data` pipelines, and datasets with
    `AutoShardPolicy.DATA`) that is the place in the global batches, which is the same
    for any number of workers.

    A step copies its batch to the devices. `options=tf.distribute.InputOptions()` has
    that made ahead of it, as TensorFlow's iterator does, where workers share batches
    and the place is a few numbers (`tfpreempt.data` pipelines): worth it where the
    copy takes long. TensorFlow then logs "Saving symbolic checkpoint" for each batch,
    unless TF_CPP_MIN_LOG_LEVEL is 1 or more.

    Args:
        dataset: of global batches; or a function that makes one of its own for each
            worker, as `strategy.distribute_datasets_from_function` takes it.
        strategy: on one machine or on many.
        options: as for the strategy's own methods. With `experimental_fetch_to_device`,
            the default of InputOptions, batches are copied ahead.

    Returns:
        The iterator, which begins at the beginning, and is trackable. It ends where
        the dataset does: `repeat()` that for several epochs.

    Raises:
        ConfigurationError: an argument cannot work, or the strategy's data have no
            place that can be saved.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise errors.ConfigurationError(
            f"strategy is {strategy!r}; expected a tf.distribute.Strategy, such as "
            "tf.distribute.get_strategy()"
        )
    if isinstance(dataset, tf.data.Dataset):
        distributed = strategy.experimental_distribute_dataset(dataset, options)
    elif callable(dataset):
        distributed = strategy.distribute_datasets_from_function(dataset, options)
    else:
        raise errors.ConfigurationError(
            f"dataset is of type {type(dataset).__name__}; expected a tf.data.Dataset, "
            "or a function that makes one of a tf.distribute.InputContext"
        )
    if isinstance(strategy, tf.distribute.TPUStrategy):
        raise errors.ConfigurationError(
            "strategy is a TPUStrategy, whose data have no place that can be saved; "
            "expected another. Derive the batch from the step: "
            "iter(strategy.experimental_distribute_dataset(dataset.skip("
            "handler.total_run_calls)))"
        )
    return make_iterator(distributed)
