"""Input pipelines whose position is a few numbers.

The state of a `tf.data` iterator is what `PreemptionCallback` saves as the position in
the data. A pipeline that shuffles with a buffer keeps the buffer in it, or draws it
again by reading the epoch up to the position. The pipelines here have no buffer: the
sample at position i of an epoch is computed from i and the epoch's key, by a cipher
over the indices. So the state is an index, a count of epochs and a seed, it is restored
in the same time at every batch, and any size of data is shuffled as a whole.

    data = tfpreempt.data.from_arrays((x, y), batch_size=32, seed=7)
    model.fit(data, epochs=5, callbacks=[...])

An epoch is one `iter()` of the dataset or one round of its `repeat()`, and each has a
new key. Keys come from `seed` alone and not from `tf.random.set_seed`: a program that
is started again goes on with the same permutations, and all workers of a
MultiWorkerMirroredStrategy share them. How many keys were drawn is part of the
iterator's state too, so that later epochs go on as well.

What is put behind goes on with the same exactness: `map`, `prefetch`, `repeat`. Do not
put a `shuffle` there: it adds nothing, and with the symbolic checkpoints that are
switched on here it takes time in proportion to its buffer for every element.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.tensors.data_order import first_positions, with_permutation
from tfpreempt.checkpoint.tensors.shuffle_seeds import DRAWS_SEEDS
from tfpreempt.data.slices import with_batch_size

# TensorFlow's default of 4 rounds leaves patterns that are easy to measure (60,000
# indices: an index next to its neighbour a sixth as often as by chance). From 12 on no
# difference from NumPy's permutations was found.
_ROUNDS = 16

# The op picks its block from a logarithm in floating point, which is exact up to here.
_LARGEST = 2**48
_SIZE = "the number of samples, an int from 1 to 2**48"

# Beside the user's seed, so that no seed means "draw one from the entropy pool".
_SECOND_SEED = 0x7466707265656D


def from_arrays(
    arrays: Any,
    *,
    batch_size: int,
    seed: int | None = None,
    shuffle: bool = True,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Batches of arrays that fit into memory.

    Args:
        arrays: an array, a tensor, or tuples and dicts of them, such as `(x, y)`. All
            have the same first dimension.
        batch_size: samples in a batch; under a distribution strategy, in a global one.
        seed: of the orders. The same in every start of the program and on every worker.
        shuffle: whether every epoch has a new order; without it no seed is needed.
        drop_remainder: whether a last batch that is not full is left out.

    Returns:
        A dataset of batches in the structure of `arrays`, of known cardinality.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    _check_no_list(arrays)
    # Batches are gathered on the host; with a GPU tensors would go there by default.
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(_tensor, arrays)
    size = _common_length(tensors)
    batch_size, count = _check_batches(size, batch_size, drop_remainder)
    length = batch_size if count * batch_size <= size else None

    def batches(key: tf.Tensor | None) -> tf.data.Dataset:
        def gather(start: tf.Tensor) -> Any:
            end = tf.minimum(start + batch_size, size)
            indices = _permuted(tf.range(start, end), key, size)
            indices.set_shape([length])

            def rows(tensor: tf.Tensor) -> tf.Tensor:
                return tf.gather(tensor, indices)

            return tf.nest.map_structure(rows, tensors)

        starts = tf.data.Dataset.range(0, count * batch_size, batch_size)
        return starts.map(gather, num_parallel_calls=tf.data.AUTOTUNE)

    key = _check_seed(seed) if shuffle else None
    return _finished(batches, key, count, size, batch_size)


def from_index(
    load: Callable[[tf.Tensor], Any],
    size: int,
    *,
    batch_size: int,
    seed: int | None = None,
    shuffle: bool = True,
    drop_remainder: bool = False,
    num_parallel_calls: int = tf.data.AUTOTUNE,
) -> tf.data.Dataset:
    """Batches of samples that are loaded, one by one, by their index.

    Args:
        load: makes the sample from its index, an int64 scalar; run as by `Dataset.map`.
            It must depend on the index alone, as what was loaded ahead is loaded again
            after a restart: TensorFlow ops, or Python in a `tf.numpy_function`.
        size: number of samples, up to 2**48.
        batch_size: samples in a batch; under a distribution strategy, in a global one.
        seed: of the orders. The same in every start of the program and on every worker.
        shuffle: whether every epoch has a new order; without it no seed is needed.
        drop_remainder: whether a last batch that is not full is left out.
        num_parallel_calls: how many samples are loaded at a time.

    Returns:
        A dataset of batches of what `load` returns, of known cardinality.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    if not callable(load):
        raise errors.ConfigurationError(
            f"load is of type {type(load).__name__}; expected a function that makes a "
            "sample from its index; pass arrays to from_arrays"
        )
    size = _check_integer("size", size, 1, _LARGEST, _SIZE)
    batch_size, count = _check_batches(size, batch_size, drop_remainder)

    # Compiled here, because AutoGraph does not look two functions deep.
    compiled = tf.function(load)
    _check_draws_nothing(compiled)

    def batches(key: tf.Tensor | None) -> tf.data.Dataset:
        def sample(position: tf.Tensor) -> Any:
            return compiled(_permuted(position, key, size))

        positions = tf.data.Dataset.range(size)
        samples = positions.map(sample, num_parallel_calls=num_parallel_calls)
        return samples.batch(batch_size, drop_remainder)

    key = _check_seed(seed) if shuffle else None
    return _finished(batches, key, count, size, batch_size)


