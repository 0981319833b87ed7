"""LoaderState: loaders with a position, such as Grain's."""

from __future__ import annotations

import collections
import io

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfpreempt
from tests.checkpoint.test_ready_made_states import HOSTILE, load, parts, saved
from tests.states.test_states import directory, restart  # noqa: F401  # a fixture
from tfpreempt import errors
from tfpreempt.checkpoint.state.state import try_states
from tfpreempt.states import LoaderState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


class Lines:
    """A user's own loader, with the first pair of methods."""

    def __init__(self, place=0):
        self.place = place

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        return self.place

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.place = state


class StatefulLoader:
    """Like torchdata's: not an iterator, with the second pair of methods."""

    def __init__(self, state=None):
        self.state = state

    def __iter__(self):
        yield from self.state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def grain_dataset():
    samples = grain.MapDataset.source(np.arange(40)).seed(3).shuffle()
    return samples.map(lambda number: 2 * number).repeat(2).batch(3)


def grain_loader():
    sampler = grain.samplers.IndexSampler(
        40,
        shard_options=grain.sharding.NoSharding(),
        shuffle=True,
        num_epochs=2,
        seed=1,
    )
    batches = [grain.transforms.Batch(3)]
    return grain.DataLoader(
        data_source=np.arange(40), sampler=sampler, operations=batches, worker_count=0
    )


GRAIN = {
    "a dataset": lambda: iter(grain_dataset()),
    "in this thread": lambda: iter(
        grain_dataset().to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
    ),
    "ahead in threads": lambda: iter(
        grain_dataset().to_iter_dataset(
            grain.ReadOptions(num_threads=4, prefetch_buffer_size=9)
        )
    ),
    "a window shuffled": lambda: iter(
        grain.experimental.WindowShuffleIterDataset(
            grain_dataset().to_iter_dataset(), window_size=5, seed=2
        )
    ),
    "a DataLoader": lambda: iter(grain_loader()),
}


def rest(batches):
    return [np.asarray(batch).tolist() for batch in batches]


# --- Grain ---------------------------------------------------------------------------


@pytest.mark.parametrize("taken_before", [0, 5])
@pytest.mark.parametrize("name", GRAIN)
def test_an_iterator_of_grain_resumes_exactly(name, taken_before):
    batches = GRAIN[name]()
    for _ in range(7):
        next(batches)
    data = saved(LoaderState("data", batches, registry=None))
    expected = rest(batches)
    assert len(expected) > 10
    fresh = GRAIN[name]()
    for _ in range(taken_before):
        next(fresh)
    load(LoaderState("data", fresh, registry=None), data)
    assert rest(fresh) == expected


@pytest.mark.parametrize("name", GRAIN)
def test_at_the_beginning_and_at_the_end(name):
    state = LoaderState("data", GRAIN[name](), registry=None)
    start = saved(state)
    everything = rest(state.loader)
    end = saved(state)
    state.loader = GRAIN[name]()
    assert rest(load(state, start).loader) == everything
    state.loader = GRAIN[name]()
    assert rest(load(state, end).loader) == []


@pytest.mark.parametrize(
    "data", [grain_dataset(), grain_dataset().to_iter_dataset(), grain_loader()]
)
def test_of_grain_the_iterator_is_asked_for(data):
    with pytest.raises(errors.ConfigurationError, match=r"'data'.*pass iter\(loader\)"):
        LoaderState("data", data, registry=None)


def test_a_state_that_grain_refuses_is_a_mismatch():
    batches = GRAIN["a DataLoader"]()
    next(batches)
    data = saved(LoaderState("data", batches, registry=None))
    other = iter(
        grain.load(grain.MapDataset.range(40), shuffle=True, seed=5, num_epochs=1)
    )
    state = LoaderState("data", other, registry=None)
    with pytest.raises(
        errors.CheckpointMismatchError, match=r"'data'.*not accept.*sampl"
    ):
        load(state, data)


