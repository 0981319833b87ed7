"""Training data on TensorFlow: saves the state of tf.data iterators, if possible.

Implements `fit_protocol.Pipelines` for the fits on TensorFlow, and chooses the best way
to save the position. On JAX, `jax_data.py` uses this module for data that are tf.data
pipelines.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.unfinished_caches import clear_abandoned
from tfpreempt.checkpoint.tensors import data_order, program_values
from tfpreempt.checkpoint.tensors.iterator_state import (
    MISSED_END,
    REPEAT_FIRST,
    cache_paths,
    hidden_state,
    keep_seeds,
    may_miss_end,
    pack,
    prepare_cache_files,
    reads_generator,
    unpack,
)
from tfpreempt.checkpoint.tensors.shuffle_seeds import (
    ShuffleSeeds,
    is_ordered_cache,
    parts,
    seeds_of,
)
from tfpreempt.checkpoint.tensors.variables import plain_message
from tfpreempt.data import iterators, slices
from tfpreempt.data.iterators import owned_iterators
from tfpreempt.data.read_ahead import state_of
from tfpreempt.keras.data import pipeline
from tfpreempt.keras.data.arrays import DrawnTracker
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.position import (
    AGAIN,
    READ_ON,
    IndexTracker,
    Position,
    ReplayTracker,
    Tracker,
)
from tfpreempt.keras.fit_protocol import Fit

log = logging.getLogger(__name__)

is_seeded = program_values.is_seeded
make_iterator = iterators.make_iterator
read = iterators.read_locally


class IteratorTracker(Tracker):
    """Saves the states of this worker's tf.data iterators."""

    kind = "iterator"
    _seeds = ShuffleSeeds(())

    def epoch_begins(self) -> None:
        self._seeds.release()

    def steps_end(self) -> None:
        # The validation may read the same shuffle, as in `dataset.take(n)`. A restart
        # repeats the validation, so keep the number of seeds drawn before.
        self._seeds.hold()

    def begins(self, iterator: Any) -> None:
        roots = pipeline.roots(self.data.dataset)
        for owned in owned_iterators(iterator):
            keep_seeds(owned, *roots)
        self._seeds = seeds_of(*roots) if roots else ShuffleSeeds(())
        # At the end of an epoch, Keras makes iterators, but reads no element. A restart
        # from a commit of this time makes the same iterators again. So the commit must
        # contain the number of seeds drawn before these iterators. `hold` keeps this
        # number.
        self._seeds.release()
        self.data.before_next = self._seeds.hold

    def save(self, iterator: Any, position: Position) -> Position:
        # A position without batches is the end of the fit. A restart does not repeat
        # the end, so save the current number of seeds, not the number before the end.
        if not position.batches:
            self._seeds.release()
        try:
            states = _states(iterator)
        # For some pipelines, saving the state fails only after the first read.
        except tf.errors.OpError as error:
            log.warning("%s (%s).", AGAIN, error.message)
            return dataclasses.replace(position, kind="replay")
        return dataclasses.replace(position, states=states)

    def prepare(self, position: Position) -> Sequence[str]:
        paths = cache_paths(*pipeline.roots(self.data.dataset))
        return [
            file
            for state in position.states
            for file in prepare_cache_files(unpack(state), paths)
        ]

    def restore(self, position: Position, iterator: Any) -> None:
        self.begins(iterator)
        owned = list(owned_iterators(iterator))
        # Earlier versions of tfpreempt also saved the states before the first batch, at
        # the front of the list.
        states = position.states[-len(owned) :]
        for each, state in zip(owned, states, strict=True):
            try:
                each._restore_from_tensors({"_STATE": unpack(state)})
            except tf.errors.OpError as error:
                raise errors.CheckpointMismatchError(
                    "The position in the training data was saved for another tf.data "
                    f"pipeline: {error.message}. Build the dataset as the interrupted "
                    "run did, or use another checkpoint directory."
                ) from error

    def extend(self, position: Position, iterator: Any) -> None:
        self.restore(position, self.data.spare())  # only to set the shuffle seeds
        following = self.data.spare()
        self.begins(following)
        next_position = dataclasses.replace(position, states=_states(following))
        self.restore(next_position, iterator)

    def complete(self, position: Position) -> None:
        roots = pipeline.roots(self.data.dataset)
        for state in position.states[-1:] if roots else ():
            seeds_of(*roots).restore(unpack(state))