def _finished(
    batches: Callable[[tf.Tensor | None], tf.data.Dataset],
    seed: int | None,
    count: int,
    size: int,
    batch_size: int,
) -> tf.data.Dataset:
    """One epoch, of what `batches` makes of its key; without a seed there is no key.

    Whole batches come out of the flat_map, and nobody asks it for more to fill the last
    one: an iterator that has met its end forgets what it read from, the count of keys
    too. What is made ahead is made again on restore, rather than saved.
    """
    if seed is None:
        epoch = batches(None)
    else:
        known = tf.data.experimental.assert_cardinality(count)
        epoch = _keys(seed).flat_map(batches).apply(known)
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = True
    # Samples have numbers, not files; a worker takes its part of each global batch.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    made = epoch.prefetch(tf.data.AUTOTUNE).with_options(options)
    if tf.executing_eagerly():  # else nothing can be known of the order
        indices = _first_indices(seed, size)
        made = with_permutation(made, [size, batch_size, *indices])
    return with_batch_size(made, batch_size)


def _first_indices(seed: int | None, size: int) -> Any:
    """Returns the indices with which the first epoch begins."""
    with tf.device("CPU:0"):
        positions = tf.constant(first_positions(size), tf.int64)
        key = None if seed is None else _keys(seed).get_single_element()
        return _permuted(positions, key, size).numpy()


def _keys(seed: int) -> tf.data.Dataset:
    """One key, three numbers of 32 bits, and another one in every iteration.

    tf.data's own generator counts the iterations and keeps the count in the state of
    its iterators. A variable would be refused as hidden state. `Dataset.random` is this
    op, but with the global seed mixed in.
    """
    numbers = tf.data.experimental.from_variant(
        tf.raw_ops.RandomDatasetV2(
            seed=tf.constant(seed, tf.int64),
            seed2=tf.constant(_SECOND_SEED, tf.int64),
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            rerandomize_each_iteration=True,
            output_types=[tf.int64],
            output_shapes=[[]],
        ),
        tf.TensorSpec([], tf.int64),
    )
    setattr(numbers, DRAWS_SEEDS, True)
    return numbers.batch(3, drop_remainder=True).take(1)


