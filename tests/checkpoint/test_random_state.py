"""Random generators are restored bit for bit, without pickles."""

from __future__ import annotations

import contextlib
import io
import json
import random

import numpy as np
import pytest

from tfpreempt import errors

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tensorflow.python.ops import stateful_random_ops  # noqa: E402

from tfpreempt.checkpoint.state.encoding import decode, encode  # noqa: E402
from tfpreempt.checkpoint.state.random_state import GlobalRngState  # noqa: E402
from tfpreempt.checkpoint.tensors.variables import distributed  # noqa: E402


def saved(state):
    file = io.BytesIO()
    state.save(file)
    return file.getvalue()


def load(state, data):
    state.load(io.BytesIO(data))


def draw():
    numbers = [random.random(), random.gauss(0, 1), np.random.rand()]
    numbers += [np.random.randn(), float(tf.random.uniform([]))]
    return numbers


def test_random_generators_continue_where_they_were():
    tf.random.set_seed(3)
    random.gauss(0, 1)  # leaves a second value in reserve, as randn does
    np.random.randn()
    draw()
    data = saved(GlobalRngState())
    expected = [draw() for _ in range(3)]
    random.seed(0)
    np.random.seed(0)
    tf.random.set_seed(99)
    load(GlobalRngState(), data)
    assert [draw() for _ in range(3)] == expected
    assert stateful_random_ops.global_generator is None  # not made on the way
    assert b"pickle" not in data


def test_the_global_generator_is_saved_if_there_is_one(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    tf.random.get_global_generator().uniform([3])
    data = saved(GlobalRngState())
    expected = tf.random.get_global_generator().uniform([3]).numpy()
    load(GlobalRngState(), data)
    again = tf.random.get_global_generator().uniform([3]).numpy()
    np.testing.assert_array_equal(again, expected)
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    load(GlobalRngState(), data)  # a fresh program that has none yet
    again = tf.random.get_global_generator().uniform([3]).numpy()
    np.testing.assert_array_equal(again, expected)


def test_another_bit_generator_of_numpy():
    before = np.random.get_state(legacy=False)
    assert str(decode(encode(before))) == str(before)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"python": 1}', b"\xff\x00"])
def test_a_corrupt_random_state_is_a_clear_error(data):
    with pytest.raises(errors.CheckpointCorruptedError, match=r"'tfpreempt\.random'"):
        load(GlobalRngState(), data)


def hostile_generators():
    """Returns states that make NumPy's global generator read outside its memory."""
    good = np.random.RandomState(1).get_state(legacy=False)
    for position in (-1, 625, 10**6, 1.5, True, None):
        yield {**good, "state": {**good["state"], "pos": position}}
    yield {**good, "state": [good["state"]]}
    yield ("MT19937", good["state"]["key"], 10**6)
    yield ["MT19937", good["state"]["key"], 10**6]


def hostile_records():
    yield from map(encode, hostile_generators())
    good = encode(np.random.RandomState(1).get_state(legacy=False))
    fields = {"array": "00" * 2504, "dtype": "|V2504", "shape": [1]}
    yield {"dict": {**good["dict"], "state": fields}}


@pytest.mark.parametrize("generator", list(hostile_records()))
def test_a_position_outside_of_the_generators_memory(generator):
    record = json.loads(saved(GlobalRngState()))
    record["numpy"] = generator
    before = (random.getstate(), str(np.random.get_state()))
    with pytest.raises(errors.CheckpointCorruptedError):
        load(GlobalRngState(), json.dumps(record).encode())
    assert (random.getstate(), str(np.random.get_state())) == before


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0"])


def test_the_generator_of_keras_is_made_outside_of_a_scope(strategy):
    # In one of many workers it would be made by a broadcast, at its own moment.
    keras = pytest.importorskip("keras")
    state = keras.src.backend.common.global_state
    name = "global_seed_generator"
    keras.random.uniform([1])
    data = saved(GlobalRngState())
    expected = keras.random.uniform([3]).numpy()
    state.set_global_attribute(name, None)  # a fresh program
    with strategy.scope():
        load(GlobalRngState(), data)
    made = state.get_global_attribute(name)
    assert distributed(made.state) is None
    np.testing.assert_array_equal(keras.random.uniform([3]).numpy(), expected)


def saved_by(worker, *, has_own_numpy):
    """Returns the save of a worker with the common seed, or with its own NumPy seed."""
    random.seed(3)
    np.random.seed(worker if has_own_numpy else 3)
    tf.random.set_seed(3)
    return saved(GlobalRngState())


def folded(files, worker):
    state = GlobalRngState()
    state.reshard([io.BytesIO(file) for file in files], worker, 3)
    return draw()


def test_a_new_worker_draws_the_numbers_that_all_workers_share():
    files = [saved_by(worker, has_own_numpy=False) for worker in range(2)]
    first, second, new = (folded(files, worker) for worker in range(3))
    assert first == second == new


def test_a_new_worker_draws_its_own_numbers_from_separate_generators():
    files = [saved_by(worker, has_own_numpy=True) for worker in range(2)]
    first, second, new = (folded(files, worker) for worker in range(3))
    assert folded(files, 2) == new  # the same in each restart
    of_numpy = [2, 3]
    for index, draws in enumerate(zip(first, second, new, strict=True)):
        assert len(set(draws)) == (3 if index in of_numpy else 1)


@pytest.mark.parametrize("of", ["generator", "global", "no global", "keras"])
def test_a_state_of_many_dimensions_is_refused(monkeypatch, of):
    """TensorFlow would abort the process."""
    from tfpreempt.states import TensorFlowRandomState

    keras = pytest.importorskip("keras")
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    keras.random.uniform([1])
    own = tf.random.Generator.from_seed(7) if of == "generator" else None
    state = TensorFlowRandomState(generator=own, registry=None)
    record = json.loads(saved(state))
    if of == "generator":
        record["states"] = [nested(300)]
    elif of == "keras":
        record["keras_seed"] = [nested(300)]
    else:
        record["tf_generator"]["states"] = [nested(300)]
    if of == "no global":
        monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    with pytest.raises(errors.CheckpointCorruptedError, match=r"dimension|depth"):
        load(state, json.dumps(record).encode())


def nested(depth):
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize("kind", ["all", "tensorflow", "generator"])
def test_any_bytes_are_refused_or_read(monkeypatch, rng, kind):
    """Like the fuzz campaign for the formats that need no TensorFlow."""
    from campaigns import fuzz
    from campaigns.target import Target
    from tfpreempt.states import TensorFlowRandomState

    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    tf.random.set_seed(3)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    pytest.importorskip("keras").random.uniform([1])  # created by a load otherwise
    draw()
    own = tf.random.Generator.from_seed(7) if kind == "generator" else None
    random_state = TensorFlowRandomState(generator=own, registry=None)
    state = GlobalRngState() if kind == "all" else random_state
    data = saved(state)
    target = Target(name=kind, read=lambda data, place: None, seeds=[data])
    for _ in range(100):
        with contextlib.suppress(errors.TfpreemptError):
            load(state, fuzz.changed(target, rng))
    load(state, data)
    assert saved(state) == data
