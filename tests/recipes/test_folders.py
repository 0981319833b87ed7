"""Each recipe: its page and its files agree, and all used names exist."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess

import pytest

import tfpreempt
from tests.recipes.folders import (
    NAMES,
    RECIPES,
    ROOT,
    VIRTUAL_MACHINES,
    config,
    config_call,
    directory,
    graces,
    page,
    text,
)

SCRIPTS = sorted(
    path for name in (*NAMES, "tpu") for path in (RECIPES / name).glob("*.sh")
)
VARIANTS = {
    "aws": tfpreempt.AwsSpotTerminationConfig,
    "azure": tfpreempt.AzureTerminationConfig,
    "gce": tfpreempt.GceSpotTerminationConfig,
    "gke": tfpreempt.KubernetesTerminationConfig,
}


@pytest.mark.parametrize(
    "name", [*NAMES, "gke-jax", "orbit", "skypilot", "trackers", "trainjob"]
)
def test_the_page_links_each_existing_file(name: str) -> None:
    linked = set(re.findall(rf"\]\({name}/([^)]+)\)", page(name)))
    assert linked == {path.name for path in (RECIPES / name).iterdir()}


def test_platforms_links_every_recipe() -> None:
    platforms = (ROOT / "docs/platforms/index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(\.\./recipes/([\w-]+)\.md\)", platforms))
    assert {*NAMES, "gke-jax", "skypilot", "tpu", "trainjob"} <= linked
    assert set(NAMES) <= {path.stem for path in RECIPES.glob("*.md")}


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_scripts_are_bash(path: str) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)


def test_there_are_scripts() -> None:
    assert {path.parent.name for path in SCRIPTS} == {*VIRTUAL_MACHINES, "tpu"}
    for path in SCRIPTS:
        source = path.read_text(encoding="utf-8")
        assert source.startswith("#!/bin/bash\n")
        assert "\nset -euo pipefail\n" in source


def test_shared_files_of_recipes_are_equal() -> None:
    for file, names in (
        ("train.service", VIRTUAL_MACHINES),
        ("cloud-init.yaml", ("aws", "azure")),
        ("user-data.sh", ("aws", "azure")),
    ):
        assert len({text(name, file) for name in names}) == 1, file


@pytest.mark.parametrize("name", NAMES)
def test_the_program_uses_names_that_are_public(name: str) -> None:
    tree = ast.parse(text(name, "train.py"))
    compile(tree, "train.py", "exec")
    dotted = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith("tfpreempt.")
    }
    assert "tfpreempt.keras.PreemptionCallback" in dotted
    for each in dotted:
        *path, last = each.split(".")
        # data is TensorFlow's side: its list is read, not imported.
        if path == ["tfpreempt", "data"]:
            room = ROOT / "tfpreempt/data/__init__.py"
            assert f'"{last}"' in room.read_text(encoding="utf-8"), each
        else:
            assert last in importlib.import_module(".".join(path)).__all__, each


@pytest.mark.parametrize("name", NAMES)
def test_the_callback_is_called_as_it_is_declared(name: str) -> None:
    source = (ROOT / "tfpreempt/keras/callback.py").read_text(encoding="utf-8")
    (init,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    (call,) = (
        node
        for node in ast.walk(ast.parse(text(name, "train.py")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "tfpreempt.keras.PreemptionCallback"
    )
    assert len(call.args) == len(init.args.args) - 1
    given = {keyword.arg for keyword in call.keywords}
    assert given == {"termination_config"}
    assert given <= {argument.arg for argument in init.args.kwonlyargs}
    assert directory(name).startswith("/srv/ckpt/")


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_the_platforms_and_can_be_made(name: str) -> None:
    made = config(name)
    assert type(made) is VARIANTS[name]
    assert made.exit_code == 143
    assert re.search(r"exits?\s+with 143", page(name))
    assert f"`{type(made).__name__}`" in page(name)


@pytest.mark.parametrize("name", VIRTUAL_MACHINES)
def test_the_programs_grace_period_is_the_default_of_the_variant(name: str) -> None:
    """So the recipe and its page may contain the number."""
    call = config_call(text(name, "train.py"))
    (said,) = (each.value for each in call.keywords if each.arg == "grace_period")
    assert graces(config(name)) == graces(VARIANTS[name]())
    told = re.findall(r"(\d+) s\s(?:ahead|of the notice)", page(name))
    assert told == [str(ast.literal_eval(said))]


def test_azure_acknowledges_and_the_page_says_so() -> None:
    call = config_call(text("azure", "train.py"))
    said = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert said["acknowledge"] is True
    assert "`acknowledge=True`" in page("azure")
    planned = max(grace for grace in graces(config("azure")) if grace is not None)
    assert f"a grace period of {planned:.0f} s or more" in page("azure")
