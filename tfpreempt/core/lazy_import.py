"""Public names that are loaded on first use, and the error for a missing TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from tfpreempt import errors


def load(module: str) -> ModuleType:
    """Imports a module of tfpreempt.

    Raises:
        TensorFlowMissingError: the module needs TensorFlow, which is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise errors.TensorFlowMissingError(f"{module} {WANTED}") from error


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Returns the `__getattr__` of a package whose names are loaded on first use.

    Args:
        package: name of the package.
        homes: for every public name, the module to import; a public module is its own
            home.
    """

    def load_name(name: str) -> object:
        """Loads a public name on first use, and stores the value in the package."""
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; its public names are "
                f"{', '.join(sorted(homes))}"
            )
        home = load(homes[name])
        is_module = homes[name].endswith(f".{name}")
        value: object = home if is_module else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    return load_name


def has_tensorflow() -> bool:
    """Returns whether TensorFlow is installed, without importing TensorFlow."""
    return importlib.util.find_spec("tensorflow") is not None


def to_install(extra: str) -> str:
    """Returns the command that installs an extra.

    The command needs a clone of the repository: no package index has tfpreempt.
    """
    return f"pip install '.[{extra}]' in a clone of tfpreempt"


WANTED = (
    f"needs TensorFlow, and there is none for {sys.executable}. The base install "
    f"leaves the choice to you: {to_install('tensorflow')}, or [and-cuda] for "
    "NVIDIA GPUs, [tensorflow-tpu] with libtpu==0.0.14 for TPU VMs, [tensorflow-cpu] "
    "for the smaller wheel without GPUs."
)
"""Message of an error or the command line, after the name of the feature."""
