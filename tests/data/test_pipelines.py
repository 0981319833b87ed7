"""Every epoch is a permutation, and a saved position continues in all epochs."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tfpreempt import errors

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.data import pipelines_program  # noqa: E402
from tests.keras.positions import deserialize, numbers, serialize  # noqa: E402
from tfpreempt import data  # noqa: E402

SIZE, BATCH, BATCHES = 50, 8, 7
SAMPLES = np.arange(SIZE)


def sample(index):
    return index, {"half": index / 2}


def arrays(**more):
    more = {"batch_size": BATCH, "seed": 3, **more}
    return data.from_arrays((SAMPLES, {"half": SAMPLES / 2}), **more)


def indexed(**more):
    return data.from_index(sample, SIZE, **{"batch_size": BATCH, "seed": 3, **more})


def enlarged():
    """Adds operations that users append."""

    def double(samples, more):
        return samples, {"twice": 4 * more["half"]}

    return arrays().map(double, num_parallel_calls=2).prefetch(3)


both = pytest.mark.parametrize("make", [arrays, indexed])


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@both
def test_every_epoch_has_every_sample_once_in_another_order(make):
    dataset = make()
    assert dataset.cardinality() == BATCHES
    epochs = [numbers(dataset) for _ in range(4)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [BATCH] * 6 + [2]
        assert sorted(flat(batches)) == list(range(SIZE))
    assert len({str(batches) for batches in epochs}) == 4
    assert numbers(make().repeat(4)) == list(itertools.chain.from_iterable(epochs))


@both
def test_the_seed_alone_decides(make):
    tf.random.set_seed(1)
    first = [numbers(dataset) for dataset in [make()] for _ in range(2)]
    tf.random.set_seed(2)
    again = [numbers(dataset) for dataset in [make()] for _ in range(2)]
    assert again == first
    for seed in (-1, np.int64(4)):
        assert numbers(make(seed=seed)) != first[0]


def test_both_ways_give_the_same_order():
    assert numbers(arrays()) == numbers(indexed())


@both
def test_in_order(make):
    dataset = make(shuffle=False, seed=None)
    assert [flat(numbers(dataset)) for _ in range(2)] == [list(range(SIZE))] * 2
    assert dataset.cardinality() == BATCHES


@both
def test_the_remainder_can_be_dropped(make):
    dataset = make(drop_remainder=True)
    assert dataset.cardinality() == 6
    assert [len(batch) for batch in numbers(dataset)] == [BATCH] * 6
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    assert shapes == [[BATCH], [BATCH]]


@both
def test_samples_keep_together(make):
    for samples, more in make():
        np.testing.assert_array_equal(samples / 2, more["half"])


def test_any_structure():
    wide = np.zeros((SIZE, 2, 3), np.float32)
    words = tf.constant([str(number) for number in SAMPLES])
    nested = {"a": (wide, SAMPLES), "b": {"c": words}}
    batch = next(iter(data.from_arrays(nested, batch_size=4, seed=1)))
    assert batch["a"][0].shape == (4, 2, 3)
    assert (
        batch["b"]["c"].numpy().astype(int).tolist() == batch["a"][1].numpy().tolist()
    )
    single = next(iter(data.from_arrays(np.arange(5), batch_size=9, seed=1)))
    assert sorted(single.numpy()) == list(range(5))


@pytest.mark.parametrize("make", [arrays, indexed, enlarged])
def test_a_position_resumes_exactly(make):
    """At any batch, whether or not the iterators before are made again."""
    dataset = make()
    undisturbed = [numbers(dataset) for _ in range(5)]
    for read, made in ((0, 2), (1, 0), (BATCHES, 0), (BATCHES, 2), (None, 0)):
        dataset = make()
        for _ in range(2):
            iter(dataset)
        iterator = iter(dataset)
        taken = numbers(iterator if read is None else itertools.islice(iterator, read))
        state = serialize(iterator)
        fresh = make()
        for _ in range(made):
            iter(fresh)
        iterator = iter(fresh)
        deserialize(iterator, state)
        rest = [taken + numbers(iterator), numbers(fresh), numbers(fresh)]
        assert rest == undisturbed[2:], (read, made)


@both
def test_a_position_within_repeat_resumes_exactly(make):
    def take(iterator, count):
        return numbers(itertools.islice(iterator, count))

    undisturbed = take(iter(make().repeat()), 4 * BATCHES)
    for read in (3, BATCHES - 1, BATCHES, 2 * BATCHES + 4):
        iterator = iter(make().repeat())
        taken = take(iterator, read)
        state = serialize(iterator)
        iterator = iter(make().repeat())
        deserialize(iterator, state)
        assert taken + take(iterator, 4 * BATCHES - read) == undisturbed


def test_the_state_is_small_at_every_batch():
    wide = np.zeros((1000, 1000), np.float32)
    dataset = data.from_arrays(wide, batch_size=100, seed=1).prefetch(4)
    iterator = iter(dataset)
    sizes = [len(serialize(iterator))]
    for _ in iterator:
        sizes.append(len(serialize(iterator)))
    assert max(sizes) < 4096


def test_a_dropped_iterator_uses_up_one_order():
    undisturbed = [numbers(dataset) for dataset in [arrays()] for _ in range(2)]
    dataset = arrays()
    iter(dataset)
    assert numbers(dataset) == undisturbed[1]


@pytest.mark.parametrize("size", [1, 2, 3, 2**16, 2**16 + 1, 2**16 + 2, 4**9 + 1])
def test_sizes_at_the_edge_of_a_block(size):
    dataset = data.from_arrays(np.arange(size), batch_size=size, seed=1)
    assert sorted(flat(numbers(dataset))) == list(range(size))


def test_fact_the_op_has_the_bug_that_is_avoided():
    largest = 4**8
    indices = tf.range(largest + 1, dtype=tf.int64)
    found = tf.random.experimental.index_shuffle(indices, [1, 2], largest)
    assert len(np.unique(found)) == largest


def test_orders_look_random():
    """The number of neighbors that stay neighbors is as by chance: 2 in an epoch."""
    dataset = data.from_arrays(np.arange(60_000), batch_size=60_000, seed=1)
    orders = [next(iter(dataset)).numpy() for _ in range(10)]
    stay = sum(int((np.abs(np.diff(order)) == 1).sum()) for order in orders)
    assert 8 < stay < 36


def test_load_is_read_by_autograph():
    def load(index):
        if index % 2 == 0:
            return index
        return -index

    found = flat(numbers(data.from_index(load, 6, batch_size=4, seed=1)))
    assert sorted(found) == [-5, -3, -1, 0, 2, 4]


def test_load_may_be_python_and_any_callable():
    def read(scale, index):
        return tf.numpy_function(lambda number: scale * number, [index], tf.int64)

    load = functools.partial(read, 10)
    dataset = data.from_index(load, 6, batch_size=4, seed=1, num_parallel_calls=1)
    serialize(iter(dataset))
    assert sorted(flat(numbers(dataset))) == [0, 10, 20, 30, 40, 50]


def draws(index):
    return tf.cast(index, tf.float32) + tf.random.uniform([])


def draws_in_a_branch(index):
    return tf.cond(index > 3, lambda: tf.random.normal([]), lambda: 0.0)


def draws_from_a_generator(index):
    return tf.random.get_global_generator().uniform([]) + tf.cast(index, tf.float32)


@pytest.mark.parametrize("load", [draws, draws_in_a_branch, draws_from_a_generator])
def test_load_may_not_draw(load):
    with pytest.raises(errors.ConfigurationError, match="load draws random numbers"):
        data.from_index(load, 6, batch_size=4, seed=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: arrays(seed=None), "seed is None.*shuffle=False"),
        (lambda: arrays(seed=1.5), "seed is 1.5"),
        (lambda: arrays(seed=True), "seed is True"),
        (lambda: indexed(seed=2**63), "seed is 9223372036854775808"),
        (lambda: arrays(batch_size=0), "batch_size is 0"),
        (lambda: indexed(batch_size="8"), "batch_size is '8'"),
        (lambda: arrays(batch_size=51, drop_remainder=True), "there is no full batch"),
        (lambda: data.from_index(sample, 0, batch_size=1, seed=1), "size is 0"),
        (lambda: data.from_index(sample, 2**49, batch_size=1, seed=1), "size is 56"),
        (
            lambda: data.from_index(SAMPLES, 5, batch_size=1, seed=1),
            "type ndarray.*from_arrays",
        ),
        (lambda: data.from_arrays((), batch_size=1, seed=1), r"shapes \[\]"),
        (
            lambda: data.from_arrays(({"a": [1, 2]}, SAMPLES), batch_size=1, seed=1),
            "a list of 2 items; expected a tuple",
        ),
        (lambda: data.from_arrays(3, batch_size=1, seed=1), r"shapes \[\(\)\]"),
        (
            lambda: data.from_arrays((SAMPLES, SAMPLES[1:]), batch_size=1, seed=1),
            r"shapes \[\(50,\), \(49,\)\]",
        ),
        (
            lambda: data.from_arrays({"a": object()}, batch_size=1, seed=1),
            "arrays contains a value of type object.*from_index",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(errors.ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("steps", [None, 9])
def test_fit_resumes_exactly(library, steps):
    """`fit` reads the data as usual; only the batches for training are recorded."""
    keras = pytest.importorskip(library)
    length = steps or BATCHES

    def make():
        return arrays() if steps is None else arrays().repeat()

    def fit(step, epoch):
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        read = []

        def train(iterator):
            step(iterator, read)
            return {"loss": 0.0}

        def make_train_function(force=False):
            model.train_function = train
            return train

        model.make_train_function = make_train_function
        model.fit(
            make(), epochs=4, initial_epoch=epoch, steps_per_epoch=steps, verbose=0
        )
        return read

    def take(iterator, read):
        read.append(next(iterator)[0].numpy().tolist())

    undisturbed = fit(take, 0)
    assert len(undisturbed) == 4 * length
    done = length + 4
    saved = []

    def take_and_save(iterator, read):
        take(iterator, read)
        if len(read) == done:
            saved.append(serialize(iterator))

    fit(take_and_save, 0)

    def go_on(iterator, read):
        if not read:
            deserialize(iterator, saved[0])
        if len(read) < done - length:
            read.append(None)  # batches that were trained before
        else:
            take(iterator, read)

    assert fit(go_on, 1)[done - length :] == undisturbed[done:]


@pytest.fixture(scope="module")
def elsewhere(zygote, tmp_path_factory):
    """Returns the results of a new process with two devices."""
    dataset = pipelines_program.dataset()
    for _ in range(2):
        iter(dataset)
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    path = tmp_path_factory.mktemp("position") / "state"
    path.write_bytes(serialize(iterator))
    program = Path(pipelines_program.__file__)
    done = zygote.run(program, path, directory=path.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_new_process_resumes_exactly(elsewhere):
    undisturbed = [numbers(dataset) for dataset in [arrays()] for _ in range(5)]
    expected = [undisturbed[2][3:], *undisturbed[3:]]
    assert elsewhere["continued"] == [expected, expected]


def test_a_relaxed_function_accepts_batches_of_all_sizes(elsewhere):
    assert elsewhere["sizes"] == [8, 12, 6, 7]


@pytest.mark.parametrize("key", ["whole", "dropped"])
def test_global_batches_are_the_same_on_two_devices(elsewhere, key):
    dataset = arrays(drop_remainder=key == "dropped")
    assert elsewhere[key] == numbers(dataset)


def test_a_position_in_slices_resumes_exactly_and_is_small(elsewhere):
    assert elsewhere["slices_bytes"] < 4096
    dataset = arrays()
    iter(dataset)
    later = [numbers(dataset) for _ in range(2)]
    assert elsewhere["slices_continued"] == [later[0][3:], later[1]]


def test_it_is_public_by_one_name():
    """The package of the fit's position has none of the functions."""
    keras = importlib.import_module("tfpreempt.keras")
    assert "data" not in keras.__all__
    inner = importlib.import_module("tfpreempt.keras.data")
    assert [name for name in data.__all__ if hasattr(inner, name)] == []
