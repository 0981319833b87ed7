"""docs/agreement.md is what the table is."""

from __future__ import annotations

import re

import pytest

from tests.docs import diagrams
from tfpreempt.coordination.events import CommitKind, Key, Main, NoticeKind, Watch

PAGE = diagrams.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_diagrams_are_drawn_from_the_table() -> None:
    arrows = diagrams.arrows()
    for role in diagrams.ROLES:
        (drawn,) = diagrams.section(role).findall(PAGE)
        assert drawn.strip() == diagrams.draw(role, arrows)


def test_every_state_has_its_words() -> None:
    states = {state.name for role in (Watch, Main) for state in role}
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert states - set(re.findall(r"`([A-Z]+)`", rows)) == set()


def test_the_keys_and_their_values_are_named() -> None:
    words = {each.value for kind in (Key, NoticeKind, CommitKind) for each in kind}
    named = set(re.findall(r"`(\w+)(?:/<i>)?`", PAGE))
    assert words - named == set()
