"""distribute(): an iterator over a distributed dataset, with a position."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.data.iterators import make_iterator


def distribute(
    dataset: tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    options: tf.distribute.InputOptions | None = None,
) -> tf.distribute.DistributedIterator | tf.data.Iterator:
    """Returns an iterator over a distributed dataset, whose position can be saved.

    TensorFlow cannot save the position of
    `iter(strategy.experimental_distribute_dataset(dataset))`. The iterator returned
    here gives every replica the same samples as TensorFlow's iterator, and is used in
    the same way: by `next`, `get_next_as_optional`, or a `for` in a tf.function. Put
    the iterator into the `tf.train.Checkpoint`:

        batches = tfpreempt.data.distribute(dataset.repeat(), strategy)
        checkpoint = tf.train.Checkpoint(model=model, data=batches)
        handler = tfpreempt.PreemptionCheckpointHandler(resolver, checkpoint, directory)

        @tf.function
        def step(iterator):
            strategy.run(train, args=(next(iterator),))

        while handler.total_run_calls < STEPS:
            handler.run(step, batches)

    The saved position is the position of training; batches that were only read ahead do
    not count. If every worker takes a part of every batch (`tfpreempt.data` pipelines,
    and datasets with `AutoShardPolicy.DATA`), the position counts global batches, so
    training can resume with another number of workers. If every worker reads different
    files, training must resume with the same number of workers.

    By default a step first copies the step's batch to the devices. For `tfpreempt.data`
    pipelines, `options=tf.distribute.InputOptions()` copies batches before the step
    needs them, as TensorFlow's iterator does; use this option if the copy takes long.
    TensorFlow then logs "Saving symbolic checkpoint" for every batch, unless
    TF_CPP_MIN_LOG_LEVEL is 1 or more.

    Args:
        dataset: dataset of global batches; or a function that makes a dataset for each
            worker, as for `strategy.distribute_datasets_from_function`.
        strategy: strategy on one machine or on several machines.
        options: options as for the methods of the strategy. With
            `experimental_fetch_to_device`, the default of InputOptions, batches are
            copied to the devices before a step needs them.

    Returns:
        An iterator for a `tf.train.Checkpoint`. The iterator ends at the end of the
        dataset: apply `repeat()` to the dataset for several epochs.

    Raises:
        ConfigurationError: an argument is invalid, or the position of the strategy's
            data cannot be saved.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise errors.ConfigurationError(
            f"Got strategy={strategy!r}; expected a tf.distribute.Strategy, such as "
            "tf.distribute.get_strategy()"
        )
    if isinstance(dataset, tf.data.Dataset):
        distributed = strategy.experimental_distribute_dataset(dataset, options)
    elif callable(dataset):
        distributed = strategy.distribute_datasets_from_function(dataset, options)
    else:
        raise errors.ConfigurationError(
            f"Got a dataset of type {type(dataset).__name__}; expected a "
            "tf.data.Dataset, or a function that takes a tf.distribute.InputContext "
            "and returns a tf.data.Dataset"
        )
    if isinstance(strategy, tf.distribute.TPUStrategy):
        raise errors.ConfigurationError(
            "Got a TPUStrategy, for whose data no position can be saved; expected "
            "another strategy. With a TPUStrategy, skip the batches already read: "
            "iter(strategy.experimental_distribute_dataset(dataset.skip(handler.total_run_calls)))"
        )
    return make_iterator(distributed)
