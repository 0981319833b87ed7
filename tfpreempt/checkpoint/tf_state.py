"""What is read out of TensorFlow: values that need peers, and per-worker States.

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
import json
import logging
import random
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values as _values
from tensorflow.python.eager import context as _context
from tensorflow.python.ops import stateful_random_ops as _stateful_random
from tensorflow.python.trackable import trackable_utils as _trackable_utils
from tensorflow.python.training.saving import saveable_object as _saveable_object
from tensorflow.python.util import object_identity as _object_identity

from tfpreempt import errors
from tfpreempt.checkpoint.encoding import (
    check_bit_generator,
    decode,
    encode,
    read_parts,
    readable,
    write_parts,
)
from tfpreempt.checkpoint.state import State
from tfpreempt.tensorflow_side import out_of_scope

_log = logging.getLogger(__name__)

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


def variable_shape(obj: Any) -> tuple[int | None, ...] | None:
    """The shape of a variable of TensorFlow or Keras; None for other objects."""
    is_variable = isinstance(obj, tf.Variable) or distributed(obj) is not None
    is_keras = hasattr(obj, "_serialize_to_tensors") and hasattr(obj, "_value")
    if not (is_variable or is_keras) or not hasattr(obj, "dtype"):
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
    """The generators of Python, NumPy (legacy, global) and TensorFlow.

    Of TensorFlow: the global `tf.random.Generator` if the program made one (it is never
    made here), and the seed from which eager ops draw theirs. Ops with a seed of their
    own, and random ops inside a tf.function, keep their state in kernels where nobody
    can read it.
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
    }


def load_tensorflow_record(record: Any) -> None:
    """Sets TensorFlow's generators to what `tensorflow_record` gave."""
    if record["tf_seed"] is not None and record["tf_rng"] is not None:
        eager = _context.context()
        eager._set_global_seed(record["tf_seed"])
        eager._rng.setstate(decode(record["tf_rng"]))
    if record["tf_generator"] is not None:
        _load_generator(record["tf_generator"])


def is_seeded() -> bool:
    """Whether the program has set a global seed (`tf.random.set_seed`)."""
    return _context.global_seed() is not None


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


# --- per-replica values --------------------------------------------------------------


class PerReplicaState(State):
    """What each local replica holds of every ON_READ variable of a checkpoint.

    TensorFlow saves the reduced value and hands back equal shares of it; totals that go
    on from those differ in the last bits. So the parts themselves are kept, and are
    assigned after the ordinary restore.
    """

    _is_reserved = True

    def __init__(
        self, checkpoint: tf.train.Checkpoint, name: str = "tfpreempt.per_replica"
    ) -> None:
        super().__init__(name, per_worker=True, registry=None)
        self._checkpoint = checkpoint

    def variables(self) -> Iterator[tuple[str, Any]]:
        """Path and variable of every ON_READ variable, in a fixed order."""
        for path, obj in walk(self._checkpoint):
            if is_on_read(obj):
                yield path, distributed(obj)

    def is_wanted(self) -> bool:
        return any(True for _ in self.variables())

    def save(self, fileobj: IO[bytes]) -> None:
        header, parts = [], []
        for path, variable in self.variables():
            arrays = [component.numpy() for component in variable.values]
            header.append(
                {
                    "path": path,
                    "dtype": variable.dtype.name,
                    "shapes": [array.shape for array in arrays],
                }
            )
            parts += [array.tobytes() for array in arrays]
        write_parts(fileobj, header, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        saved: dict[str, list[np.ndarray[Any, Any]]] = {}
        left = iter(parts)
        for entry in header:
            dtype = tf.as_dtype(entry["dtype"]).as_numpy_dtype
            saved[entry["path"]] = [
                np.frombuffer(next(left), dtype).reshape(shape)
                for shape in entry["shapes"]
            ]
        for path, variable in self.variables():
            self._assign(path, variable, saved.get(path))

    def _assign(
        self, path: str, variable: Any, arrays: list[np.ndarray[Any, Any]] | None
    ) -> None:
        components = tuple(variable.values)
        if arrays is None:
            return  # newer than the checkpoint, as the ordinary restore found as well
        if len(arrays) != len(components):
            _log.warning(
                "%s has %d local replicas here, the checkpoint has %d: its reduced "
                "value is used, so totals may differ in the last bits.",
                path,
                len(components),
                len(arrays),
            )
            return
        for component, array in zip(components, arrays, strict=True):
            with tf.device(component.device):
                component.assign(tf.constant(array, dtype=variable.dtype))
