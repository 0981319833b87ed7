"""What is read out of TensorFlow: values that need peers, and random generators.

An ON_READ variable is reduced across all workers when it is read, so a save needs every
worker at once, in the same order. The order is equal by construction: all workers call
the same `_gather_serialized_tensors` of the checkpoint's saver, and directly behind it
the same loop turns every value that may need peers into a plain tensor. The chief goes
on to write those tensors; the others stop there. TensorFlow itself would evaluate the
same callables while it writes, in an order that depends on devices.

RNGs and per-replica values differ between workers, so each worker saves its own. Their
files hold JSON and raw bytes only, no pickles, and come back bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values as _values
from tensorflow.python.eager import context as _context
from tensorflow.python.ops import stateful_random_ops as _stateful_random
from tensorflow.python.trackable import trackable_utils as _trackable_utils
from tensorflow.python.training.saving import saveable_object as _saveable_object
from tensorflow.python.util import object_identity as _object_identity

from tfpreempt import errors
from tfpreempt.checkpoint import structure
from tfpreempt.checkpoint.encoding import (
    check_bit_generator,
    decode,
    encode,
    readable,
)
from tfpreempt.checkpoint.state import State

_log = logging.getLogger(__name__)
T = TypeVar("T")
_KERAS_SEEDS = "keras.src.random.seed_generator"  # in sys.modules once Keras 3 is used

# --- finding things in a checkpoint's object graph -----------------------------------


def walk(checkpoint: tf.train.Checkpoint) -> list[tuple[str, Any]]:
    """Every object that a checkpoint reaches, with its path, in a fixed order.

    The order and the paths are those of TensorFlow's own save, so they are the same on
    all workers and after a restart.
    """
    view = checkpoint._saver._graph_view
    objects, paths = view.breadth_first_traversal()
    return [(_trackable_utils.object_path_to_string(paths[o]), o) for o in objects]


def distributed(obj: Any) -> Any | None:
    """The distributed variable that an object is or wraps; or None."""
    for attribute in (None, "_value", "_variable"):
        candidate = obj if attribute is None else getattr(obj, attribute, None)
        if isinstance(candidate, _values.DistributedVariable):
            return candidate
    return None


def is_on_read(obj: Any) -> bool:
    """Whether an object is, or wraps, a variable that is reduced when it is read."""
    variable = distributed(obj)
    return (
        variable is not None
        and variable.synchronization == tf.VariableSynchronization.ON_READ
    )


def local_parts(variable: Any) -> tuple[Any, ...]:
    """The local tf.Variables of a variable of TensorFlow or Keras; none for others."""
    found = distributed(variable)
    if found is not None:
        return tuple(found.values)
    inner = getattr(variable, "_value", variable)
    return (inner,) if isinstance(inner, tf.Variable) else ()


def variable_shape(obj: Any) -> tuple[int | None, ...] | None:
    """The shape of a variable of TensorFlow or Keras; None for other objects."""
    is_variable = isinstance(obj, tf.Variable) or distributed(obj) is not None
    if not is_variable and not hasattr(type(obj), "_deferred_initialize"):
        return None
    shape = tf.TensorShape(obj.shape)
    return None if shape.rank is None else tuple(shape.as_list())


def plain_message(error: tf.errors.OpError) -> str:
    """What an op's error says, without the names of ops and nodes."""
    return str(error.message).rpartition("}} ")[2].split(" [Op:")[0].strip()


# --- restoring -----------------------------------------------------------------------