def _permuted(index: tf.Tensor, key: tf.Tensor | None, size: int) -> tf.Tensor:
    """What stands at `index` in the permutation of `size` numbers that `key` means.

    The op is `tf.random.experimental.index_shuffle` with more rounds. It chooses a
    block one bit short for 4**k + 1 numbers (k from 8 on), and gives one of them twice
    (seen in TensorFlow 2.21). There one number more is shuffled, and whoever gets the
    extra one takes what the extra one gets.
    """
    if key is None:
        return index
    is_short = size > 2**16 and size - 1 == 4 ** ((size - 1).bit_length() // 2)
    largest = tf.constant(size if is_short else size - 1, tf.int64)
    seed = tf.cast(key, tf.uint32)

    def shuffle(value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.RandomIndexShuffle(
            index=value, seed=seed, max_index=largest, rounds=_ROUNDS
        )

    found = shuffle(index)
    return tf.where(found == largest, shuffle(largest), found) if is_short else found


def _tensor(value: Any) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise errors.ConfigurationError(
            f"arrays holds {type(value).__name__}; expected arrays or tensors, in "
            "tuples and dicts; load other data by its index, with from_index"
        ) from error


def _check_no_list(arrays: Any) -> None:
    """Is a list an array or a structure? tf.data and Keras disagree."""
    if isinstance(arrays, list):
        raise errors.ConfigurationError(
            f"arrays holds a list of {len(arrays)}; expected a tuple, for several "
            "arrays, or an array made of it with np.asarray"
        )
    if isinstance(arrays, Mapping):
        arrays = tuple(arrays.values())
    if isinstance(arrays, tuple):
        for each in arrays:
            _check_no_list(each)


def _common_length(tensors: Any) -> int:
    shapes = [each.shape for each in tf.nest.flatten(tensors)]
    if shapes and all(shape.rank and shape[0] == shapes[0][0] for shape in shapes):
        return _check_integer("size", int(shapes[0][0]), 1, _LARGEST, _SIZE)
    raise errors.ConfigurationError(
        f"arrays has the shapes {[tuple(shape) for shape in shapes]}; expected one "
        "array or more, all with the same first dimension, the number of samples"
    )


def _check_draws_nothing(load: Any) -> None:
    """Refuses random ops; tf.data itself does not see them inside of a flat_map."""
    graph = load.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    parts = graph.as_graph_def()
    bodies = [parts.node, *(each.node_def for each in parts.library.function)]
    nodes = [node for body in bodies for node in body]
    # Ops with a counter of their own have these attributes, others draw from variables.
    drawing = {node.op for node in nodes if "seed2" in node.attr}
    drawing |= {node.op for node in nodes if node.op == "RngReadAndSkip"}
    if drawing:
        raise errors.ConfigurationError(
            f"load draws random numbers with {', '.join(sorted(drawing))}, whose "
            "counter is not part of the position; expected a function of the index "
            "alone. Use tf.random.stateless_* with a seed from the index, or augment "
            "in layers of the model, whose seeds are saved"
        )


def _check_batches(size: int, batch_size: Any, drop_remainder: bool) -> tuple[int, int]:
    """How large batches are, and how many."""
    expected = "a number of samples, an int from 1 on"
    number = _check_integer("batch_size", batch_size, 1, _LARGEST, expected)
    if drop_remainder and number > size:
        raise errors.ConfigurationError(
            f"batch_size is {number} with drop_remainder=True and {size} samples, "
            "which leaves no batch at all; expected no more than there are samples"
        )
    return number, size // number if drop_remainder else -(-size // number)


def _check_seed(seed: Any) -> int:
    expected = (
        "an int of 64 bits, the same in every start of the program and on every "
        "worker; or pass shuffle=False"
    )
    return _check_integer("seed", seed, -(2**63), 2**63 - 1, expected)


def _check_integer(name: str, given: Any, least: int, most: int, expected: str) -> int:
    number = None
    with contextlib.suppress(TypeError):
        number = operator.index(given)
    if number is None or isinstance(given, bool) or not least <= number <= most:
        raise errors.ConfigurationError(f"{name} is {given!r}; expected {expected}")
    return number