class ArraysTracker(IteratorTracker):
    """Restores a position in arrays on JAX, if the epoch was interrupted on TensorFlow.

    TensorFlow has drawn the order of the epoch. So the rest of the epoch is read by the
    pipeline that Keras would make on TensorFlow.
    """

    def prepare(self, position: Position) -> Sequence[str]:
        self.data.instead = self.fit.first_iterator, self.fit.tensorflow_arrays()
        return ()


def leave_gpus() -> None:
    """Makes TensorFlow use no GPU, because the program computes with JAX."""
    tf.config.set_visible_devices([], "GPU")


def _states(iterator: Any) -> list[list[bytes]]:
    """Returns the states of the tf.data iterators of a (distributed) iterator.

    Raises:
        tf.errors.OpError: an iterator has no state.
    """
    return [pack(state_of(owned)) for owned in owned_iterators(iterator)]


# --- which way a pipeline allows -----------------------------------------------------

_WAYS = {way.kind: way for way in (IteratorTracker, IndexTracker, ReplayTracker)}


def way_of(fit: Fit, position: Position) -> tuple[type[Tracker] | None, Position]:
    """Returns the tracker that restores a position, and the position to restore.

    The tracker is None for an unknown kind of position, and for a position in a
    sequence or a loader, which no tracker of a pipeline can restore.
    """
    if position.kind != IndexTracker.kind or fit.array_way in (None, "index"):
        return _WAYS.get(position.kind), position
    # The position was saved on JAX, where Keras draws the order of an epoch from
    # NumPy's generator. At the beginning of an epoch there is no order to restore.
    if not position.batches:
        return Tracker, position
    is_in_batches = fit.arguments["shuffle"] == "batch"
    return (ReplayTracker if is_in_batches else DrawnTracker), position


def choose(fit: Fit, dataset: Any, iterator: Any) -> tuple[type[Tracker], str | None]:
    """Returns the best tracker to save positions in a pipeline.

    Args:
        fit: the fit.
        dataset: dataset that Keras made from the fit's data.
        iterator: the first iterator used for training, before its first read. The
            function tries to get the state of the iterator.

    Returns:
        The class of the tracker, and a warning if a resume will not be exact or is
        slow; else None.
    """
    if fit.array_way == "index":
        return IndexTracker, None
    roots = pipeline.roots(dataset)
    clear_abandoned(cache_paths(*roots))
    if again := _reason_to_replay(fit, dataset, roots, iterator):
        return ReplayTracker, f"{AGAIN} ({again})"
    problem = hidden_state(*roots, allows_checks=True)
    if fit.array_way is None and problem:
        return IteratorTracker, f"{_RANDOM} ({problem})"
    return IteratorTracker, _CACHED if pipeline.caches_in_memory(dataset) else None


def _reason_to_replay(
    fit: Fit, dataset: Any, roots: Sequence[Any], iterator: Any
) -> str | None:
    """Returns the reason why an iterator's state cannot be saved; None if the state can
    be saved."""
    if fit.array_way == "replay":
        return 'shuffle="batch"'
    if not list(owned_iterators(iterator)):
        return type(iterator).__name__
    if reads_generator(*roots):
        return "a Python generator"
    if may_miss_end(*roots):
        return f"{MISSED_END}; {REPEAT_FIRST}"
    try:
        _states(iterator)
    except tf.errors.OpError as error:
        return plain_message(error)
    return None


def order(fit: Fit, dataset: Any) -> dict[str, int]:
    """Returns fingerprints of the order of a dataset. The values of these fingerprints
    are the same in every epoch."""
    roots = pipeline.roots(dataset)
    found = data_order.of_pipeline(*roots, has_seeds=True)
    return found if fit.array_way is None else found | pipeline.permutation(roots)


