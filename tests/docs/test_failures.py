"""Each failure mode in docs/reliability.md has a test, and full runs include it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from campaigns.__main__ import CAMPAIGNS
from tests.docs.failures import MODES, PAGE, ROOT, named, unshown

pytestmark = pytest.mark.slow  # reads all code and docs


def test_each_test_that_the_page_names_exists() -> None:
    missing = []
    for test in sorted(named()):
        path, _, function = test.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing += [] if function in found else [test]
    assert missing == []


def rows(path: Path) -> list[list[str]]:
    """Returns the cells of all tables of a page that have failures as rows."""
    page = path.read_text("utf-8")
    page = page[page.index("# Process") :].partition("## Campaigns")[0]
    lines = re.findall(r"^\| (?!failure \||---)(.*) \|$", page, re.MULTILINE)
    return [line.split(" | ") for line in lines]


def test_each_failure_mode_has_its_row_with_a_test() -> None:
    tested = rows(PAGE)
    assert len(tested) > 50
    assert [cells[0] for cells in tested] == [cells[0] for cells in rows(MODES)]
    assert [row for row in tested if ".py::test_" not in row[-1]] == []


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
    """Each also has a short form; otherwise a removed case would not be noticed."""
    cases = (name for name in named() if "::test_no_trial_breaks_a_promise" in name)
    short = {name for name, each in CAMPAIGNS.items() if each.short or each.again}
    assert {name.partition("[")[2].rstrip("]") for name in cases} <= short
