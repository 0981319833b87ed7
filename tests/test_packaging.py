"""The package as it is published: names, ranges, pins."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tfpreempt

ROOT = Path(__file__).parents[1]
PACKAGES = {"data", "errors", "keras", "states", "trackers"}  # public modules
UNPINNED_EXTRAS = {
    *("tensorflow-cpu", "tensorflow-tpu"),  # the same files as tensorflow
    "orbit",  # asks for another TensorFlow than the pinned one
}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements(text: str) -> list[Requirement]:
    lines = [line.strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def declared() -> list[Requirement]:
    """Everything that setup.cfg asks for, base and extras."""
    parser = setup_cfg()
    found = requirements(parser["options"]["install_requires"])
    for extra, text in parser["options.extras_require"].items():
        if extra not in UNPINNED_EXTRAS:
            found += requirements(text)
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_constraints_are_exact_pins_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = re.compile(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*")
    odd = [line for line in lines if line[0] != "#" and not exact.fullmatch(line)]
    assert odd == []


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_make_installs_extras_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    match = re.search(r"^EXTRAS := (.+)$", makefile, re.MULTILINE)
    assert match is not None
    extras = setup_cfg()["options.extras_require"]
    assert [name for name in match[1].split(",") if name not in extras] == []


def test_version_is_read_without_importing() -> None:
    """setuptools finds a literal in the source, so a build needs no TensorFlow."""
    tree = ast.parse((ROOT / "tfpreempt/__init__.py").read_text(encoding="utf-8"))
    literals = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__version__"
        and isinstance(node.value, ast.Constant)
    ]
    assert literals == [tfpreempt.__version__]
    assert setup_cfg()["metadata"]["version"] == "attr: tfpreempt.__version__"


def test_public_names_are_one_list() -> None:
    named = {*tfpreempt._HOMES, "__version__"}
    assert set(tfpreempt.__all__) == named
    assert sorted(tfpreempt.__all__) == tfpreempt.__all__
    assert named <= set(dir(tfpreempt))


HOMES = {name: home for name, home in tfpreempt._HOMES.items() if name not in PACKAGES}


@pytest.mark.parametrize("name", sorted(HOMES))
def test_public_name_is_defined_in_its_home(name: str) -> None:
    home = HOMES[name]
    source = ROOT.joinpath(*home.split(".")).with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert name in defined


@pytest.mark.tensorflow
def test_every_public_name_loads() -> None:
    for name in tfpreempt.__all__:
        assert getattr(tfpreempt, name) is getattr(tfpreempt, name)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Handler'.*TerminationCon"):
        tfpreempt.Handler  # noqa: B018  # the attribute access is the test


@pytest.mark.slow  # starts a process
def test_an_import_on_another_system_raises_an_error() -> None:
    code = "import sys; sys.platform = 'darwin'; import tfpreempt"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ImportError: tfpreempt runs on Linux only, this is 'darwin'" in done.stderr


def test_types_are_shipped() -> None:
    assert (ROOT / "tfpreempt/py.typed").exists()
    data = setup_cfg()["options.package_data"]["tfpreempt"].split(", ")
    assert "py.typed" in data
    assert all((ROOT / "tfpreempt" / name).exists() for name in data)


def workflow(name: str) -> dict[str, Any]:
    source = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    loaded = yaml.safe_load(source)
    assert isinstance(loaded, dict)
    return loaded


def test_the_workflow_runs_each_cell_of_the_matrix_on_its_python() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    cells = [
        {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Cell"
    ]
    rows = workflow("ci")["jobs"]["matrix"]["strategy"]["matrix"]["include"]
    assert rows == [{"cell": c["name"], "python": c["python"]} for c in cells]


def commands(job: Mapping[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_a_published_build_was_tested_and_needs_no_token() -> None:
    jobs = workflow("publish")["jobs"]
    assert jobs["publish"]["needs"] == ["build", "demo"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "make wheel" in commands(jobs["build"])
    assert any("tfpreempt demo" in command for command in commands(jobs["demo"]))
    assert "secrets" not in (ROOT / ".github/workflows/publish.yml").read_text()


def test_nothing_unpinned_runs_where_the_upload_comes_from() -> None:
    """The demo installs the newest packages, in a job whose files are not published."""
    jobs = workflow("publish")["jobs"]
    build, publish = jobs["build"], jobs["publish"]
    assert not [command for command in commands(build) if "pip install" in command]
    assert "upload-artifact" in build["steps"][-1]["uses"]
    assert commands(publish) == []
    uploads = [name for name, job in jobs.items() if "upload-artifact" in str(job)]
    assert uploads == ["build"]


@pytest.mark.parametrize("name", ["ci", "publish"])
def test_actions_are_pinned_by_commit(name: str) -> None:
    source = (ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", source)
    assert used
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", each), each
