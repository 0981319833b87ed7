"""Adapter for TensorFlow: random generators, and the values that a step changes.

`state/random_state.py` saves, restores and seeds the random generators of TensorFlow
and Keras with the first functions here. The records are JSON and raw bytes, never
pickles, and are restored bit for bit. `state/unsaved_state_check.py` compares the
values of TensorFlow's objects before and after a step with the last functions (from
`saved` on).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.state.encoding import decode, encode
from tfpreempt.checkpoint.state.unsaved_state_check import raw_bytes
from tfpreempt.checkpoint.tensors.gather import has_slots, sums
from tfpreempt.checkpoint.tensors.iterator_state import (
    KEEP_SERVICE_OUT,
    nodes_of,
    reads_data_service,
)
from tfpreempt.checkpoint.tensors.reader import COUNTERS
from tfpreempt.checkpoint.tensors.shuffle_seeds import parts
from tfpreempt.checkpoint.tensors.variables import (
    attach,
    local_parts,
    out_of_scope,
    unequal_parts,
)
from tfpreempt.core import private_api

_log = logging.getLogger(__name__)
# Keras has a constant for the name only since version 3.13.
_KERAS_GENERATOR = "global_seed_generator"
_RATES = ("rate", "dropout", "recurrent_dropout")  # attributes of layers of tf_keras


def record() -> dict[str, Any]:
    """Returns the states of TensorFlow's and Keras' random generators, JSON-able.

    Returns:
        The states, by the keys listed in `random_state.py`; None for a generator that
        the program has not created.
    """
    eager = private_api.eager_context.context()
    rng = getattr(eager, "_rng", None)
    seed = eager._seed
    of_keras, keras = None, sys.modules.get(private_api.MODULES["keras_seeds"])
    # Keras creates its global generator at the first draw without a seed.
    if keras is not None:
        of_keras = keras.global_state.get_global_attribute(_KERAS_GENERATOR)
    states = () if of_keras is None else local_parts(of_keras.state)
    return {
        "tf_seed": None if seed is None else int(np.array(seed)),
        "tf_rng": None if rng is None else encode(rng.getstate()),
        "tf_generator": generator_record(
            private_api.stateful_random_ops.global_generator
        ),
        "keras_seed": [state.numpy().tolist() for state in states] or None,
    }


def load(saved: Any) -> None:
    """Sets TensorFlow's and Keras' random generators to the states returned by
    `record`."""
    if saved["tf_seed"] is not None and saved["tf_rng"] is not None:
        eager = private_api.eager_context.context()
        eager._set_global_seed(saved["tf_seed"])
        eager._rng.setstate(decode(saved["tf_rng"]))
    if saved["tf_generator"] is not None:
        _load_generator(saved["tf_generator"])
    if saved.get("keras_seed") is not None:  # commits of earlier versions lack the key
        _load_keras_record(saved["keras_seed"])


def reseed(seed: int) -> None:
    """Seeds the random numbers drawn by eager ops and by the global
    `tf.random.Generator`.

    The global seed (`tf.random.set_seed`) is unchanged, because all workers must have
    the same global seed. The seed of Keras is unchanged too, because layers must draw
    the same numbers on every replica.

    Args:
        seed: seed of this worker, of up to 128 bits.
    """
    eager = private_api.eager_context.context()
    if getattr(eager, "_rng", None) is not None:
        eager._rng.seed(seed)
    if (generator := private_api.stateful_random_ops.global_generator) is not None:
        generator.reset_from_seed(seed % 2**63)


def is_seeded() -> bool:
    """Returns whether the program has set a global seed (`tf.random.set_seed`)."""
    return private_api.eager_context.global_seed() is not None


def warn_of_kernels(objects: Sequence[tuple[str, Any]]) -> None:
    """Logs a warning if layers of tf_keras have a random state that no save contains.

    Args:
        objects: path and object of each object of a checkpoint.
    """
    # A Bidirectional trains two copies of the layer with which it was made.
    unused = {
        id(part)
        for _, obj in objects
        if type(obj).__name__ == "Bidirectional" and _is_of_tf_keras(obj)
        for part in obj.layer._flatten_layers()
    }
    # Do not use getattr: the access to a missing attribute of a variable reads the
    # value of the variable. For an ON_READ variable the read is a collective, which
    # would hang without the other workers.
    lost = [
        path
        for path, obj in objects
        if getattr(
            inspect.getattr_static(obj, "_random_generator", None), "_rng_type", None
        )
        == "legacy_stateful"
        if id(obj) not in unused and not _has_no_dropout(obj)
    ]
    if lost:
        _log.warning(
            "the layers %s of tf_keras draw random numbers from operations whose state "
            "cannot be saved, so after a restart the numbers differ from an "
            "uninterrupted run. Call "
            "tf_keras.backend.experimental.enable_tf_random_generator() before the "
            "model is created.",
            ", ".join(lost),
        )


def _has_no_dropout(layer: Any) -> bool:
    """Returns whether all dropout rates of a layer of tf_keras are 0, such as the
    default rates of an LSTM. A layer that the program defines may draw other numbers.
    """
    if not _is_of_tf_keras(layer):
        return False
    found = (getattr(layer, each, None) for each in _RATES)
    rates = [each for each in found if each is not None]
    return bool(rates) and not any(rates)


def _is_of_tf_keras(value: Any) -> bool:
    return type(value).__module__.startswith("tf_keras.")


def _load_keras_record(seeds: Any) -> None:
    if (keras := sys.modules.get(private_api.MODULES["keras_seeds"])) is None:
        return  # the program has not imported Keras, so it has no generator
    state = keras.global_state
    if state.get_global_attribute(_KERAS_GENERATOR) is None:
        # The saved program had a generator, so create one. With a given seed, the new
        # generator does not draw a seed from Python's random numbers.
        make = functools.partial(keras.SeedGenerator, 0)
        state.set_global_attribute(_KERAS_GENERATOR, out_of_scope(make))
    _assign(state.get_global_attribute(_KERAS_GENERATOR), seeds)


def generator_record(generator: Any) -> Any:
    """Returns the state of a `tf.random.Generator`, JSON-able. None without a
    generator.

    Args:
        generator: the generator, or None.
    """
    if generator is None:
        return None
    components = local_parts(generator.state)
    return {
        "algorithm": int(generator.algorithm),
        "states": [encode(component.numpy()) for component in components],
    }


def _load_generator(record: Any) -> None:
    if (generator := private_api.stateful_random_ops.global_generator) is not None:
        load_generator_record(generator, record)
        return
    # The saved program had a generator, so the resumed program needs a generator too.
    state, algorithm = _checked(decode(record["states"][0])), record["algorithm"]
    make = functools.partial(tf.random.Generator.from_state, state, alg=algorithm)
    tf.random.set_global_generator(out_of_scope(make))


def load_generator_record(generator: Any, record: Any) -> None:
    """Sets a `tf.random.Generator` to a state returned by `generator_record`."""
    _assign(generator, [decode(state) for state in record["states"]])


def _assign(generator: Any, states: list[Any]) -> None:
    """Assigns saved states to a generator, replica by replica.

    If the number of replicas has changed, every replica gets the first state.
    """
    parts = local_parts(generator.state)
    if len(parts) != len(states):
        states = [states[0]] * len(parts)
    for part, state in zip(parts, states, strict=True):
        part.assign(_checked(state))


def _checked(state: Any) -> Any:
    """Returns a generator's saved state if the state is a vector.

    TensorFlow would abort the process for a list with more than 254 dimensions.

    Raises:
        ValueError: the state is not a vector.
    """
    if (axes := np.ndim(state)) != 1:
        raise ValueError(f"a generator's state has {axes} dimensions; expected 1")
    return state


SAVED_WHOLE = (tf.train.experimental.PythonState, tf.train.Checkpoint)
_COMPOSITES = (
    tf.RaggedTensor,
    tf.SparseTensor,
    tf.types.experimental.distributed.PerReplica,
)
REPLACED = (tf.Tensor, *_COMPOSITES)
_TABLES = (
    tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
)
ADVICE = (
    "Put variables, models, optimizers and metrics into the tf.train.Checkpoint; the "
    "Checkpoint does not accept a metric of Keras 3: make the metric an attribute of "
    "a model in the Checkpoint (model.mean = mean). Numbers, lists and arrays go "
    "into a named State (tfpreempt.states), or numbers into a tf.Variable."
)
_MAKE_OURS = (
    "TensorFlow cannot save a distributed iterator; create the iterator with "
    "tfpreempt.data.distribute(dataset, strategy), which gives the same batches, and "
    "put this iterator into the "
)


def saved(checkpoint: Any) -> tuple[list[Any], list[Any]]:
    """Returns the objects and variables written by a save of a Checkpoint; and,
    separately, the PythonState objects, of which a save writes the Python attributes.

    Args:
        checkpoint: the Checkpoint; None for no objects.
    """
    if checkpoint is None:
        return [], []
    # TensorFlow's wrapper for a list or dict of a module is saved without the plain
    # values in it.
    attached = attach(checkpoint)
    found = [
        each
        for _, each in (*attached.own, *attached.tracked()[0])
        if not isinstance(each, list | dict)
    ]
    found += _slots(found)
    parts_of = [part for each in found for part in local_parts(each)]
    states = [
        each for each in found if isinstance(each, tf.train.experimental.PythonState)
    ]
    return [*found, *parts_of], states


def _slots(objects: Sequence[Any]) -> list[Any]:
    """Returns the slot variables of old optimizers (tf_keras' legacy optimizers, and
    those of TensorFlow 1) that TensorFlow saves beside the objects of a Checkpoint:
    the slots of the saved variables."""
    found = []
    for optimizer in filter(has_slots, objects):
        for name, variable in itertools.product(optimizer.get_slot_names(), objects):
            with contextlib.suppress(AttributeError, KeyError):
                found.append(optimizer.get_slot(variable, name))
    return [each for each in found if each is not None]


def named_variables(checkpoint: Any, *, with_states: bool) -> Iterator[tuple[str, Any]]:
    """Yields the local variables of a Checkpoint, with their paths, without the
    counters of runs and saves.

    Args:
        checkpoint: the Checkpoint; None for no variables.
        with_states: whether the result includes the iterators of the Checkpoint. No
            State has variables of TensorFlow.
    """
    if checkpoint is not None:
        found = {
            id(part): (path, part)
            for path, each in attach(checkpoint).tracked()[0]
            if path not in COUNTERS
            for part in (
                (each,)
                if with_states and isinstance(each, Iterator)
                else local_parts(each)
            )
        }
        yield from found.values()


def variables(value: Any) -> Sequence[Any]:
    """Returns the local tf.Variables of an object: a variable, model, optimizer, metric
    or random generator. A hash table counts as a variable. Empty for other objects."""
    if isinstance(value, _TABLES):
        return [value]
    # An array of JAX has a property `_value`, which reads the array, and fails if the
    # array was donated.
    if hasattr(type(value), "addressable_shards"):
        return []
    if found := local_parts(value):
        return found
    # The items of a container have locations of their own. TensorFlow's wrappers for
    # lists and dicts of a model have `variables`, which fails with layers of Keras 3.
    if isinstance(value, type | list | tuple | dict):
        return []
    if hasattr(type(value), "variables"):
        try:
            all_of_it = value.variables
            many = all_of_it() if callable(all_of_it) else all_of_it
        except ValueError:  # a layer that is not built yet
            return []
        return [part for each in many for part in local_parts(each)]
    if isinstance(value, tf.random.Generator):
        return local_parts(value.state)
    if isinstance(value, tf.train.ExponentialMovingAverage):
        return [part for each in value._averages.values() for part in local_parts(each)]
    # A SeedGenerator has a `state`. An initializer may have a SeedGenerator as `seed`.
    seed = getattr(value, "__dict__", {}).get("seed")
    states = (getattr(each, "__dict__", {}).get("state") for each in (value, seed))
    return [part for each in states for part in local_parts(each)]


def sample(thing: Any, size: int) -> np.ndarray[Any, Any] | None:
    """Returns about `size` evenly spaced elements of a variable or tensor, or of each
    tensor in a value such as a RaggedTensor, or the values of a hash table; None for
    other objects."""
    if isinstance(thing, _TABLES):
        values: np.ndarray[Any, Any] = np.sort(thing.export()[1].numpy(), axis=None)
        return values
    if isinstance(thing, _COMPOSITES):
        parts = tf.nest.flatten(thing, expand_composites=True)
        found = [part for each in parts if (part := sample(each, size)) is not None]
        # The values and the row splits of a RaggedTensor have different types.
        if len({part.dtype for part in found}) > 1:
            found = [np.frombuffer(raw_bytes(part), np.uint8) for part in found]
        return np.concatenate(found) if found else None
    if not isinstance(thing, tf.Variable | tf.Tensor):
        return None
    flat = tf.reshape(thing, [-1])
    elements: np.ndarray[Any, Any] = flat[:: max(1, len(flat) // size)].numpy()
    return elements


def arrays(thing: Any) -> Sequence[Any]:
    """Returns no arrays: a variable of TensorFlow changes in place."""
    return ()


def with_nan(checkpoint: Any, states: Iterable[Any]) -> Iterator[str]:
    """Yields the floating-point variables of a Checkpoint that contain NaN, by path.
    Leaves out metrics of Keras 3, which never change a weight.

    Args:
        checkpoint: the Checkpoint; None for no variables.
        states: named States, which have no variables.
    """
    named: dict[int, tuple[str, Any]] = {}
    if checkpoint is not None:
        for path, each in attach(checkpoint).tracked()[0]:
            for part in unequal_parts(each):
                if part.dtype.is_floating:
                    named.setdefault(id(part), (path, part))
    found = list(named.values())
    for (path, part), total in zip(
        found, sums([part for _, part in found]), strict=True
    ):
        if not math.isfinite(total) and np.isnan(np.float64(part.numpy())).any():
            yield f"the variable {path!r}"


def hidden_draws(function: Any) -> Sequence[str]:
    """Returns the random ops in the traces of a tf.function whose state cannot be
    saved, such as `tf.random.normal`. Empty for other objects.

    Ops without a seed are left out: two runs of the program differ anyway.
    """
    if not isinstance(function, private_api.polymorphic_function.Function):
        return ()
    private_api.check_available("traced_steps")
    # A method has a function for each object.
    functions = [function, *function._descriptor_cache.values()]
    found = dict[str, None]()
    for each in functions:
        for trace in each._list_all_concrete_functions():
            try:
                nodes = nodes_of(trace.graph)
            except ValueError:  # constants of more than 2 GB
                continue
            # Only random ops with a hidden counter have the attribute seed2. The ops of
            # recurrent layers for a GPU have it too, and draw only for a dropout.
            found |= {
                f"{node.op} ({node.name})": None
                for node in nodes
                if "seed2" in node.attr
                and (node.attr["seed"].i or node.attr["seed2"].i)
                and ("dropout" not in node.attr or node.attr["dropout"].f > 0)
            }
    return list(found)


def restarts(iterator: Any) -> bool:
    """Returns whether an object is a dataset iterator that a restarted run would read
    from the beginning, or a queue. False if the dataset of the iterator skips the
    elements of earlier steps."""
    if isinstance(iterator, tf.queue.QueueBase):
        return True
    found = _datasets(iterator)
    if not found or None in found:
        return False
    return not any(map(_begins_late, parts(*found)))


def advice_on_iterators(unread: Mapping[str, Any]) -> str:
    """Returns text for people: the consequences and the remedy for iterators whose
    position is not saved.

    Args:
        unread: iterators for which `restarts` is true, by name.
    """
    if any(isinstance(each, tf.queue.QueueBase) for each in unread.values()):
        return (
            "A queue of TensorFlow cannot be saved, so it has its initial contents "
            "after a restart; keep the contents in a tf.Variable."
        )
    if all(reads_data_service(*_datasets(each)) for each in unread.values()):
        return f"{KEEP_SERVICE_OUT}."
    # TensorFlow cannot save the position of its own distributed iterator.
    is_theirs = any(
        isinstance(each, tf.distribute.DistributedIterator)
        and not isinstance(each, private_api.trackable_base.Trackable)
        for each in unread.values()
    )
    return (
        "A restarted run reads them from the beginning. "
        + (_MAKE_OURS if is_theirs else "Put the iterator into the ")
        + (
            "tf.train.Checkpoint, or skip the batches already read: "
            "iter(dataset.skip(handler.total_run_calls))."
        )
    )


def _datasets(iterator: Any) -> list[Any]:
    """Returns the datasets that a dataset iterator reads; empty for other objects."""
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return [
            getattr(each, "iterator", each)._dataset for each in iterator._iterators
        ]
    if isinstance(iterator, tf.data.Iterator | tf.data.NumpyIterator):
        return [getattr(iterator, "_iterator", iterator)._dataset]
    return []


def _begins_late(dataset: Any) -> bool:
    """Returns whether a dataset skips elements at its beginning, because the program
    itself skips the elements of earlier steps."""
    kind = type(dataset).__name__
    return kind == "_SkipDataset" or (kind == "_RangeDataset" and dataset._start != 0)
