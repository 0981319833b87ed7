"""The random generators of a process: each worker saves its own.

Files hold JSON and raw bytes only, no pickles, and come back bit for bit.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import logging
import random
import sys
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.encoding import (
    check_bit_generator,
    decode,
    encode,
    readable,
)
from tfpreempt.checkpoint.resized import derived_seed, own_or_first
from tfpreempt.checkpoint.state import State
from tfpreempt.checkpoint.variables import local_parts, out_of_scope, walk
from tfpreempt.core import seams

_log = logging.getLogger(__name__)
_KERAS_GENERATOR = "global_seed_generator"  # a constant of its own since Keras 3.13


class RandomState(State):
    """The generators of Python, NumPy (legacy, global), TensorFlow and Keras 3.

    Of TensorFlow: the global `tf.random.Generator` if the program made one (it is never
    made here), and the seed from which eager ops draw theirs. Ops with a seed of their
    own, and random ops inside a tf.function, keep their state in kernels where nobody
    can read it. Of Keras 3: what `keras.random` draws from without a seed.
    """

    _is_reserved = True

    def __init__(self) -> None:
        super().__init__("tfpreempt.random", per_worker=True, registry=None)

    def save(self, fileobj: IO[bytes]) -> None:
        record = {
            "python": encode(random.getstate()),
            "numpy": encode(np.random.get_state(legacy=False)),
            **tensorflow_record(),
        }
        fileobj.write(json.dumps(record).encode())

    def fold(self, files: Sequence[IO[bytes] | None], worker: int, world: int) -> None:
        """A new worker has the same generators as the others had, where those were all
        the same: what is drawn from them, such as the order of a PyDataset, must be the
        same everywhere. Those that were not are derived from the chief's."""
        mine, is_another = own_or_first(files, worker)
        own = mine.read()
        self.load(io.BytesIO(own))
        if not is_another:
            return
        seed = derived_seed(own, worker)
        rest = [file for file in files if file is not None and file is not mine]
        with readable(self):
            first, *others = map(json.loads, [own, *(file.read() for file in rest)])
            differing = {
                name for each in others for name in each if each[name] != first[name]
            }
        if "python" in differing:
            random.seed(seed)
        if "numpy" in differing:
            np.random.seed(list(seed.to_bytes(16, "little")))
        if differing - {"python", "numpy"}:
            reseed_tensorflow(seed)

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
    eager = seams.eager_context.context()
    rng = getattr(eager, "_rng", None)
    seed = eager._seed
    of_keras, keras = None, sys.modules.get(seams.MODULES["keras_seeds"])
    if keras is not None:  # what its ops without a seed draw from, once one has drawn
        of_keras = keras.global_state.get_global_attribute(_KERAS_GENERATOR)
    states = () if of_keras is None else local_parts(of_keras.state)
    return {
        "tf_seed": None if seed is None else int(np.array(seed)),
        "tf_rng": None if rng is None else encode(rng.getstate()),
        "tf_generator": generator_record(seams.stateful_random_ops.global_generator),
        "keras_seed": [state.numpy().tolist() for state in states] or None,
    }


def load_tensorflow_record(record: Any) -> None:
    """Sets TensorFlow's generators to what `tensorflow_record` gave."""
    if record["tf_seed"] is not None and record["tf_rng"] is not None:
        eager = seams.eager_context.context()
        eager._set_global_seed(record["tf_seed"])
        eager._rng.setstate(decode(record["tf_rng"]))
    if record["tf_generator"] is not None:
        _load_generator(record["tf_generator"])
    if record.get("keras_seed") is not None:  # older commits have none
        _load_keras_record(record["keras_seed"])


def reseed_tensorflow(seed: int) -> None:
    """Lets eager ops, and the global `tf.random.Generator`, draw others than before.

    The global seed itself stays: all workers have the same. So does the seed of Keras,
    whose layers draw the same on all replicas.
    """
    eager = seams.eager_context.context()
    if getattr(eager, "_rng", None) is not None:
        eager._rng.seed(seed)
    if (generator := seams.stateful_random_ops.global_generator) is not None:
        generator.reset_from_seed(seed % 2**63)


def is_seeded() -> bool:
    """Whether the program has set a global seed (`tf.random.set_seed`)."""
    return seams.eager_context.global_seed() is not None


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


def _load_keras_record(seeds: Any) -> None:
    if (keras := sys.modules.get(seams.MODULES["keras_seeds"])) is None:
        return  # this program has not imported Keras
    state = keras.global_state
    if state.get_global_attribute(_KERAS_GENERATOR) is None:
        # The saved program had one. Made with a seed, it draws none from Python's.
        make = functools.partial(keras.SeedGenerator, 0)
        state.set_global_attribute(_KERAS_GENERATOR, out_of_scope(make))
    _assign(state.get_global_attribute(_KERAS_GENERATOR), seeds)


def generator_record(generator: Any) -> Any:
    """The state of a `tf.random.Generator`, JSON-able; None for None."""
    if generator is None:
        return None
    components = local_parts(generator.state)
    return {
        "algorithm": int(generator.algorithm),
        "states": [encode(component.numpy()) for component in components],
    }


def _load_generator(record: Any) -> None:
    if (generator := seams.stateful_random_ops.global_generator) is not None:
        load_generator_record(generator, record)
        return
    # The saved program had one, so this one will ask for it.
    state, algorithm = decode(record["states"][0]), record["algorithm"]
    make = functools.partial(tf.random.Generator.from_state, state, alg=algorithm)
    tf.random.set_global_generator(out_of_scope(make))


def load_generator_record(generator: Any, record: Any) -> None:
    """Sets a `tf.random.Generator` to what `generator_record` gave."""
    _assign(generator, [decode(state) for state in record["states"]])


def _assign(generator: Any, states: list[Any]) -> None:
    """Of other numbers of replicas than here all get what the first one had."""
    parts = local_parts(generator.state)
    if len(parts) != len(states):
        states = [states[0]] * len(parts)
    for part, state in zip(parts, states, strict=True):
        part.assign(state)
