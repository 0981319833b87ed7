"""Adapter: the global random generator of Keras 3, on a backend without tf.Variables.

On TensorFlow the adapter in `tensors/program_values.py` saves the generator, replica by
replica. The module imports neither Keras nor JAX.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tfpreempt.core import private_api

_GENERATOR = "global_seed_generator"
_KEY = "keras_seed"


def record() -> dict[str, Any]:
    """Returns the state of the generator, JSON-able; empty on TensorFlow."""
    keras = _keras()
    if keras is None:
        return {}
    generator = keras.global_state.get_global_attribute(_GENERATOR)
    if generator is None:  # made by Keras at the first draw without a seed
        return {_KEY: None}
    return {_KEY: [np.asarray(generator.state.value).tolist()]}


def load(saved: Any) -> None:
    """Sets the generator to the state returned by `record`, also on TensorFlow."""
    keras, states = _keras(), saved.get(_KEY)
    if keras is None or states is None:
        return
    generator = keras.global_state.get_global_attribute(_GENERATOR)
    if generator is None:
        # With a given seed, the new generator draws no seed from Python's generator.
        generator = keras.SeedGenerator(0)
        keras.global_state.set_global_attribute(_GENERATOR, generator)
    generator.state.assign(np.asarray(states[0], generator.state.dtype))


def reseed(seed: int) -> None:
    """Does nothing: layers must draw the same numbers on every worker."""


def _keras() -> Any | None:
    """Returns Keras' module of seed generators; None on TensorFlow or without Keras."""
    keras = sys.modules.get(private_api.MODULES["keras_seeds"])
    return None if keras is None or keras.backend.backend() == "tensorflow" else keras
