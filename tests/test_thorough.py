"""The split between `make test` and `make test-thorough`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import COLLECTED
from tests.thorough import FITS, SHORT_CAMPAIGNS, TESTS, thorough

ROOT = Path(__file__).parents[1]
MATRIX = ["a-1", "a-2", "b-1", "b-2"]


def items(function: str, cases: list[str], *marks: str) -> list[Any]:
    return [
        SimpleNamespace(
            nodeid=f"{function}[{case}]",
            keywords=dict.fromkeys(marks),
            callspec=SimpleNamespace(params=dict(enumerate(case.split("-")))),
        )
        for case in cases
    ]


@pytest.mark.parametrize(
    ("file", "cases", "left_out"),
    [
        ("tests/a.py", MATRIX, ["b-2"]),
        ("tests/a.py", ["a", "b", "c"], []),
        (f"{FITS}test_b.py", MATRIX, MATRIX[1:]),
    ],
)
def test_cases_without_a_new_value_are_left_out(
    file: str, cases: list[str], left_out: list[str]
) -> None:
    found = thorough(items(f"{file}::test", cases, "tensorflow"), ())
    assert list(found) == [f"{file}::test[{case}]" for case in left_out]


def test_a_case_named_in_the_docs_is_kept_instead_of_other_cases() -> None:
    cases = items("tests/a.py::test", MATRIX, "multiprocess")
    found = thorough(cases, {"tests/a.py::test[b-2]"})
    assert list(found) == [f"tests/a.py::test[{case}]" for case in ("a-2", "b-1")]


def test_short_campaigns_are_left_out_although_docs_reliability_names_them() -> None:
    cases = items(SHORT_CAMPAIGNS, ["kills"], "multiprocess")
    found = thorough(cases, {f"{SHORT_CAMPAIGNS}[kills]"})
    assert list(found) == [f"{SHORT_CAMPAIGNS}[kills]"]


def test_of_a_test_of_both_frameworks_the_named_case_on_jax_is_kept() -> None:
    cases = items("tests/a.py::test", ["a-jax", "b-jax"], "multiprocess")
    for each in cases:
        each.callspec.params["framework"] = "jax"
    found = thorough(cases, {"tests/a.py::test[b-jax]"})
    assert list(found) == ["tests/a.py::test[a-jax]"]


def test_without_tensorflow_all_cases_are_kept() -> None:
    assert list(thorough(items("tests/a.py::test", MATRIX, "slow"), ())) == []


@pytest.mark.parametrize("function", TESTS)
def test_of_a_listed_function_the_listed_cases_are_kept(function: str) -> None:
    kept = TESTS[function]
    found = thorough(items(function, [*kept, "another"], "tensorflow"), ())
    assert list(found) == [f"{function}[another]"]


@pytest.mark.tensorflow
def test_the_listed_functions_and_cases_exist(request: pytest.FixtureRequest) -> None:
    """With a wrong name of a case, `make test` would not run the function."""
    cases = [
        f"{function}[{case}]" if case else function
        for function, kept in TESTS.items()
        for case in kept or ("",)
    ]
    if collected := request.config.stash.get(COLLECTED, None):
        known = collected | {name.partition("[")[0] for name in collected}
        assert set(cases) <= known
        return
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "")
    found = subprocess.run(
        [*collect, *cases], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