def explain_later_mismatches(status: Any, prefix: str) -> None:
    """Layers that are built later are restored then; a mismatch gets a clear error."""
    coordinator = getattr(status, "_checkpoint", None)
    inner = getattr(coordinator, "restore_saveables", None)
    if coordinator is None or inner is None:
        return

    def restore_saveables(saveables: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(saveables, *args, **kwargs)
        except (ValueError, tf.errors.OpError) as error:
            names = ", ".join(sorted(map(str, saveables)))
            raise errors.CheckpointMismatchError(
                f"A layer that was built after the restore doesn't fit the checkpoint "
                f"{prefix!r}: {names}: {error}"
            ) from error

    coordinator.restore_saveables = restore_saveables


class _Bound(weakref.WeakValueDictionary[int, Any]):
    """The objects of a restored checkpoint by node, as TensorFlow matches them.

    A Keras 3 model without a `build` of its own is traced to make its variables, and
    they have no value yet when they are matched; to restore one then fails, which
    Keras takes for its own trouble and goes on with a fresh value. So such a variable
    gets the saved value as its first.

    Args:
        coordinator: of the restore, whose objects these are.
        prefix: the checkpoint.
    """

    def __init__(self, coordinator: Any, prefix: str) -> None:
        super().__init__(coordinator.object_by_proto_id)
        self._uid = coordinator.restore_uid
        self._graph = coordinator.object_graph_proto
        self._prefix = prefix

    def __setitem__(self, node: int, matched: Any) -> None:
        key = structure.saved_key(self._graph, node)
        is_of_keras = hasattr(type(matched), "_deferred_initialize")
        if key is not None and is_of_keras and matched._value is None:
            matched._initializer = functools.partial(self._read, key)
            matched._update_uid = self._uid  # there is nothing left to restore
        super().__setitem__(node, matched)

    def _read(self, key: str, shape: Any, dtype: Any) -> Any:
        reader = tf.compat.v1.train.NewCheckpointReader(self._prefix)
        value = tf.constant(reader.get_tensor(key))
        if (tuple(value.shape), value.dtype) != (tuple(shape), tf.as_dtype(dtype)):
            raise errors.CheckpointMismatchError(
                f"A layer that was built after the restore doesn't fit the checkpoint: "
                f"{key} has shape {value.shape} and type {value.dtype.name} there, and "
                f"{shape} and {dtype} here"
            )
        return value


def restore_while_traced(status: Any, prefix: str) -> None:
    """Variables that Keras makes later, while it traces a model, are restored then."""
    if (coordinator := getattr(status, "_checkpoint", None)) is not None:
        coordinator.object_by_proto_id = _Bound(coordinator, prefix)


# --- the collective read -------------------------------------------------------------


@contextlib.contextmanager
def gathering(checkpoint: tf.train.Checkpoint) -> Iterator[None]:
    """Makes the checkpoint's saver evaluate what needs peers as soon as it gathers.

    It gathers once, whatever happens: at the end, or when the body fails, unless the
    body has done so already.
    """
    saver = checkpoint._saver
    gather = saver._gather_serialized_tensors
    calls: list[None] = []

    def gather_and_evaluate(object_graph_tensor: Any = None) -> Any:
        calls.append(None)
        tensors, *others = gather(object_graph_tensor)
        return _evaluate(tensors), *others

    def take_part() -> None:
        if not calls:
            saver._gather_serialized_tensors()

    saver._gather_serialized_tensors = gather_and_evaluate
    try:
        yield
    except Exception:
        # The peers are in the collective read, or about to enter it, and would wait.
        try:
            take_part()
        except Exception as error:  # noqa: BLE001  (the body's error counts)
            _log.warning("The collective read failed as well: %s", error)
        raise
    else:
        take_part()
    finally:
        del saver._gather_serialized_tensors  # uncovers the class's own


def _evaluate(tensors: Any) -> Any:
    """Replaces every value that may need peers by a tensor, in the given order."""
    evaluated = _object_identity.ObjectIdentityDictionary()
    for owner, values in tensors.items():
        evaluated[owner] = {
            key: (
                {spec: _value(owner, value) for spec, value in slices.items()}
                if isinstance(slices, dict)
                else _value(owner, slices)
            )
            for key, slices in values.items()
        }
    return evaluated


def _value(owner: Any, value: Any) -> Any:
    if not _may_need_peers(owner, value):
        return value
    is_spec = isinstance(value, _saveable_object.SaveSpec)
    with tf.device(value.device if is_spec else None):
        return tf.convert_to_tensor(value.tensor if is_spec else value)


def _may_need_peers(owner: Any, value: Any) -> bool:
    """Known to be local: tensors, plain variables, mirrored ones. All else may not."""
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return False
    variable = distributed(value)
    if variable is None:
        variable = distributed(getattr(owner, "obj", owner))
    if variable is not None:
        return is_on_read(variable)
    is_lazy = isinstance(value, _saveable_object.SaveSpec) and callable(value._tensor)
    return is_lazy and not isinstance(getattr(owner, "obj", owner), tf.Variable)


# --- random number generators --------------------------------------------------------


class RandomState(State):
    """The generators of Python, NumPy (legacy, global), TensorFlow and Keras 3.

    Of TensorFlow: the global `tf.random.Generator` if the program made one (it is never
    made here), and the seed from which eager ops draw theirs. Ops with a seed of their
    own, and random ops inside a tf.function, keep their state in kernels where nobody
    can read it. Of Keras 3: what `keras.random` draws from without a seed.
    """

    _is_reserved = True

    def __init__(self, name: str = "tfpreempt.random") -> None:
        super().__init__(name, per_worker=True, registry=None)

    def save(self, fileobj: IO[bytes]) -> None:
        record = {
            "python": encode(random.getstate()),
            "numpy": encode(np.random.get_state(legacy=False)),
            **tensorflow_record(),
        }
        fileobj.write(json.dumps(record).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            record = json.load(fileobj)
            generator = decode(record["numpy"])
            check_bit_generator(generator)
            random.setstate(decode(record["python"]))
            np.random.set_state(generator)
            load_tensorflow_record(record)


def tensorflow_record() -> dict[str, Any]:
    """TensorFlow's generators, JSON-able; `load_tensorflow_record` sets them back."""
    eager = _context.context()
    rng = getattr(eager, "_rng", None)
    seed = eager._seed
    return {
        "tf_seed": None if seed is None else int(np.array(seed)),
        "tf_rng": None if rng is None else encode(rng.getstate()),
        "tf_generator": generator_record(_stateful_random.global_generator),
        "keras_seed": _keras_record(),
    }


def load_tensorflow_record(record: Any) -> None:
    """Sets TensorFlow's generators to what `tensorflow_record` gave."""
    if record["tf_seed"] is not None and record["tf_rng"] is not None:
        eager = _context.context()
        eager._set_global_seed(record["tf_seed"])
        eager._rng.setstate(decode(record["tf_rng"]))
    if record["tf_generator"] is not None:
        _load_generator(record["tf_generator"])
    if record.get("keras_seed") is not None:  # older commits have none
        _load_keras_record(record["keras_seed"])


def is_seeded() -> bool:
    """Whether the program has set a global seed (`tf.random.set_seed`)."""
    return _context.global_seed() is not None


def warn_of_kernels(checkpoint: tf.train.Checkpoint) -> None:
    """Names the layers of tf_keras that keep random state where nobody can read it."""
    # A variable that is asked for what it has not got reads its value to look there,
    # which for an ON_READ one is a collective that no other worker takes part in.
    lost = [
        path
        for path, obj in walk(checkpoint)
        if getattr(
            inspect.getattr_static(obj, "_random_generator", None), "_rng_type", None
        )
        == "legacy_stateful"
    ]
    if lost:
        _log.warning(
            "tfpreempt: the layers %s of tf_keras draw random numbers from ops whose "
            "state cannot be saved: after a restart they draw others than an "
            "undisturbed run. Call tf_keras.backend.experimental."
            "enable_tf_random_generator() before the model is made.",
            ", ".join(lost),
        )


def _keras_record() -> Any:
    """Keras 3's generator for ops without a seed; None where it was not used."""
    if (keras := sys.modules.get(_KERAS_SEEDS)) is None:
        return None
    generator = keras.global_state.get_global_attribute(keras.GLOBAL_SEED_GENERATOR)
    if generator is None:
        return None
    return [part.numpy().tolist() for part in local_parts(generator.state)]


def _load_keras_record(seeds: Any) -> None:
    if (keras := sys.modules.get(_KERAS_SEEDS)) is None:
        return  # this program has not imported Keras
    name, state = keras.GLOBAL_SEED_GENERATOR, keras.global_state
    if state.get_global_attribute(name) is None:
        # The saved program had one. Made with a seed, it draws none from Python's.
        make = functools.partial(keras.SeedGenerator, 0)
        state.set_global_attribute(name, out_of_scope(make))
    parts = local_parts(state.get_global_attribute(name).state)
    if len(parts) != len(seeds):
        seeds = [seeds[0]] * len(parts)
    for part, seed in zip(parts, seeds, strict=True):
        part.assign(seed)


def generator_record(generator: Any) -> Any:
    """The state of a `tf.random.Generator`, JSON-able; None for None."""
    if generator is None:
        return None
    components = _components(generator.state)
    return {
        "algorithm": int(generator.algorithm),
        "states": [encode(component.numpy()) for component in components],
    }


def _load_generator(record: Any) -> None:
    generator = _stateful_random.global_generator
    if generator is None:
        # The saved program had one, so this one will ask for it.
        state = decode(record["states"][0])
        make = functools.partial(
            tf.random.Generator.from_state, state, alg=record["algorithm"]
        )
        tf.random.set_global_generator(out_of_scope(make))
        return
    load_generator_record(generator, record)


def load_generator_record(generator: Any, record: Any) -> None:
    """Sets a `tf.random.Generator` to what `generator_record` gave."""
    states = [decode(state) for state in record["states"]]
    components = _components(generator.state)
    if len(components) != len(states):
        states = [states[0]] * len(components)
    for component, state in zip(components, states, strict=True):
        component.assign(state)


def _components(variable: Any) -> tuple[Any, ...]:
    found = distributed(variable)
    return (variable,) if found is None else tuple(found.values)


# --- variables of ours ---------------------------------------------------------------


def out_of_scope(make: Callable[[], T]) -> T:
    """Makes a variable of ours outside any strategy's scope that the caller is in.

    In the scope of MultiWorkerMirroredStrategy a variable is made by a broadcast from
    worker 0, so all would have to make it at the same moment, and no wait of one worker
    for another could come between. A scope belongs to the thread that entered it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
