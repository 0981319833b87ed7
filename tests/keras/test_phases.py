"""The phases of a fit: the table is the drawing, and leads from each way to begin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tfpreempt.keras.fit.phases import BEGINNINGS, TABLE, Event, Phase, after
from tfpreempt.keras.fit.plan import make_plan
from tfpreempt.keras.fit.progress import Progress

PAGE = Path(__file__).parents[2] / "docs" / "keras-phases.md"


def test_the_page_names_every_way_to_begin() -> None:
    page = PAGE.read_text("utf-8")
    table = page[page.index("| a fit begins in") : page.index("![")]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == [phase.name for phase in Phase if phase in BEGINNINGS]


def test_each_way_to_begin_leads_to_the_end() -> None:
    for beginning in BEGINNINGS:
        reached, todo = {beginning}, [beginning]
        while todo:
            new = set(TABLE.get(todo.pop(), {}).values()) - reached
            reached |= new
            todo += new
        assert reached & {Phase.TRAINED, Phase.RESTORED} or beginning is Phase.SKIP


def test_what_keras_never_does_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'the fit ends' came in .* VALIDATING"):
        after(Phase.VALIDATING, Event.TRAIN_END)


def saved(stage: Any, epoch: int = 1, **more: Any) -> Progress:
    return Progress(**{"fit": 1, "phase": stage, "epoch": epoch, "batch": 0} | more)


@pytest.mark.parametrize(
    ("progress", "before", "epochs", "beginning"),
    [
        (Progress(), [], 3, Phase.START),
        (saved("complete"), ["first"], 3, Phase.START),
        (saved("train"), [], 3, Phase.RESUME),
        (saved("validation"), [], 3, Phase.REVALIDATE),
        (saved("complete"), [], 3, Phase.EXTEND),
        (saved("complete", 3), [], 3, Phase.RESTORE),
        (saved("complete", stopped=True), [], 3, Phase.RESTORE),
        (saved("train", 2), [], 2, Phase.RESTORE),
        (saved("train", fit=2), [], 3, Phase.SKIP),
    ],
)
def test_the_checkpoint_decides_how_a_fit_begins(
    progress: Progress, before: list[str], epochs: int, beginning: Phase
) -> None:
    plan = make_plan(progress, before, epochs)
    assert plan.beginning is beginning
    assert plan.number == len(before) + 1
