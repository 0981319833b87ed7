"""Adapter: the global random generator of Keras 3, if Keras does not use TensorFlow.

If Keras uses TensorFlow, the adapter in `tensors/program_values.py` saves the generator
of every replica. This module imports neither Keras nor JAX.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tfpreempt.core import private_api

_GENERATOR = "global_seed_generator"
_KEY = "keras_seed"


def record() -> dict[str, Any]:
    """Returns the state of the generator, JSON-able; empty if Keras uses TensorFlow or
    is not imported."""
    keras = _keras()
    if keras is None:
        return {}
    generator = keras.global_state.get_global_attribute(_GENERATOR)
    if generator is None:  # made by Keras at the first draw without a seed
        return {_KEY: None}
    return {_KEY: [np.asarray(generator.state.value).tolist()]}


def load(saved: Any) -> None:
    """Sets the generator to a state in a commit. Does nothing if Keras uses TensorFlow.

    Args:
        saved: result of `record`, here or in `tensors/program_values.py`.
    """
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
    """Does nothing on a new worker, because layers must draw the same random numbers on
    every worker."""


def _keras() -> Any | None:
    """Returns Keras' module of seed generators; None if Keras uses TensorFlow or is not
    imported."""
    keras = sys.modules.get(private_api.MODULES["keras_seeds"])
    return None if keras is None or keras.backend.backend() == "tensorflow" else keras
