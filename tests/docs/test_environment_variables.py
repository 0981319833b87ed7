"""docs/reference/environment-variables.md has every variable that the package reads."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, read
from tfpreempt.core import heartbeat
from tfpreempt.core.snapshot_memory import VARIABLES

PAGE = read("reference/environment-variables.md")
VARIABLE = re.compile(r"\bTFPREEMPT_[A-Z_]+\b")


def listed(section: str) -> list[str]:
    """The variables in the first column of a section's table."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(TFPREEMPT_\w+)` \|", text, re.MULTILINE)


def test_every_variable_of_the_package_has_its_row() -> None:
    texts = [file.read_text("utf-8") for file in (ROOT / "tfpreempt").rglob("*.py")]
    used = {name for text in texts for name in VARIABLE.findall(text)}
    rows = listed("Settings") + listed("Internal variables")
    assert sorted(rows) == sorted(used)


def test_variables_of_the_supervisor_are_internal() -> None:
    assert {*VARIABLES, heartbeat.VARIABLE} <= set(listed("Internal variables"))
