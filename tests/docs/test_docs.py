"""The pages under docs/ are true of the code, as far as names can show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tfpreempt
from tests.docs.pages import blocks, read
from tfpreempt.platforms.detect import VARIANTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfpreempt"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A room is a folder; its `__init__` says what its files do.
ROOMS = sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(PACKAGE)))
def test_a_room_names_its_files(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
    named = set(re.findall(r"^ *(\w+/?)  +\S", text, re.MULTILINE))
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    assert named == files | folders


def test_every_invariant_names_tests_that_exist() -> None:
    rows = re.findall(r"\|[^|]*\|$", read("invariants.md"), re.M)
    named = [f"tests/{name}" for name in re.findall(r"`([\w/.]+)`", "".join(rows))]
    named += re.findall(r"`(tests/[\w/.]+)`", read("architecture.md"))
    assert len(named) > 60
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_architecture_is_a_short_page() -> None:
    assert len(read("architecture.md").splitlines()) <= 110


def test_decisions_are_numbered_in_a_row() -> None:
    numbers = [int(path.name[:4]) for path in PAGES if path.parent.name == "decisions"]
    assert numbers == list(range(1, len(numbers) + 1))


PLATFORMS = read("platforms/index.md")


def test_every_variant_has_its_row() -> None:
    variants = {
        name for name in tfpreempt.__all__ if name.endswith("TerminationConfig")
    }
    rows = "\n".join(line for line in PLATFORMS.splitlines() if line[:1] == "|")
    assert variants - set(re.findall(r"`(\w+)`", rows)) == {"TerminationConfig"}


def test_every_name_of_a_platform_is_listed() -> None:
    listed = PLATFORMS[PLATFORMS.index("the names are") :]
    named = re.findall(r"`([^`]+)`", listed[: listed.index("A callback")])
    assert named == list(VARIANTS)


def test_the_configs_of_the_platforms_can_be_made() -> None:
    pages = "platforms/index.md", "platforms/slurm.md", "platforms/others.md"
    for (block,) in map(blocks, pages):
        names: dict[str, object] = {"tfpreempt": tfpreempt}
        exec(block, names)
        config = names["config"]
        assert isinstance(config, tfpreempt.TerminationConfig)
        has_more = "detect_platform" not in block  # what this machine is, is its own
        assert len(config._notice_sources()) > has_more
