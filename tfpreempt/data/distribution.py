"""distribute(): a strategy's iterator over a dataset, with a position."""

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
    """Returns an iterator over a distributed dataset with a position that can be saved.

    The iterator returns the same elements as
    `iter(strategy.experimental_distribute_dataset(dataset))`, with the same samples for
    each replica. Use the iterator in the same way: by `next`, `get_next_as_optional`,
    and a `for` in a tf.function. TensorFlow cannot save its own iterator. The iterator
    returned here is put into the `tf.train.Checkpoint`:

        batches = tfpreempt.data.distribute(dataset.repeat(), strategy)
        checkpoint = tf.train.Checkpoint(model=model, data=batches)
        handler = tfpreempt.PreemptionCheckpointHandler(resolver, checkpoint, directory)

        @tf.function
        def step(iterator):
            strategy.run(train, args=(next(iterator),))

        while handler.total_run_calls < STEPS:
            handler.run(step, batches)

    The saved position is the position of training, without batches that were read
    ahead. If workers share batches instead of files (`tfpreempt.data` pipelines, and
    datasets with `AutoShardPolicy.DATA`), the position counts global batches, and is
    the same for any number of workers.

    By default a step copies its batch to the devices. With
    `options=tf.distribute.InputOptions()` the copy is made ahead of the step, as by
    TensorFlow's iterator, if workers share batches and the position is a few numbers
    (`tfpreempt.data` pipelines). Use the option if the copy takes long. TensorFlow then
    logs "Saving symbolic checkpoint" for each batch, unless TF_CPP_MIN_LOG_LEVEL is 1
    or more.

    Args:
        dataset: dataset of global batches; or a function that makes a dataset for each
            worker, as for `strategy.distribute_datasets_from_function`.
        strategy: strategy on one machine or on several machines.
        options: options as for the strategy's own methods. With
            `experimental_fetch_to_device`, the default of InputOptions, batches are
            copied ahead.

    Returns:
        A trackable iterator at the first element. The iterator ends at the end of the
        dataset: apply `repeat()` to the dataset for several epochs.

    Raises:
        ConfigurationError: an argument is invalid, or the position of the strategy's
            data cannot be saved.
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
