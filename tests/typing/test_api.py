"""The public surface, as a strict type checker sees it from outside."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfpreempt

ROOT = Path(__file__).parents[2]

# Public packages, whose names have a module each; read, because data needs TensorFlow.
PACKAGES = ("data", "keras", "states")
# Arguments and results that may be anything, or have no type that can be said.
ANYTHING = {
    "Checkpoint.restore -> ": "TensorFlow's load status, of a private module",
    "JsonState.__init__ value": "any JSON value",
    "LoaderState.__init__ loader": "any object with one of two pairs of methods",
    "PyTreeState.__init__ value": "any pytree",
    "PyTreeState.value value": "any pytree",
    "PyTreeState.value -> ": "any pytree",
    "from_arrays arrays": "an array, or a structure of arrays",
}


@pytest.mark.slow
def test_public_surface_is_typed() -> None:
    """With the options of `make types`, whose cache then has the whole package."""
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typing/api.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def homes() -> dict[str, str]:
    """The module of each public class and function."""
    found = {name: home for name, home in tfpreempt._HOMES.items() if "." in home}
    for package in PACKAGES:
        found.pop(package)
        text = (ROOT / f"tfpreempt/{package}/__init__.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module not in (None, "typing"):
                found |= {each.name: str(node.module) for each in node.names}
    return found


def signatures() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public functions, and the constructors and public methods of classes."""
    for name, home in sorted(homes().items()):
        path = ROOT.joinpath(*home.split(".")).with_suffix(".py")
        if not path.exists():
            continue  # a package, such as errors
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield name, node
            elif isinstance(node, ast.ClassDef) and node.name == name:
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and (
                        each.name in ("__init__", "__enter__", "__exit__")
                        or not each.name.startswith("_")
                    ):
                        yield f"{name}.{each.name}", each


def test_public_signatures_say_their_types() -> None:
    shown, found = 0, set()
    for name, function in signatures():
        shown += 1
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if each.annotation is not None and ast.unparse(each.annotation) == "Any":
                found.add(f"{name} {each.arg}")
        if function.returns is not None and ast.unparse(function.returns) == "Any":
            found.add(f"{name} -> ")
    assert shown > 80
    assert found == ANYTHING.keys()
