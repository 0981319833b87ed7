"""Input pipelines whose position is a few numbers.

The position in the data is saved as the state of a `tf.data` iterator. If a pipeline
shuffles with a buffer, either the state contains the buffer, or a restore must read the
epoch up to the position to fill the buffer. The pipelines here have no buffer: a cipher
computes, from a number i and the key of the epoch, the index of the epoch's sample i.
So the state is an index, a number of epochs and a seed. A restore takes equally long at
every batch, and the order is a permutation of all samples, however many there are.

    data = tfpreempt.data.from_arrays((x, y), batch_size=32, seed=7)
    model.fit(data, epochs=5, callbacks=[...])

Every `iter()` of the dataset, and every repetition by `repeat()`, is an epoch with a
new key. The keys depend only on `seed`, not on `tf.random.set_seed`. So a restarted
program, and all workers of a MultiWorkerMirroredStrategy, use the same permutations.
The state of the iterator includes the number of keys used so far, so later epochs have
the right keys, too.

A program may apply `map`, `prefetch` and `repeat` to the dataset; the position stays
exact. Do not apply `shuffle`: it has no benefit, and is slow, because with the symbolic
checkpoints of these pipelines every element takes time in proportion to the buffer.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.data_order import first_positions
from tfpreempt.checkpoint.tensors.data_order import with_permutation
from tfpreempt.checkpoint.tensors.iterator_state import nodes_of
from tfpreempt.checkpoint.tensors.shuffle_seeds import DRAWS_SEEDS
from tfpreempt.data.slices import with_batch_size

# Rounds of the cipher. TensorFlow's default of 4 gives permutations that are not random
# enough (of 60,000 indices, neighbours stay neighbours six times less often than by
# chance). From 12 rounds on, no difference from NumPy's permutations was found.
_ROUNDS = 16

# The op computes its block size by a floating-point logarithm, which is exact up to
# 2**48.
_LARGEST = 2**48
_SIZE = "the number of samples, an int from 1 to 2**48"

# The op takes two seeds: the user's seed, and this one. If both were 0, the op would
# use a random seed.
_SECOND_SEED = 0x7466707265656D


def from_arrays(
    arrays: Any,
    *,
    batch_size: int,
    seed: int | None = None,
    shuffle: bool = True,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Returns a dataset of batches of arrays that fit into memory.

    Args:
        arrays: an array, a tensor, or tuples and dicts of arrays and tensors, such as
            `(x, y)`, with equal first dimensions.
        batch_size: number of samples in a batch; under a distribution strategy, in a
            global batch.
        seed: seed of the epochs' orders; use the same seed in every start of the
            program and on every worker.
        shuffle: whether every epoch has a new order. If False, no seed is needed.
        drop_remainder: whether to drop the last batch of an epoch if it has fewer than
            `batch_size` samples.

    Returns:
        A dataset of batches in the structure of `arrays`, with known cardinality.

    Raises:
        ConfigurationError: an argument is invalid.
    """
    _check_no_list(arrays)
    # Keep the arrays in host memory, where batches are gathered; TensorFlow would put
    # them on a GPU.
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
    """Returns a dataset of batches of samples, loaded by index.

    Args:
        load: function that takes an index (an int64 scalar tensor), and returns a
            sample. It is traced like the function of `Dataset.map`: use TensorFlow ops,
            or Python in a `tf.numpy_function`. The result must depend on the index
            alone, because a restart loads again the samples that were loaded ahead.
        size: number of samples, up to 2**48.
        batch_size: number of samples in a batch; under a distribution strategy, in a
            global batch.
        seed: seed of the epochs' orders; use the same seed in every start of the
            program and on every worker.
        shuffle: whether every epoch has a new order. If False, no seed is needed.
        drop_remainder: whether to drop the last batch of an epoch if it has fewer than
            `batch_size` samples.
        num_parallel_calls: number of samples to load in parallel.

    Returns:
        A dataset of batches of the results of `load`, with known cardinality.

    Raises:
        ConfigurationError: an argument is invalid.
    """
    if not callable(load):
        raise errors.ConfigurationError(
            f"Got load of type {type(load).__name__}; expected a function that takes "
            "an index and returns a sample. For arrays, use from_arrays"
        )
    size = _check_integer("size", size, 1, _LARGEST, _SIZE)
    batch_size, count = _check_batches(size, batch_size, drop_remainder)

    # Apply tf.function here: AutoGraph does not convert a function that is called
    # inside of another mapped function.
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
    """Returns the dataset of all epochs; the order of an epoch depends on a new key.

    The flat_map yields complete batches, not samples. A `batch` after the flat_map
    would read on, to fill the last batch of an epoch, and so reach the end of the
    flat_map; at the end a flat_map iterator loses the state of its inputs, here the
    number of keys. Prefetched elements are not saved: a restore computes them again.

    Args:
        batches: function that takes the key of an epoch, and returns the batches of
            the epoch.
        seed: seed of the keys; None: `batches` is called with None.
        count: number of batches in an epoch.
        size: number of samples.
        batch_size: number of samples in a batch.
    """
    if seed is None:
        epoch = batches(None)
    else:
        known = tf.data.experimental.assert_cardinality(count)
        epoch = _keys(seed).flat_map(batches).apply(known)
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = True
    # There are no files to divide: every worker takes a part of every global batch.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    made = epoch.prefetch(tf.data.AUTOTUNE).with_options(options)
    if tf.executing_eagerly():  # in a graph the order cannot be computed now
        indices = _first_indices(seed, size)
        made = with_permutation(made, [size, batch_size, *indices])
    return with_batch_size(made, batch_size)


