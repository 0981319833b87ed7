"""The adapters of a program's frameworks, chosen in one place.

The core saves, agrees, exits and resumes in a program with any framework. A few
questions have a different answer for each framework: the state of the random
generators, the meaning of errors, the values of objects, the form of checkpoints, the
coordination service. The module that asks defines the interface. The modules with the
answers are in `ADAPTERS`, and the core imports the modules in no other way.

An adapter is imported once the program has imported the framework: before, the program
has no generator, no error and no object of the framework. So an adapter is called when
its answer is needed, and no answer is kept.
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
}
"""Adapter modules of each framework, by the name of the framework's package."""


def is_imported(framework: str) -> bool:
    """Returns whether the program has imported a framework; imports nothing."""
    return sys.modules.get(framework) is not None


def adapters(question: str) -> list[Any]:
    """Returns the adapters of the frameworks that the program has imported.

    Args:
        question: key of the adapters in `ADAPTERS`. The module that asks defines the
            interface.
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
        question: key of the adapter, see `adapters`.

    Raises:
        TensorFlowMissingError: the framework is not installed.
    """
    return lazy_import.load(ADAPTERS[framework][question])
