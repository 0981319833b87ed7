"""The wheel as a user gets it: built from this tree, installed into an environment."""

from __future__ import annotations

import email
import json
import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import tfpreempt

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from the files in git, with the installed tools."""
    place = tmp_path_factory.mktemp("wheel")
    names = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in names.splitlines():
        if (ROOT / name).is_file():
            copy = place / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", "pip", *command, "--wheel-dir", place, "./source"],
        cwd=place,
        check=True,
    )
    [built] = place.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tfpreempt").rglob("*")
        if path.suffix in (".py", ".html") or path.name == "py.typed"
    }
    assert names == expected


@pytest.mark.slow
def test_its_metadata_are_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name)
    told = Metadata.from_email(text, validate=True)
    assert (told.name, str(told.version)) == ("tfpreempt", tfpreempt.__version__)
    assert told.license_expression == "Apache-2.0"
    assert told.description_content_type == "text/markdown"
    assert told.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert None not in (told.summary, told.keywords, told.classifiers, told.author)
    assert email.message_from_bytes(text).get_all("License-File") == ["LICENSE"]


@pytest.mark.multiprocess
def test_the_installed_wheel_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel, and the dependencies of this environment."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    [library] = place.glob("lib/python*/site-packages")
    (library / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(place / "bin" / "tfpreempt"), *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = subprocess.check_output(
        [str(python), "-c", "import tfpreempt; print(tfpreempt.__file__)"],
        cwd=tmp_path,
        env=environment,
        text=True,
    )
    assert Path(where.strip()).is_relative_to(library)
    assert run("--version").split()[-1] == tfpreempt.__version__
    result = json.loads(
        run("demo", "--json", "--preemptions", "1", "--workers", "1", "--steps", "200")
    )
    assert result["preemptions"] == result["restarts"] == 1
    assert result["steps_lost"] == 0
    assert result["bit_identical"] is True
    [seconds] = result["notice_to_commit_seconds"]
    assert 0 < seconds < 10
    assert result["final_accuracy"] > 0.9
