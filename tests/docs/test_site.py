"""The site is built without a warning, and needs no other files."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import click
import pytest
from mkdocs.utils.yaml import yaml_load

import tfpreempt
from tests.docs import routes
from tests.docs.pages import PAGES, ROOT, read
from tests.docs.site import fenced, filled
from tfpreempt.cli import main

URL = "https://repository.invalid/tfpreempt"
pytestmark = pytest.mark.slow  # imports mkdocs

# Shown as `tfpreempt.<name>`, or the other name of a room.
PACKAGES = {"data", "errors", "keras", "states", "trackers"}  # public modules
OTHERWISE = {
    *(f"states.{name}" for name in ("State", "load_state", "num_restarts")),
    *(f"states.{name}" for name in ("save_all_states", "save_state")),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_site_is_built_and_needs_no_network(tmp_path: Path) -> None:
    """Links, anchors, pages that are in no menu and docstrings: all are warnings."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "REPOSITORY_URL": URL},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "## 0.1.0" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "0.1.0" in (tmp_path / "changelog/index.html").read_text("utf-8")
    handler = (tmp_path / "reference/handler/index.html").read_text("utf-8")
    signature = "PreemptionCheckpointHandler(\n    cluster_resolver:"
    assert signature in unescape(re.sub(r"<[^>]+>", "", handler))
    home = (tmp_path / "index.html").read_text("utf-8")
    assert f'href="{URL}"' in home
    assert home.count('"img/logo.svg"') >= 2  # the icon of the page, and the logo
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="http[^"]+', text)
        assert loaded == [], page
        # A list that has no empty line before it is taken for text.
        assert re.findall(r"^(?:[-*] |1\. |\|)", text, re.MULTILINE) == [], page
    commands = (tmp_path / "reference/command-line/index.html").read_text("utf-8")
    shown = re.findall(r"<pre>(.*?)</pre>", commands, re.DOTALL)
    shown = [unescape(re.sub(r"<[^>]+>", "", each)).rstrip() for each in shown]
    assert [table for table in tables() if table not in shown] == []


def tables() -> list[str]:
    """Returns the preformatted lines of the commands' help texts."""
    context = click.Context(main)
    names = main.list_commands(context)
    helps = [inspect.cleandoc(main.get_command(context, each).help) for each in names]
    found = [each for text in helps for each in text.split("\n\n") if each[0] == "\b"]
    assert len(found) > 5
    return [each.removeprefix("\b\n").rstrip() for each in found]


def test_preformatted_help_text_becomes_a_code_block() -> None:
    text = "First.\n\n\b\na  1\nb  2\n\nLast.\n\n\b\nc  3"
    blocks = "First.\n\n```text\na  1\nb  2\n```\n\nLast.\n\n```text\nc  3\n```"
    assert fenced(text) == blocks


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(read(page) for page in PAGES if page.startswith("reference/"))
    named = set(
        re.findall(r"^::: tfpreempt\.(\w+(?:\.\w+)?)$", reference, re.MULTILINE)
    )
    public = {name for name in tfpreempt.__all__ if name not in PACKAGES}
    assert public - named == {"TfpreemptError", "__version__"}
    for room in ("data", "keras", "states"):
        source = (ROOT / f"tfpreempt/{room}/__init__.py").read_text(encoding="utf-8")
        names = ast.literal_eval(
            source.partition("__all__ = ")[2].partition("]")[0] + "]"
        )
        assert {f"{room}.{name}" for name in names} - named <= OTHERWISE


def test_a_reader_begins_with_the_palette_of_the_system_and_can_return_to_it() -> None:
    config = yaml_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    first, *others = config["theme"]["palette"]
    assert first["media"] == "(prefers-color-scheme)"
    assert {each["scheme"] for each in others} == {"default", "slate"}


def test_the_home_page_leads_to_all_that_readme_does() -> None:
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Documentation")[2]
    home = read("index.md")
    linked = re.findall(r"\]\(docs/([^)]+)\)", readme)
    assert linked
    beside = {"promises.md", "exit-codes.md"} | {page.name for page in routes.PAGES}
    assert [each for each in linked if each not in beside and each not in home] == []


def test_a_pattern_selects_its_pages(tmp_path: Path) -> None:
    for name in ("b.md", "a.md"):
        (tmp_path / name).touch()
    nav = [{"Home": "index.md"}, {"More": ["x.md", "*.md", "none*.md"]}]
    pages = ["x.md", "a.md", "b.md"]
    assert filled(nav, tmp_path) == [{"Home": "index.md"}, {"More": pages}]
