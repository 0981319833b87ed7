"""The tests that docs/reliability-tests.md and docs/campaigns.md name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODES = ROOT / "docs/reliability.md"
PAGE = ROOT / "docs/reliability-tests.md"
CAMPAIGNS_PAGE = ROOT / "docs/campaigns.md"
_TEST = re.compile(r"`([\w/]+\.py::\w+(?:\[[^]`]+\])?)`")


def named() -> set[str]:
    """Returns the node ids; an id without a parameter stands for any case."""
    text = "".join(page.read_text("utf-8") for page in (PAGE, CAMPAIGNS_PAGE))
    return {f"tests/{test}" for test in _TEST.findall(text)}


def unshown(passed: Iterable[str]) -> list[str]:
    """Returns the named tests that are not among the tests that passed.

    Args:
        passed: node ids of a run of all tests.
    """
    shown = {name for test in passed for name in (test, test.partition("[")[0])}
    return sorted(named() - shown)