def _first_indices(seed: int | None, size: int) -> Any:
    """Returns the indices of the first samples of the first epoch.

    `with_permutation` stores the fingerprint of these indices in the dataset.
    """
    with tf.device("CPU:0"):
        positions = tf.constant(first_positions(size), tf.int64)
        key = None if seed is None else _keys(seed).get_single_element()
        return _permuted(positions, key, size).numpy()


def _keys(seed: int) -> tf.data.Dataset:
    """Returns a dataset of one key, which is new in every iteration over the dataset.

    A key is three 32-bit numbers, from which the order of an epoch is computed.

    The random op of tf.data counts the iterations, and its iterators save the count. A
    variable with the count would not work, because TensorFlow refuses to save an
    iterator that depends on a variable. `Dataset.random` uses the same op, but its
    numbers also depend on the global seed.
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
    """Returns the number at `index` in the permutation of `size` numbers for `key`.

    The function uses the op of `tf.random.experimental.index_shuffle`, with more
    rounds. The op (TensorFlow 2.21) has a bug: for 4**k + 1 numbers with k >= 8 it uses
    a block that is one bit too short, and returns one number twice. For these sizes the
    function permutes size + 1 numbers. The index for which the op returns the extra
    number gets the number that the op returns for the extra index.

    Args:
        index: tensor of indices, from 0 to size - 1.
        key: key of the permutation; None: the result is `index`.
        size: number of numbers to permute.
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
            f"arrays contains a value of type {type(value).__name__}; expected "
            "arrays or tensors, in tuples and dicts. To load other data by index, "
            "use from_index"
        ) from error


def _check_no_list(arrays: Any) -> None:
    """Refuses lists, because tf.data and Keras treat lists differently.

    tf.data converts a list to one array; Keras uses every item as a separate array.

    Raises:
        ConfigurationError: the arrays contain a list.
    """
    if isinstance(arrays, list):
        raise errors.ConfigurationError(
            f"arrays contains a list of {len(arrays)} items; expected a tuple for "
            "several arrays, or a single array made with np.asarray(list)"
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
        f"arrays has the shapes {[tuple(shape) for shape in shapes]}; expected at "
        "least one array, and the same first dimension (the number of samples) for all "
        "arrays"
    )


def _check_draws_nothing(load: Any) -> None:
    """Refuses a `load` function with random ops that have a hidden counter.

    tf.data cannot save such a counter, and does not detect the counter inside of a
    flat_map.

    Args:
        load: the function, as a tf.function of an index.

    Raises:
        ConfigurationError: the function contains such a random op.
    """
    graph = load.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    nodes = nodes_of(graph)
    # Random ops with a hidden counter have the attribute seed2. RngReadAndSkip has its
    # counter in a variable.
    drawing = {node.op for node in nodes if "seed2" in node.attr}
    drawing |= {node.op for node in nodes if node.op == "RngReadAndSkip"}
    if drawing:
        raise errors.ConfigurationError(
            f"load draws random numbers with {', '.join(sorted(drawing))}, whose "
            "counter is not part of the position; expected a function that depends "
            "only on the index. Use tf.random.stateless_* with a seed from the index, "
            "or augment in layers of the model, whose seeds are saved"
        )


def _check_batches(size: int, batch_size: Any, drop_remainder: bool) -> tuple[int, int]:
    """Returns the batch size and the number of batches.

    Raises:
        ConfigurationError: the batch size is invalid, or there is no full batch.
    """
    expected = "a number of samples, an int of 1 or more"
    number = _check_integer("batch_size", batch_size, 1, _LARGEST, expected)
    if drop_remainder and number > size:
        raise errors.ConfigurationError(
            f"batch_size is {number} with drop_remainder=True and {size} samples, so "
            f"there is no full batch; expected at most {size}"
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
