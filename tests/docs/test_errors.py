"""docs/errors.md has every error that the package shows."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT, read
from tfpreempt import errors

pytestmark = pytest.mark.slow  # reads all code and docs

PAGE = read("errors.md")
ROWS = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
UNSEEN = {
    "CommitCorruptError": "the mirror drops that commit, and warns",
    "DemoFailedError": "`tfpreempt demo` prints what it says",
    "NothingRunsError": "`tfpreempt simulate` and `demo` print what it says",
    "SessionClosedError": "the source that closed the session ends with it",
    "VetoError": "the save names the bad step, and all workers stop",
}
"""Errors of which nobody outside meets the class, and who handles each."""


def bases() -> dict[str, set[str]]:
    """Returns each class of the package with its base classes, by the last name.

    The source is read, because the import of all modules takes TensorFlow.
    """
    return {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        - {node.name}
        for path in (ROOT / "tfpreempt").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }


def ancestors(name: str, of: dict[str, set[str]]) -> set[str]:
    """Returns a class and all of its base classes."""
    return {name}.union(*(ancestors(each, of) for each in of.get(name, ())))


def test_every_error_that_a_user_meets_has_its_row() -> None:
    of = bases()
    found = {name for name in of if "TfpreemptError" in ancestors(name, of)}
    assert sorted(name for name, _ in ROWS) == sorted(found - set(UNSEEN))
    assert set(UNSEEN) <= found


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_row_has_every_part(name: str, row: str) -> None:
    """Event and action; the loss is in the row or above the table."""
    assert all(len(cell.strip()) > 5 for cell in row.split("|"))
    also = re.findall(r"Also an? `(?:[a-z]\w*\.)*(\w+)`", row)
    if hasattr(errors, name):
        assert set(also) <= {each.__name__ for each in getattr(errors, name).__mro__}
    else:
        assert set(also) <= ancestors(name, bases())
