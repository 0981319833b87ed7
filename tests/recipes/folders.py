"""The recipes of docs/recipes that have no machine of their own to run on in tests."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

import tfpreempt

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
NAMES = ("aws", "azure", "gce", "gke")
VIRTUAL_MACHINES = ("aws", "azure", "gce")


def page(name: str) -> str:
    """A recipe's page."""
    return (RECIPES / f"{name}.md").read_text(encoding="utf-8")


def text(name: str, file: str) -> str:
    """A recipe's file."""
    return (RECIPES / name / file).read_text(encoding="utf-8")


def config_call(source: str) -> ast.Call:
    """The one call of a config's constructor in a program."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("TerminationConfig")
    )
    return call


def config(name: str) -> tfpreempt.TerminationConfig:
    """Returns the config of a recipe's program, with the program's arguments."""
    call = config_call(text(name, "train.py"))
    made = getattr(tfpreempt, ast.unparse(call.func).removeprefix("tfpreempt."))(
        *(ast.literal_eval(each) for each in call.args),
        **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords},
    )
    assert isinstance(made, tfpreempt.TerminationConfig)
    return made


def graces(made: tfpreempt.TerminationConfig) -> list[float | None]:
    """Returns the grace periods of the config's sources."""
    return [watched.grace_seconds for watched in made._notice_sources()]


def directory(name: str) -> str:
    """The checkpoint directory of a recipe's program."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(text(name, "train.py")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("PreemptionCallback")
    )
    return str(ast.literal_eval(call.args[0]))


def unit(source: str) -> configparser.ConfigParser:
    """A systemd unit. A key that is given twice is an error, and no key is changed."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # its own idiom
    parser.read_string(source)
    return parser


def seconds(value: str) -> float:
    """A duration as the units of the recipes write it: a number, or hours."""
    return 3600.0 * float(value[:-1]) if value.endswith("h") else float(value)
