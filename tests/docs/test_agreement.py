"""docs/agreement.md and its diagrams show the present table."""

from __future__ import annotations

import re

import pytest

from tests.docs import chart, diagrams
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    Key,
    MainThreadState,
    NoticeKind,
    WatcherState,
)

PAGE = diagrams.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_diagrams_are_drawn_from_the_tables() -> None:
    again = "draw them again: python -m tests.docs.diagrams"
    arrows = diagrams.arrows()
    for role in diagrams.ROLES:
        (told,) = diagrams.section(role).findall(PAGE)
        assert told.strip() == diagrams.tell(role, arrows), again
    for path, drawing in diagrams.drawings().items():
        assert (diagrams.DOCS / path).read_text("utf-8") == drawing, again


def test_every_transition_is_in_its_row() -> None:
    ways = [("A", "B", "x"), ("A", "C", "x"), ("A", "B", "y"), ("B", "A", "x")]
    found = chart.rows("ABC", ways)
    assert found == [("A", "x", ["B", "C"]), ("A", "y", ["B"]), ("B", "x", ["A"])]
    drawing = chart.svg("Three", "ABC", ways)
    assert drawing.count("v8z") == len(ways)  # arrowheads


def test_every_state_has_its_words() -> None:
    states = {state.name for role in (WatcherState, MainThreadState) for state in role}
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert states - set(re.findall(r"`([A-Z]+)`", rows)) == set()


def test_the_keys_and_their_values_are_named() -> None:
    words = {each.value for kind in (Key, NoticeKind, CommitKind) for each in kind}
    named = set(re.findall(r"`(\w+)(?:/<i>)?`", PAGE))
    assert words - named == set()