class Source:
    """A data source of the program."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return index


class NamedSource(Source):
    def __repr__(self):
        return "NamedSource()"


@pytest.mark.parametrize("kind", [Source, NamedSource])
def test_a_source_whose_description_is_new_in_a_restart_is_named(kind, caplog):
    """Grain refuses the saved state if the description of the source has changed."""
    sampler = grain.samplers.IndexSampler(9, seed=1, shuffle=True)
    loader = grain.DataLoader(data_source=kind(), sampler=sampler)
    state = LoaderState("data", iter(loader), registry=None)
    try_states([state])
    assert ("Define __repr__ in the class" in caplog.text) == (kind is Source)


def test_the_state_of_a_loader_is_read_once_before_training():
    """The state of a loader with large buffers takes long to make."""
    loader = Lines()
    read = []
    loader.get_state = lambda: read.append(loader.place) or loader.place
    try_states([LoaderState("data", loader, registry=None)])
    assert read == [0]


def test_the_next_element_after_a_restart_follows_the_last(directory, monkeypatch):  # noqa: F811
    batches = GRAIN["ahead in threads"]()
    place = LoaderState("data", batches)
    trained = [next(batches).tolist() for _ in range(4)]
    tfpreempt.save_all_states()
    lost = next(batches).tolist()  # trained, and not committed
    place.unregister()
    restart(monkeypatch)
    again = GRAIN["ahead in threads"]()
    place = LoaderState("data", again)
    assert tfpreempt.load_state(place)
    trained += rest(again)
    assert trained == rest(GRAIN["ahead in threads"]())
    assert trained[4] == lost


# --- any other loader ----------------------------------------------------------------


def test_a_loader_class_of_the_program():
    lines = Lines()
    state = LoaderState("data", lines, registry=None)
    assert state.per_worker
    next(lines)
    data = saved(state)
    assert next(load(LoaderState("data", Lines(), registry=None), data).loader) == 2


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.binary(), inner)
    ),
    max_leaves=10,
)


@settings(max_examples=100)
@given(PLAIN)
def test_plain_states_are_restored(value):
    data = saved(LoaderState("data", StatefulLoader(value), registry=None))
    back = load(LoaderState("data", StatefulLoader(), registry=None), data)
    assert repr(back.loader.state) == repr(value)


def test_arrays_are_restored():
    value = {
        "order": np.arange(6).reshape(2, 3),
        "seed": np.uint64(7),
        "raw": b"\0\xff",
    }
    data = saved(LoaderState("data", StatefulLoader(value), registry=None))
    back = load(LoaderState("data", StatefulLoader(), registry=None), data).loader.state
    assert repr(back) == repr(value)
    assert back["order"].flags.writeable


CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {2}]}, r"'data'.*\['a'\]\[1\] is \{2\} \(set\); expected bytes"),
        (collections.OrderedDict(a=1), r"OrderedDict"),
        (np.array([object()]), "dtype object"),
        (CIRCLE, "contains itself"),
    ],
)
def test_other_states_are_refused(value, said):
    state = LoaderState("data", StatefulLoader(value), registry=None)
    with pytest.raises(errors.SaveError, match=said):
        saved(state)


class Half:
    def get_state(self):
        return 1


def generated():
    yield 1


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (Half(), r"has get_state\(\) but not set_state\(\); expected"),
        (Lines, r"the class Lines.*Lines\(\.\.\.\)"),
        ([1, 2], r"\[1, 2\] of type list.*pass iter\(loader\)"),
        (generated(), "position of a Python generator cannot be read"),
        (None, r"None of type NoneType; expected .*state_dict\(\)"),
    ],
)
def test_an_object_that_is_no_loader_is_refused(loader, said):
    with pytest.raises(errors.ConfigurationError, match=said):
        LoaderState("data", loader, registry=None)


def test_a_loader_assigned_later_is_checked_too():
    state = LoaderState("data", Lines(), registry=None)
    data = saved(state)
    state.loader = [1]
    for use in (saved, lambda state: load(state, data)):
        with pytest.raises(errors.ConfigurationError, match="'data'"):
            use(state)


@pytest.mark.parametrize(
    "data",
    [
        *HOSTILE,
        parts({"kind": "tf.data"}),
        parts({"kind": "loader"}),
        parts({"kind": "loader", "state": {"bytes": 0}}),
        parts([]),
    ],
)
def test_hostile_states(data):
    state = LoaderState("data", Lines(7), registry=None)
    for read in (state.validate, state.load):
        with pytest.raises(errors.CheckpointCorruptedError):
            read(io.BytesIO(data))
    assert state.loader.place == 7
