"""docs/reliability.md has a test for each row, and a run of all tests ran it."""

from __future__ import annotations

import ast
import re

import pytest

from campaigns.__main__ import CAMPAIGNS
from tests.docs.failures import PAGE, ROOT, named, unshown

pytestmark = pytest.mark.slow  # reads all code and docs


def test_each_test_that_the_page_names_exists() -> None:
    missing = []
    for test in sorted(named()):
        path, _, function = test.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing += [] if function in found else [test]
    assert missing == []


def test_each_row_names_one() -> None:
    page, _, _ = PAGE.read_text("utf-8").partition("## Campaigns")
    rows = re.findall(r"^\|(?! what, and when|---)(.*)\|$", page, re.MULTILINE)
    assert len(rows) > 50
    assert [row for row in rows if ".py::test_" not in row.split("|")[-1]] == []


def test_one_that_did_not_run_is_found() -> None:
    first, *rest = sorted(name for name in named() if "[" not in name)
    cases = [name for name in named() if "[" in name]
    assert unshown([*cases, *(f"{test}[a case]" for test in rest)]) == [first]


def test_another_case_does_not_show_one_that_is_named() -> None:
    first, *rest = sorted(name for name in named() if "[" in name)
    others = [name for name in named() if "[" not in name]
    another = first.partition("[")[0] + "[another case]"
    assert unshown([*rest, *others, another]) == [first]


def test_each_campaign_that_the_page_names_exists() -> None:
    """And has a short form: a case that is gone would never be shown."""
    cases = (name for name in named() if "::test_no_trial_breaks_a_promise" in name)
    short = {name for name, each in CAMPAIGNS.items() if each.short or each.again}
    assert {name.partition("[")[2].rstrip("]") for name in cases} <= short
