"""The pages that follow a route through the code name functions that exist."""

from __future__ import annotations

import re

import pytest

from tests.docs import routes

pytestmark = pytest.mark.slow  # reads all code and docs

pages = pytest.mark.parametrize("page", routes.PAGES, ids=lambda page: page.name)


@pages
def test_every_function_on_a_page_is_in_the_file_beside_it(page: routes.Page) -> None:
    text = page.path.read_text(encoding="utf-8")
    places = re.findall(r"\]\(\.\./tfpreempt/(\S+)\)((?:,? `[^`]+`)+)", text)
    assert places
    missing = [
        f"{file}: {name}"
        for file, names in places
        for name in re.findall(r"`([^`]+)`", names)
        if name not in routes.summaries(file)
    ]
    assert missing == [], "write the page again: python -m tests.docs.routes"


@pages
def test_a_page_has_the_overview_and_each_thread(page: routes.Page) -> None:
    text = page.path.read_text(encoding="utf-8")
    assert routes.overview(page) in text, "copy the overview from tests/docs/routes.py"
    if page.threads:
        named = set(re.findall(r"^- \*\*([\w-]+?)(?:_\d+)?,", text, re.MULTILINE))
        assert named == {name for name, _ in page.threads}


@pages
def test_a_page_has_all_stations_in_order(page: routes.Page) -> None:
    text = page.path.read_text(encoding="utf-8")
    titles = re.findall(r"^## \d\. (.+)$", text, re.MULTILINE)
    assert titles == [station.title for station in page.stations]
