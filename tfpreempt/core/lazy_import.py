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

    Args:
        module: full name of the module.

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
    """Returns a `__getattr__` for a package that loads its public names on first use.

    Args:
        package: name of the package.
        homes: for every public name, the module that defines the name. If the name is
            itself a module, this is the module's full name.
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
    """Returns the command that installs tfpreempt with an extra, such as "tensorflow".

    The command must run in a clone of the repository, because no package index has
    tfpreempt.
    """
    return f"pip install '.[{extra}]' in a clone of tfpreempt"


WANTED = (
    f"needs TensorFlow, and there is none for {sys.executable}. The base install "
    f"leaves the choice to you: {to_install('tensorflow')}, or [and-cuda] for "
    "NVIDIA GPUs, [tensorflow-tpu] with libtpu==0.0.14 for TPU VMs, [tensorflow-cpu] "
    "for the smaller wheel without GPUs."
)
"""End of the message for a missing TensorFlow; the name of the feature comes before."""
