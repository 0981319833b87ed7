"""The tests that docs/reliability.md names: what each row of it is shown by."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"
_TEST = re.compile(r"`([\w/]+\.py::\w+(?:\[[^]`]+\])?)`")


def named() -> set[str]:
    """Their node ids; those without a parameter stand for any."""
    return {f"tests/{test}" for test in _TEST.findall(PAGE.read_text("utf-8"))}


def unshown(passed: Iterable[str]) -> list[str]:
    """Those that are not among the tests that passed.

    Args:
        passed: node ids of a run of all tests.
    """
    shown = {name for test in passed for name in (test, test.partition("[")[0])}
    return sorted(named() - shown)
