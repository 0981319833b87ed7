"""The adapters of the frameworks TensorFlow and JAX, chosen in one place.

Most of tfpreempt does not depend on a framework. A few questions have a different
answer for every framework: the state of the random generators, the meaning of errors,
the values of objects, the form of checkpoints, the coordination service. An adapter is
a module that answers one question for one framework. The module that asks the question
defines the functions of the adapter. `ADAPTERS` lists the adapters; they are imported
only through this module.

Questions: "generators" and "values" (`checkpoint/state/`), "checkpoints"
(`checkpoint/restore/opening.py`), "errors" (`handler/training_end.py`), "coordination"
(`coordination/key_value_store.py`), and "compile_cache" (`handler/registration.py`).

An adapter is used only after the program has imported the framework. Before the import,
the program has no generator, error or object of the framework. The program may import
the framework at any time, so call `adapters` at each use, and do not keep its result.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tfpreempt.core import lazy_import

ADAPTERS: dict[str, dict[str, str]] = {
    "tensorflow": {
        "generators": "tfpreempt.checkpoint.tensors.program_values",
        "values": "tfpreempt.checkpoint.tensors.program_values",
        "checkpoints": "tfpreempt.checkpoint.tensors.tensor_contents",
        "errors": "tfpreempt.handler.tensorflow_adapter",
        "coordination": "tfpreempt.handler.tensorflow_adapter",
    },
    "jax": {
        "generators": "tfpreempt.checkpoint.state.keras_generator",
        "checkpoints": "tfpreempt.checkpoint.state.array_contents",
        "errors": "tfpreempt.jax.distributed",
        "coordination": "tfpreempt.jax.distributed",
        "values": "tfpreempt.jax.values",
        "compile_cache": "tfpreempt.jax.compile_cache",
    },
}
"""For every framework (by its package name): the adapter module for every question."""


def is_imported(framework: str) -> bool:
    """Returns whether the program has imported a framework; imports nothing."""
    return sys.modules.get(framework) is not None


def adapters(question: str) -> list[Any]:
    """Returns the adapters of the frameworks that the program has imported.

    Args:
        question: the question that the adapters answer: an inner key of `ADAPTERS`,
            such as "errors".
    """
    return [
        importlib.import_module(modules[question])
        for framework, modules in ADAPTERS.items()
        if question in modules and is_imported(framework)
    ]


def adapter(framework: str, question: str) -> Any:
    """Returns the adapter of one framework, and imports the framework.

    Args:
        framework: package name of the framework, a key of `ADAPTERS`.
        question: the question that the adapter answers, see `adapters`.

    Raises:
        TensorFlowMissingError: the framework is not installed.
    """
    return lazy_import.load(ADAPTERS[framework][question])
