"""A cell of the matrix: the results of its checks, for any end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHECKS = {
    "seams": "tests/contracts/test_private_api.py",
    "fit": "tests/test_fit.py::test_it",
}
PASSED = """<testsuite>
<testcase classname="tests.contracts.test_private_api" name="test_a"/>
<testcase classname="tests.contracts.test_private_api" name="test_b"><skipped/>
</testcase>
<testcase classname="tests.test_fit" name="test_it"/>
</testsuite>"""


class CommandFailedError(Exception):
    """Stands for nox's error."""


class CellFailedError(Exception):
    """The session's error."""


class SkippedError(Exception):
    """The session is skipped."""


class Session:
    """The part of a nox session that a cell uses.

    Args:
        path: working directory.
        pytest: writes the report, instead of running tests.
        without: an argument with which pip fails.
    """

    def __init__(
        self, path: Path, pytest: Callable[[Path], None], without: str = ""
    ) -> None:
        self._path = path
        self._pytest = pytest
        self._without = without

    def create_tmp(self) -> str:
        return str(self._path)

    def install(self, *arguments: str, silent: bool) -> None:
        if self._without in arguments:
            raise CommandFailedError(f"pip {arguments}")

    def skip(self, why: str) -> None:
        raise SkippedError(why)

    def run(self, *command: str, **how: Any) -> str:
        if "pytest" in command:
            self._pytest(self._path / "report.xml")
        return json.dumps({"tensorflow": "tensorflow 2.0"})

    def error(self, why: str) -> None:
        raise CellFailedError(why)


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a nox that makes no sessions."""
    nox: Any = types.ModuleType("nox")
    nox.options = types.SimpleNamespace()
    nox.Session = Session
    nox.command = types.SimpleNamespace(CommandFailed=CommandFailedError)
    nox.session = lambda run=None, **_: run if run else lambda function: function
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "noxfile", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "matrix.jsonl")
    return module


@pytest.fixture(autouse=True)
def real_checks(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the module's checks, and replaces them by two distinct checks."""
    real: dict[str, str] = noxfile.CHECKS
    monkeypatch.setattr(noxfile, "CHECKS", CHECKS)
    return {
        **real,
        **{f"{name} on JAX": v for name, v in noxfile.CHECKS_ON_JAX.items()},
    }


def run(noxfile: Any, path: Path, pytest: Callable[[Path], None]) -> None:
    """Runs a cell."""
    noxfile.run(a_cell(noxfile), Session(path, pytest))


def a_cell(noxfile: Any) -> Any:
    return noxfile.Cell(
        name="it", python="3.11", tensorflow="tensorflow", tf_keras="2.0"
    )


def recorded(noxfile: Any) -> dict[str, str]:
    """Returns the checks of the only row."""
    [row] = noxfile.RESULTS.read_text().splitlines()
    checks: dict[str, str] = json.loads(row)["checks"]
    return checks


@pytest.mark.tensorflow
def test_every_check_names_tests_that_there_are(
    noxfile: Any, real_checks: dict[str, str]
) -> None:
    """With a wrong name pytest runs no test, in any cell."""
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "")
    found = subprocess.run(
        [*collect, *real_checks.values(), noxfile.NEW_VERSIONS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_cell_whose_checks_pass(noxfile: Any, tmp_path: Path) -> None:
    run(noxfile, tmp_path, lambda report: write(report, PASSED))
    assert recorded(noxfile) == {"seams": "passed", "fit": "passed"}


def write(report: Path, text: str) -> None:
    report.write_text(text)


def crash(report: Path) -> None:
    raise CommandFailedError("Returned code -6")


def crash_at_the_end(report: Path) -> None:
    report.write_text(PASSED)
    raise CommandFailedError("Returned code 3")


@pytest.mark.parametrize("before", [None, PASSED])
def test_a_crash_is_a_failed_cell(
    noxfile: Any, tmp_path: Path, before: str | None
) -> None:
    """Also where the report of an earlier run is there yet."""
    if before is not None:
        write(tmp_path / "report.xml", before)
    with pytest.raises(CellFailedError, match="Returned code -6"):
        run(noxfile, tmp_path, crash)
    assert recorded(noxfile) == dict.fromkeys(CHECKS, "did not run")


def test_a_crash_after_the_last_test_is_one_too(noxfile: Any, tmp_path: Path) -> None:
    with pytest.raises(CellFailedError, match="Returned code 3"):
        run(noxfile, tmp_path, crash_at_the_end)


@pytest.mark.parametrize("text", ["", PASSED[:40]])
def test_an_incomplete_report_is_no_report(
    noxfile: Any, tmp_path: Path, text: str
) -> None:
    with pytest.raises(CellFailedError, match="seams, fit"):
        run(noxfile, tmp_path, lambda report: write(report, text))


def test_a_failed_check_is_named(noxfile: Any, tmp_path: Path) -> None:
    failed = PASSED.replace('name="test_a"/>', 'name="test_a"><failure/></testcase>')
    with pytest.raises(CellFailedError, match=r"^seams$"):
        run(noxfile, tmp_path, lambda report: write(report, failed))
    assert recorded(noxfile) == {"seams": "FAILED", "fit": "passed"}


def test_a_check_that_was_skipped_did_not_pass(noxfile: Any, tmp_path: Path) -> None:
    skipped = PASSED.replace('name="test_it"/>', 'name="test_it"><skipped/></testcase>')
    with pytest.raises(CellFailedError, match=r"^fit$"):
        run(noxfile, tmp_path, lambda report: write(report, skipped))
    assert recorded(noxfile) == {"seams": "passed", "fit": "skipped"}


def test_versions_that_are_not_there_are_skipped(noxfile: Any, tmp_path: Path) -> None:
    """But a failed installation of an existing version is a failure."""
    session = Session(
        tmp_path, lambda report: write(report, PASSED), without="--dry-run"
    )
    with pytest.raises(SkippedError, match="pip finds no such versions together"):
        noxfile.run(a_cell(noxfile), session)
    [row] = noxfile.RESULTS.read_text().splitlines()
    assert json.loads(row)["skipped"] == "pip finds no such versions together"
    session = Session(
        tmp_path, lambda report: write(report, PASSED), without="--no-deps"
    )
    with pytest.raises(CommandFailedError):
        noxfile.run(a_cell(noxfile), session)
