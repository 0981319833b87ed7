"""The campaigns in the docs are those of the summaries under docs/reliability/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from campaigns.__main__ import CAMPAIGNS
from tests.docs import reliability

pytestmark = pytest.mark.slow  # imports all campaigns


def test_the_pages_are_made_of_the_summaries() -> None:
    again = "write the pages again: python -m tests.docs.reliability"
    assert reliability.PAGE.read_text("utf-8") == reliability.page(), again
    assert reliability.DETAILS.read_text("utf-8") == reliability.details(), again


def test_every_summary_belongs_to_a_campaign() -> None:
    found = {path.stem for path in reliability.SUMMARIES.glob("*.json")}
    assert found <= set(CAMPAIGNS)


def test_a_campaign_is_a_line_and_a_list(tmp_path: Path) -> None:
    summary = {"seed": 7, "trials": 4, "faults": 1, "seconds": 90, "code": {"ab": 4}}
    facts = {"schedules": 2000, "ended": {"lost": 1, "well": 3}}
    path = tmp_path / "schedules.json"
    path.write_text(json.dumps({"campaign": "schedules", **summary, **facts}))
    fixed = len(CAMPAIGNS["schedules"].fixed)
    row = f"| [schedules](campaigns.md#schedules) | 4 of 200 | **1** | {fixed} |"
    assert row in reliability.page(tmp_path).splitlines()
    lines = reliability.details(tmp_path).splitlines()
    assert "- 4 trials in 2 minutes; seed 7; code `ab`" in lines
    assert "- sums over all trials: 2,000 schedules" in lines
    assert "- trials by ended: 1 with `lost`, 3 with `well`" in lines
