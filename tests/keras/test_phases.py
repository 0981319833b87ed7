"""The phases of a fit: the table is the drawing, and leads from each way to begin."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tfpreempt import errors
from tfpreempt.keras.fit.fit_progress import Progress
from tfpreempt.keras.fit.phases import BEGINNINGS, TABLE, FitEvent, FitPhase, after
from tfpreempt.keras.fit.resume_plan import make_plan

PAGE = Path(__file__).parents[2] / "docs" / "keras-phases.md"


def test_the_page_names_every_way_to_begin() -> None:
    page = PAGE.read_text("utf-8")
    table = page[page.index("| first phase of a fit") : page.index("![")]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == [phase.name for phase in FitPhase if phase in BEGINNINGS]


def test_each_way_to_begin_leads_to_the_end() -> None:
    for beginning in BEGINNINGS:
        reached, todo = {beginning}, [beginning]
        while todo:
            new = set(TABLE.get(todo.pop(), {}).values()) - reached
            reached |= new
            todo += new
        assert (
            reached & {FitPhase.TRAINED, FitPhase.RESTORED}
            or beginning is FitPhase.SKIP
        )


def test_an_event_that_keras_never_sends_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'the fit ends' happened in .* VALIDATING"):
        after(FitPhase.VALIDATING, FitEvent.TRAIN_END)


def made_of(**more: Any) -> dict[str, Any]:
    """The facts of a fit."""
    facts = ("keras", "data", "samples", "steps", "model", "shapes", "values")
    known = {"weights": 4, "initial_epoch": 0, "epochs": 3}
    return dict.fromkeys(facts) | known | more


def saved(stage: Any, epoch: int = 1, **more: Any) -> Progress:
    return Progress(**{"fit": 1, "phase": stage, "epoch": epoch, "batch": 0} | more)


@pytest.mark.parametrize(
    ("progress", "before", "epochs", "beginning"),
    [
        (Progress(), [], 3, FitPhase.START),
        (saved("complete"), ["first"], 3, FitPhase.START),
        (saved("train"), [], 3, FitPhase.RESUME),
        (saved("validation"), [], 3, FitPhase.REVALIDATE),
        (saved("complete"), [], 3, FitPhase.EXTEND),
        (saved("complete", 3), [], 3, FitPhase.RESTORE),
        (saved("complete", stopped=True), [], 3, FitPhase.RESTORE),
        (saved("train", 2), [], 2, FitPhase.RESTORE),
        (saved("train", fit=2), [], 3, FitPhase.SKIP),
    ],
)
def test_the_checkpoint_decides_how_a_fit_begins(
    progress: Progress, before: list[str], epochs: int, beginning: FitPhase
) -> None:
    plan = make_plan(progress, before, epochs, made_of())
    assert plan.beginning is beginning
    assert plan.number == len(before) + 1


def test_a_start_after_the_end_is_no_reason_for_a_warning() -> None:
    plan = make_plan(saved("complete", 3), [], 3, made_of())
    assert plan.note.startswith("this fit was complete after 3 epochs")
    assert plan.note_level == logging.INFO
    skipped = make_plan(saved("train", fit=2), [], 3, made_of())
    assert skipped.note_level == logging.WARNING


def two_fits(first: dict[str, Any], second: dict[str, Any]) -> Progress:
    """A checkpoint of the second of two."""
    past = {"epoch": [0], "history": {}, "made_of": first}
    return saved("train", fit=2, histories=(past,), made_of=second)


@pytest.mark.parametrize(
    ("first", "second", "now", "number"),
    [
        # A program that begins from its top, or cannot be told from one that does.
        ({}, {}, {}, 1),
        ({"shapes": 1}, {"shapes": 2}, {"shapes": 1}, 1),
        ({"values": "1 2"}, {"values": "3 4"}, {"values": "1 2.0001"}, 1),
        ({"values": "1 2"}, {"values": "3 4"}, {"values": "5 6"}, 1),
        ({"epochs": 3}, {"epochs": 3}, {"epochs": 9}, 1),
        # One that leaves out its first fit.
        ({"shapes": 1}, {"shapes": 2}, {"shapes": 2}, 2),
        ({"model": "A"}, {"model": "B"}, {"model": "B", "weights": 0}, 2),
        ({"steps": 6}, {"steps": 7}, {"steps": 7}, 2),
        ({"values": "1 2"}, {"values": "3 4"}, {"values": "3 4"}, 2),
        ({"initial_epoch": 0}, {"initial_epoch": 3}, {"initial_epoch": 3}, 2),
        # Unbuilt models have no shapes yet.
        ({"shapes": 1}, {"shapes": 2}, {"shapes": 3, "weights": 0}, 1),
    ],
)
def test_a_fit_is_found_if_the_program_skips_earlier_fits(
    first: Any, second: Any, now: Any, number: int
) -> None:
    progress = two_fits(made_of(**first), made_of(**second))
    plan = make_plan(progress, [], 3, made_of(**now))
    assert plan.number == number
    assert plan.beginning is (FitPhase.SKIP if number == 1 else FitPhase.RESUME)


def test_a_checkpoint_of_an_earlier_version_has_no_fit_facts() -> None:
    progress = saved("train", fit=2, histories=({"epoch": [0], "history": {}},))
    assert make_plan(progress, [], 3, made_of()).beginning is FitPhase.SKIP


def test_a_fit_that_is_none_of_the_checkpoint_is_refused() -> None:
    progress = two_fits(made_of(steps=6), made_of(steps=7))
    with pytest.raises(errors.CheckpointMismatchError, match="own directory"):
        make_plan(progress, [], 3, made_of(steps=8))
