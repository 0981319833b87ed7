"""docs/reliability.md has a test for each row, and a run of all tests ran it."""

from __future__ import annotations

import ast
import re

from tests.docs.failures import PAGE, ROOT, named, unshown


def test_each_test_that_the_page_names_exists() -> None:
    missing = []
    for test in sorted(named()):
        path, _, function = test.partition("::")
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
    first, *rest = sorted(named())
    assert unshown([f"{test}[a case]" for test in rest]) == [first]