def draw_again(fit: Fit, data: CountedDataset, position: Position) -> None:
    """Draws the shuffle seeds that the interrupted run had drawn before it made the
    current iterator."""
    unused = fit.first_iterator - 1
    if unused:
        # The seeds of the unused iterator are drawn here, before the first pass is
        # read. So the unused iterator that Keras makes in this process must draw none.
        data.instead = unused, tf.data.Dataset.range(0)
    made = draw_for(data, position.read, unused)
    for _ in range(position.made - made):
        data.spare()


def dataset_like(like: Any, batches: Callable[[], Iterator[Any]], ahead: int) -> Any:
    """Returns a dataset of given batches, with the element spec of another dataset.

    Args:
        like: the other dataset.
        batches: function returning an iterator over the batches.
        ahead: number of batches to prefetch.
    """
    spec = like.element_spec
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return dataset.prefetch(ahead)


def draw_for(data: CountedDataset, count: int, unused: int = 0) -> int:
    """Draws the seeds that iterators over the data of a fit draw when they read their
    first elements; see `pipeline.draw`. If a cache in memory keeps the order in which a
    shuffle gave the elements in the first pass, this pass is read again.

    Args:
        data: the data of the fit.
        count: number of iterators that the interrupted run had read to the end.
        unused: number of iterators that the interrupted run had made before, and had
            not read.

    Returns:
        The number of iterators that the function has made for the fit.
    """
    roots, read, is_filled = pipeline.roots(data.dataset), 0, lambda node: False
    for _ in range(unused):
        data.spare()
    if count and any(map(is_ordered_cache, parts(*roots))):
        read = 1
        for _ in data.spare():
            pass
        is_filled = seeds_of(*roots).is_filled
    for root in roots:
        pipeline.draw(root, count - read, is_filled)
    return unused + read


def has_global_batches(dataset: Any) -> bool:
    """Returns whether a position in the dataset can be given as a number of global
    batches, which does not depend on the number of workers."""
    return slices.global_batches(dataset) is not None


def check_shares(fit: Fit, dataset: Any) -> None:
    """Checks that the replicas can divide a batch equally.

    Raises:
        ConfigurationError: the batch size is not a multiple of the number of replicas.
    """
    size: int | None = None
    if fit.sequence is not None:
        size = len(tf.nest.flatten(fit.sequence.data[0])[0])
    elif (shared := slices.global_batches(dataset)) is not None:
        size = fit.array_batch or slices.batch_size(shared[0])
    if size is not None:
        replicas = fit.model.distribute_strategy.num_replicas_in_sync
        slices.check_shares(size, replicas)


def validation_problem(data: Any) -> str | None:
    """Returns a warning if validation results may differ after a restart, or None.

    Args:
        data: `validation_data` of the fit.
    """
    if hasattr(data, "__next__"):
        return READ_ON
    is_pipeline = isinstance(data, tf.data.Dataset)
    return _SHUFFLED if is_pipeline and pipeline.shuffles(data) else None


def validation_caches(data: Any) -> list[str]:
    """Returns the paths of the file caches in the pipeline of validation data."""
    return cache_paths(*pipeline.roots(data))


_SHUFFLED = (
    "validation_data are shuffled, and the order is not saved: val_loss of a "
    "restarted run differs from an uninterrupted run in its last bits. The difference "
    "is larger if a validation reads only some of the samples (take, "
    "validation_steps). Remove the shuffle"
)
_RANDOM = (
    "the input pipeline has an op whose state cannot be saved: a resumed run reads "
    "every sample once and in order, but the results of this op differ from an "
    "uninterrupted run. Use tf.random.stateless_* with a seed from the element, or "
    "augment in layers of the model"
)
_CACHED = (
    "the input pipeline caches in memory, and every commit inside an epoch includes "
    "the cached elements. Cache to a file (cache(path)) on storage that outlives the "
    "machine, or load the data before the pipeline, for instance with "
    "tfpreempt.data.from_arrays"
)
