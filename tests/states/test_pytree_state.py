"""PyTreeState: each kind of leaf is restored bit for bit, or named in an error."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # imports JAX
jax = pytest.importorskip("jax")
jnp = jax.numpy

from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.state.state import StateRegistry, try_states  # noqa: E402
from tfpreempt.states import PyTreeState  # noqa: E402


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    PyTreeState("saved", value, registry=None).save(buffer)
    return buffer.getvalue()


def loaded(data: bytes, value: Any) -> Any:
    """The tree after a load into another program's tree."""
    state = PyTreeState("loaded", value, registry=None)
    state.validate(io.BytesIO(data))
    state.load(io.BytesIO(data))
    return state.value


def numbers(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def weak() -> Any:
    return jnp.asarray(1.5)


# Each with the leaf of a program that has just started.
LEAVES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "float32": lambda: (jnp.arange(6.0).reshape(2, 3), jnp.zeros((2, 3))),
    "bfloat16": lambda: (jnp.ones(3, jnp.bfloat16) / 3, jnp.zeros(3, jnp.bfloat16)),
    "float8": lambda: (jnp.ones(3, "float8_e4m3fn"), jnp.zeros(3, "float8_e4m3fn")),
    "int4": lambda: (jnp.arange(3, dtype=jnp.int4), jnp.zeros(3, jnp.int4)),
    "bool": lambda: (jnp.array([True, False]), jnp.array([False, False])),
    "complex": lambda: (jnp.array([1 + 2j]), jnp.array([0j])),
    "NaN with bits": lambda: (
        jnp.asarray(np.array([0x7FC00001], np.uint32).view(np.float32)),
        jnp.zeros(1),
    ),
    "empty": lambda: (jnp.zeros((0, 3)), jnp.zeros((0, 3))),
    "weak type": lambda: (weak(), weak() - 1),
    "weak vector": lambda: (jnp.broadcast_to(weak(), (3,)), jnp.zeros(3)),
    "no longer weak": lambda: (jnp.ones((), jnp.bfloat16), weak()),
    "number that a step made an array": lambda: (jnp.int32(5), 0),
    "committed": lambda: (
        jax.device_put(jnp.ones(3), jax.devices()[0]),
        jax.device_put(jnp.zeros(3), jax.devices()[0]),
    ),
    "key": lambda: (jax.random.key(3), jax.random.key(0)),
    "keys": lambda: (
        jax.random.split(jax.random.key(3), 4),
        jax.random.split(jax.random.key(0), 4),
    ),
    "rbg key": lambda: (
        jax.random.key(3, impl="rbg"),
        jax.random.key(0, impl="rbg"),
    ),
    "raw key": lambda: (jax.random.PRNGKey(3), jax.random.PRNGKey(0)),
    "NumPy": lambda: (np.arange(3), np.zeros(3, int)),
    "NumPy bfloat16": lambda: (np.ones(3, jnp.bfloat16), np.zeros(3, jnp.bfloat16)),
    "NumPy Fortran order": lambda: (np.ones((2, 3), order="F"), np.zeros((2, 3))),
    "NumPy scalar": lambda: (np.float32(1.5), np.float32(0)),
    "int": lambda: (2**40, 0),
    "float": lambda: (0.1, 0.0),
    "bool of Python": lambda: (True, False),
    "text": lambda: ("best", ""),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_a_leaf_is_restored_bit_for_bit(kind: str) -> None:
    value, here = LEAVES[kind]()
    found = loaded(saved({"leaf": value}), {"leaf": here})["leaf"]
    assert type(found) is type(value)
    before, after = numbers(value), numbers(found)
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    assert after.tobytes() == before.tobytes()
    if isinstance(value, np.ndarray):
        assert found.flags.f_contiguous == value.flags.f_contiguous
        assert found.flags.writeable
    if isinstance(value, jax.Array):
        assert found.dtype == value.dtype
        assert getattr(found, "weak_type", None) == getattr(value, "weak_type", None)
        assert (found.committed, found.sharding) == (value.committed, value.sharding)


def test_a_tree_of_dicts_lists_tuples_and_none() -> None:
    value = {"a": [jnp.ones(2), (1, None)], "b": {}}
    found = loaded(saved(value), {"a": [jnp.zeros(2), (0, None)], "b": {}})
    assert jax.tree.structure(found) == jax.tree.structure(value)
    assert found["a"][1] == (1, None)
    assert loaded(saved(5), 0) == 5


def test_a_restored_array_can_be_donated() -> None:
    """Its memory is separate from the bytes of the file."""
    data = saved({"w": jnp.arange(1024.0)})
    first = loaded(data, {"w": jnp.zeros(1024)})["w"]
    double = jax.jit(lambda w: w * 2, donate_argnums=0)
    assert double(double(first)).sum() == 4 * np.arange(1024).sum()
    again = loaded(data, {"w": jnp.zeros(1024)})["w"]
    assert numbers(again).tobytes() == np.arange(1024, dtype="float32").tobytes()


@pytest.mark.parametrize(
    ("here", "error"),
    [
        ({}, r"the program has no \['b'\], \['w'\]\."),
        (
            {"w": 0, "b": 0, "m": [0, 0]},
            r"the commit has no \['m'\]\[0\], \['m'\]\[1\]",
        ),
        (
            {"w": np.zeros((3, 2)), "b": 0},
            r"float32 of shape \[2, 3\].*float64 of shape",
        ),
    ],
)
def test_another_tree_is_an_error_that_names_the_paths(here: Any, error: str) -> None:
    data = saved({"w": jnp.zeros((2, 3)), "b": 1})
    state = PyTreeState("model", here, registry=None)
    with pytest.raises(errors.CheckpointMismatchError, match=error):
        state.load(io.BytesIO(data))
    assert state.value is here


def test_another_dtype_and_another_kind_of_random_keys_are_errors() -> None:
    for value, here, error in (
        (jnp.zeros(3), jnp.zeros(3, jnp.bfloat16), "float32.*bfloat16"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "'threefry2x32'.*'rbg'"),
        (jax.random.key(0), jnp.zeros((), jnp.uint32), "random keys.*uint32"),
    ):
        with pytest.raises(errors.CheckpointMismatchError, match=error):
            loaded(saved(value), here)


def test_an_unsavable_leaf_is_named() -> None:
    with pytest.raises(errors.SaveError, match=r"\['w'\].*object object"):
        saved({"w": object()})
    donated = jnp.zeros(3)
    donated.delete()
    state = PyTreeState("model", {"w": donated}, registry=None)
    with pytest.raises(errors.SaveError, match=r"\['w'\].*was deleted, perhaps by a"):
        state.save(io.BytesIO())


def test_two_leaves_with_one_path_are_an_error() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        pass

    key = jax.tree_util.DictKey("same")
    jax.tree_util.register_pytree_with_keys(
        Odd, lambda odd: ([(key, 1), (key, 2)], None), lambda _, leaves: Odd()
    )
    with pytest.raises(errors.ConfigurationError, match=r"\['same'\]"):
        PyTreeState("odd", Odd(), registry=None)


def test_bytes_that_are_no_tree_are_corrupt() -> None:
    data = saved({"w": jnp.zeros(3)})
    state = PyTreeState("model", {"w": jnp.zeros(3)}, registry=None)
    for wrong in (b"", data[:-1], data.replace(b'"pytree"', b'"pytrea"')):
        for read in (state.validate, state.load):
            with pytest.raises(errors.CheckpointCorruptedError):
                read(io.BytesIO(wrong))
    hostile = data.replace(b'"float32"', b'"object_"')
    with pytest.raises(errors.CheckpointCorruptedError):
        state.load(io.BytesIO(hostile))


# --- values that are no leaves, and values that the program ignores -----------------


@dataclasses.dataclass
class Settings:
    """A tree with a static field."""

    weights: Any
    rate: float


jax.tree_util.register_dataclass(Settings, ["weights"], ["rate"])


def started(value: Any) -> tuple[PyTreeState, PyTreeState]:
    """Returns a State that was loaded in a restart, and another State beside it."""
    registry = StateRegistry()
    state = PyTreeState("loaded", value, registry=registry)
    state.load(io.BytesIO(saved(value)))
    return state, PyTreeState("other", 0, registry=registry)


def test_functions_in_a_tree_stay_those_of_the_program() -> None:
    """A layer of Equinox has its activation function in a leaf."""
    data = saved({"activation": jax.nn.relu, "w": jnp.ones(3)})
    found = loaded(data, {"activation": jax.nn.gelu, "w": jnp.zeros(3)})
    assert found["activation"] is jax.nn.gelu
    assert numbers(found["w"]).tolist() == [1, 1, 1]


class Schedule:
    """A callable object with state."""

    def __call__(self) -> float:
        return 0.0


def test_a_callable_object_with_state_is_no_function() -> None:
    with pytest.raises(errors.SaveError, match="Schedule"):
        saved({"rate": Schedule(), "w": jnp.ones(3)})


def test_a_static_field_that_changes_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = PyTreeState("trained", Settings(jnp.ones(3), 0.1), registry=None)
    state._try_save()
    state.value = Settings(jnp.zeros(3), 0.1)
    state.save(io.BytesIO())
    assert caplog.text == ""
    for _ in range(2):
        state.value = Settings(jnp.zeros(3), 0.05)
        state.save(io.BytesIO())
    assert caplog.text.count("static fields have their initial values") == 1


def test_a_restored_value_that_the_first_step_has_not_read_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, other = started({"w": jnp.ones(3)})
    state.value = {"w": jnp.zeros(3)}  # trained from other arrays
    assert not state.value["w"].any()  # a read of the new value, for example for a log
    try_states([state, other])
    assert caplog.text.count("has not read `value` of <PyTreeState 'loaded'") == 1


def test_a_value_is_read_by_the_step_or_perhaps_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A program may read the best weights only at its end."""
    state, other = started({"w": jnp.ones(3)})
    other.load(io.BytesIO(saved(1)))
    state.value = {"w": state.value["w"] + 1}
    try_states([state, other])
    PyTreeState("new", 0, registry=None)._try_save()
    assert caplog.text == ""
