"""Named States: ready-made classes, and functions that save and load States.

Each name is imported at its first use, so a program without TensorFlow does not import
TensorFlow. `PyTreeState` is in tfpreempt/jax.

api                save_all_states(), save_state() and load_state()
loaders            a ready-made State for the position of a data loader, such as Grain's
random_states      ready-made States for the random generators of Python and NumPy
standalone         commits of named States without a handler, and without TensorFlow
standalone_mirror  the mirror of a program without a handler
tensorflow_states  ready-made States for TensorFlow's generators and dataset iterators
values             ready-made States for plain values: a step, JSON values, arrays

Imported by cli, keras, tfpreempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpreempt.core.lazy_import import loader

if TYPE_CHECKING:
    from tfpreempt.checkpoint.state.state import State
    from tfpreempt.core.restarts import num_restarts
    from tfpreempt.jax.pytree_state import PyTreeState
    from tfpreempt.states.api import load_state, save_all_states, save_state
    from tfpreempt.states.loaders import LoaderState
    from tfpreempt.states.random_states import NumpyRandomState, PythonRandomState
    from tfpreempt.states.tensorflow_states import (
        DatasetIteratorState,
        TensorFlowRandomState,
    )
    from tfpreempt.states.values import ArrayDictState, JsonState, StepCounter

__all__ = [
    "ArrayDictState",
    "DatasetIteratorState",
    "JsonState",
    "LoaderState",
    "NumpyRandomState",
    "PyTreeState",
    "PythonRandomState",
    "State",
    "StepCounter",
    "TensorFlowRandomState",
    "load_state",
    "num_restarts",
    "save_all_states",
    "save_state",
]

_HOMES = {
    "State": "tfpreempt.checkpoint.state.state",
    "num_restarts": "tfpreempt.core.restarts",
    "save_all_states": "tfpreempt.states.api",
    "save_state": "tfpreempt.states.api",
    "load_state": "tfpreempt.states.api",
    "StepCounter": "tfpreempt.states.values",
    "JsonState": "tfpreempt.states.values",
    "ArrayDictState": "tfpreempt.states.values",
    "PyTreeState": "tfpreempt.jax.pytree_state",
    "PythonRandomState": "tfpreempt.states.random_states",
    "NumpyRandomState": "tfpreempt.states.random_states",
    "LoaderState": "tfpreempt.states.loaders",
    "TensorFlowRandomState": "tfpreempt.states.tensorflow_states",
    "DatasetIteratorState": "tfpreempt.states.tensorflow_states",
}
__getattr__ = loader(__name__, _HOMES)
