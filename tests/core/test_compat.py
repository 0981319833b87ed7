"""Replacements for features that Python 3.10 lacks, on every Python."""

from __future__ import annotations

from tfpreempt.core.compat import StrEnum, add_note


class Colour(StrEnum):
    RED = "red"


def test_members_are_strings_as_text_too() -> None:
    assert Colour.RED == "red"
    assert (str(Colour.RED), f"{Colour.RED}") == ("red", "red")


def test_notes_are_kept_in_order() -> None:
    error = ValueError("no")
    add_note(error, "first")
    add_note(error, "second")
    assert vars(error)["__notes__"] == ["first", "second"]
    assert str(error) == "no"
