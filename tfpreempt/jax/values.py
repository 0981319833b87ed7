"""Adapter for JAX: the arrays that a step replaces, for the check of unsaved state.

Implements the functions of `Values` in `checkpoint/state/unsaved_state_check.py`. A
step computes new arrays. The program assigns the arrays to attributes and names of
Python, or an object of a library replaces its own arrays: a module of Flax NNX, a
variable of Keras, a sequence of random keys of Haiku. JAX has no iterators over data.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfpreempt.checkpoint.state.state import REGISTRY, State
from tfpreempt.core import object_graph
from tfpreempt.jax.pytree_state import PyTreeState
from tfpreempt.jax.shards import local_numbers, local_shards, unread, wide_sum

SAVED_WHOLE: tuple[type, ...] = ()
REPLACED: tuple[type, ...] = (jax.Array,)
ADVICE = (
    "Put arrays and random keys into a tfpreempt.states.PyTreeState, and other values "
    "into a named State (tfpreempt.states)."
)


def saved(checkpoint: Any) -> tuple[list[Any], list[Any]]:
    """Returns no objects, because JAX has no checkpoint object: named States save the
    arrays."""
    return [], []


def named_variables(checkpoint: Any, *, with_states: bool) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of the `PyTreeState`s, with their paths, if `with_states`: JAX
    has no checkpoint object."""
    for state in REGISTRY.in_order() if with_states else ():
        if isinstance(state, PyTreeState):
            for path, leaf in state._leaves().items():
                is_array = isinstance(leaf, jax.Array)
                yield f"{state.name}{path}", leaf if is_array else np.asarray(leaf)


def variables(value: Any) -> Sequence[Any]:
    """Returns the variables of an object of Keras; another object itself, if the
    object can replace arrays that the object has; otherwise nothing."""
    is_other = isinstance(value, jax.Array | State | type | types.ModuleType)
    if is_other or object_graph.is_container(value):
        return ()
    keras: Any = sys.modules.get("keras")
    if hasattr(keras, "config") and keras.config.backend() == "jax":
        if isinstance(value, keras.random.SeedGenerator):
            return [value.state]
        kinds = keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer
        if isinstance(value, kinds):
            return list(value.variables)
    return [value] if arrays(value) else ()


def arrays(thing: Any) -> Sequence[Any]:
    """Returns the arrays in a pytree, in a variable of Keras, or in the attributes of
    an object of a library. Returns NumPy's arrays only of a State, or as the object.

    Leaves out arrays that were donated to a computation, because they have no values.
    """
    is_plain = isinstance(thing, np.ndarray) and not thing.dtype.hasobject
    is_wide = is_plain or isinstance(thing, State)
    kinds: Any = (jax.Array, np.ndarray) if is_wide else jax.Array
    return [
        each
        for each in map(_read, _leaves(thing))
        if isinstance(each, kinds) and not isinstance(each, jax.core.Tracer)
        if not (isinstance(each, jax.Array) and each.is_deleted())
    ]


def _leaves(thing: Any) -> list[Any]:
    found = _flatten(thing)
    if len(found) == 1 and found[0] is thing:  # no pytree
        kind: type = type(thing)
        # The attributes of the program's own objects have locations of their own.
        is_whole = isinstance(thing, State) or not object_graph.is_user_code(kind)
        for each in object_graph.attributes(thing).values() if is_whole else ():
            found += _flatten(each)
    return found


def _flatten(tree: Any) -> list[Any]:
    """Returns the leaves of a pytree. Also a dict with keys that cannot be sorted, and
    a container that occurs for the second time, are leaves.

    JAX raises an error for such keys and for cycles. With each error JAX loses a part
    of Python's recursion limit: finally each call raises RecursionError. A later
    version will raise an error for iterators and views that are not named as leaves.
    """
    seen: dict[int, Any] = {}

    def is_leaf(node: Any) -> bool:
        if not isinstance(node, dict | list | tuple):
            return isinstance(node, Iterator | MappingView)
        is_large = len(node) > object_graph.MANY and object_graph.is_data(node)
        if id(node) in seen or is_large:
            return True
        seen[id(node)] = node  # kept, so that no other object gets its id()
        return isinstance(node, dict) and not _can_be_sorted(node)

    return jax.tree.leaves(tree, is_leaf=is_leaf)


def _can_be_sorted(keys: Iterable[Any]) -> bool:
    try:
        sorted(keys)
    except Exception:  # noqa: BLE001 - any, of a comparison of keys
        return False
    return True


def _read(leaf: Any) -> Any:
    is_reference = isinstance(leaf, getattr(jax, "Ref", ()))  # since JAX 0.7.2
    return leaf[...] if is_reference else leaf


def sample(thing: Any, size: int) -> np.ndarray[Any, Any] | None:
    """Returns the bytes of about `size` elements of an array, or of all arrays in an
    object; None for an object without arrays of JAX."""
    found = [thing] if isinstance(thing, np.ndarray) else arrays(thing)
    if not (found or any(isinstance(each, jax.Array) for each in _leaves(thing))):
        return None
    parts = [
        np.asarray(
            part.reshape(-1)[:: max(1, part.size * len(found) // size)]
        ).tobytes()
        for each in found
        for part in ([each] if isinstance(each, np.ndarray) else _local(each, size))
    ]
    return np.frombuffer(b"".join(parts), np.uint8)


def _local(array: jax.Array, size: int) -> list[Any]:
    """Returns the numbers of an array in the shards of this process. A large array
    stays on an accelerator, so that only the elements of a sample are copied."""
    is_large = array.size > size and jax.default_backend() != "cpu"
    return [*unread(array).shards.values()] if is_large else local_numbers(array)


def with_nan(checkpoint: Any, states: Iterable[State]) -> Iterator[str]:
    """Yields the floating-point leaves of `PyTreeState`s that contain NaN, by path.
    Reads only the elements on this worker, and needs no other worker.

    Args:
        checkpoint: checkpoint object of another framework.
        states: named States.
    """
    parts = [
        (state.described(path), part)
        for state in states
        if isinstance(state, PyTreeState)
        for path, leaf in state._leaves().items()
        if isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        if not (isinstance(leaf, jax.Array) and leaf.is_deleted())
        for part in (local_shards(leaf) if isinstance(leaf, jax.Array) else [leaf])
    ]
    # A sum is finite only if all elements are.
    sums = [
        wide_sum(part)
        if isinstance(part, jax.Array)
        else np.sum(part, dtype=np.float64)
        for _, part in parts
    ]
    # The device is waited for only now.
    for (what, part), total in zip(parts, sums, strict=True):
        is_finite = np.isfinite(float(total))
        if not is_finite and np.isnan(np.asarray(part, np.float64)).any():
            yield what


def hidden_draws(function: Any) -> Sequence[str]:
    """Returns no ops, because JAX draws from keys that the program passes."""
    return ()


def restarts(iterator: Any) -> bool:
    """Returns False, because JAX has no dataset iterators."""
    return False


def advice_on_iterators(unread: Mapping[str, Any]) -> str:
    """Returns an empty text, because JAX has no dataset iterators."""
    return ""
