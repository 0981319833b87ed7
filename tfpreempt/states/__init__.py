"""Named States: saving and loading them from programs, and the ready-made ones.

The names are loaded on first use, so that a program without TensorFlow stays without.

alone              commits of named States without a handler, and without TensorFlow
copies             what a program without a handler has in an object store: it looks
generators         ready-made States for the random generators of Python and NumPy
loaders            a ready-made State for loaders that know their place, such as Grain's
registered         save_all_states(), save_state() and load_state()
tensorflow_states  ready-made States for TensorFlow's random generators and dataset
values             ready-made States for plain values: a step, anything JSON-able

Imported by keras, tfpreempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpreempt.core.loading import loader

if TYPE_CHECKING:
    from tfpreempt.checkpoint.state.state import State
    from tfpreempt.core.restarts import num_restarts
    from tfpreempt.states.generators import NumpyRandomState, PythonRandomState
    from tfpreempt.states.loaders import LoaderState
    from tfpreempt.states.registered import load_state, save_all_states, save_state
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
    "save_all_states": "tfpreempt.states.registered",
    "save_state": "tfpreempt.states.registered",
    "load_state": "tfpreempt.states.registered",
    "StepCounter": "tfpreempt.states.values",
    "JsonState": "tfpreempt.states.values",
    "ArrayDictState": "tfpreempt.states.values",
    "PythonRandomState": "tfpreempt.states.generators",
    "NumpyRandomState": "tfpreempt.states.generators",
    "LoaderState": "tfpreempt.states.loaders",
    "TensorFlowRandomState": "tfpreempt.states.tensorflow_states",
    "DatasetIteratorState": "tfpreempt.states.tensorflow_states",
}
__getattr__ = loader(__name__, _HOMES)
