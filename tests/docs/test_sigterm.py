"""docs/follow-one-sigterm.md leads to functions that exist."""

from __future__ import annotations

import re

from tests.docs import sigterm

PAGE = sigterm.PAGE.read_text(encoding="utf-8")


def test_every_function_on_the_page_is_in_the_file_beside_it() -> None:
    places = re.findall(r"\]\(\.\./tfpreempt/(\S+)\)((?:,? `[^`]+`)+)", PAGE)
    assert places
    missing = [
        f"{file}: {name}"
        for file, names in places
        for name in re.findall(r"`([^`]+)`", names)
        if name not in sigterm.summaries(file)
    ]
    assert missing == [], "write the page again: python -m tests.docs.sigterm"


def test_the_page_has_all_stations_in_order() -> None:
    titles = re.findall(r"^## \d\. (.+)$", PAGE, re.MULTILINE)
    assert titles == [station.title for station in sigterm.STATIONS]
