"""docs/errors.md has every error that the package shows."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import read
from tfpreempt import errors

PAGE = read("errors.md")
CLASSES = sorted(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.TfpreemptError)
)
ROWS = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE)


def test_every_class_has_its_row_and_every_row_its_class() -> None:
    assert sorted(name for name, _ in ROWS) == CLASSES


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_row_says_all(name: str, row: str) -> None:
    """What happened, what to do; what is lost stands there or above the table."""
    assert all(len(cell.strip()) > 5 for cell in row.split("|"))
    of_errors = getattr(errors, name).__mro__[1:]
    for builtin in ("ValueError", "ImportError", "NotImplementedError", "TimeoutError"):
        if builtin in row:
            assert builtin in {each.__name__ for each in of_errors}
