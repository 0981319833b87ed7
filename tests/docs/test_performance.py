"""The pages of docs/performance/ are made of the rows there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import ALL
from tests.docs import performance
from tests.docs.figures import FIGURES, HEADLINES, TOPICS

pytestmark = pytest.mark.slow  # imports all benches

AGAIN = "write the pages again: python -m tests.docs.performance"
FIGURE = next(each for each in FIGURES if each.name == "commit_speed")


def test_the_pages_are_made_of_the_rows() -> None:
    pages = performance.pages()
    for path, text in pages.items():
        assert (performance.DOCS / path).read_text(encoding="utf-8") == text, AGAIN
    written = {f"performance/{path.name}" for path in performance.ROWS.glob("*.md")}
    assert written == {f"{path}" for path in pages} - {"performance.md"}


def test_the_first_table_has_eight_figures_with_values() -> None:
    text = performance.pages()[Path("performance.md")]
    rows = [line for line in text.partition("## ")[0].splitlines() if "](" in line]
    assert len(rows) == len(HEADLINES) == 8
    assert [row for row in rows if f"**{performance.NOTHING}**" in row] == []


def test_every_figure_is_on_a_page() -> None:
    topics = {topic.name for topic in TOPICS}
    assert {figure.topic for figure in FIGURES} == topics


@pytest.mark.parametrize(
    "figure", list(performance.recorded()), ids=lambda each: each.name
)
def test_a_plot_is_drawn_of_the_rows(figure: Any) -> None:
    plot = (performance.ROWS / f"{figure.name}.svg").read_text(encoding="utf-8")
    assert performance.digest(performance.rows_of(figure)) in plot, AGAIN


def test_every_file_belongs_to_a_figure() -> None:
    names = {bench for figure in FIGURES for bench in figure.benches}
    plots = {figure.name for figure in performance.recorded()}
    found = set(performance.ROWS.iterdir())
    rows = {path.stem for path in found if path.suffix == ".jsonl"}
    assert rows - {"gpu"} <= names  # the page of the GPU has a table only
    assert {path.stem for path in found if path.suffix == ".svg"} == plots


def test_every_bench_has_a_figure() -> None:
    names = {bench for figure in FIGURES for bench in figure.benches}
    assert set(ALL) - names == set()


def test_every_row_names_its_measurement() -> None:
    common = {"bench", "command", "date", "load", "machine"}
    for figure in performance.recorded():
        for row in performance.rows_of(figure):
            assert common <= set(row)
            assert row["bench"] in figure.benches
            assert ("bar" in row) == ("ok" in row) == ("bar_of" in row)


def record(directory: Path, **changed: Any) -> None:
    """Leaves a row of `commit_speed` there."""
    row = {
        "bench": "commit_speed",
        "ours": 0.5,
        "ours_p95": 0.75,
        "ours_all": [0.5, 0.8],
        "theirs": 0.25,
        "theirs_p95": 0.25,
        "theirs_all": [0.25],
        "ratio": 2.0,
        "unit": "s",
        "bar": 1.15,
        "bar_of": "ratio",
        "ok": False,
        "state": "one tensor",
        "mebibytes": 2048,
        "place": "tmpfs",
        "command": "python -m benchmarks commit_speed",
        "date": "2026-01-02",
        "load": 0.5,
        "machine": {"cores": 2, "memory_gib": 8, "disk": "ext4", "python": "3.11"},
        **changed,
    }
    (directory / "commit_speed.jsonl").write_text(json.dumps(row) + "\n")


def written(directory: Path) -> tuple[str, str]:
    """Returns the overview and the page of `commit_speed`."""
    pages = performance.pages(directory)
    return pages[Path("performance.md")], pages[Path("performance/save.md")]


def test_a_row_is_a_line_of_the_tables(tmp_path: Path) -> None:
    record(tmp_path)
    first, page = written(tmp_path)
    lines = page.splitlines()
    case = "| one tensor, 2,048 MiB, tmpfs"
    assert f"{case} | 0.5 | 0.25 | **missed: ratio 2 > 1.15** |" in lines
    assert f"{case} | 0.75 | 2 | 2 |" in lines
    link = "performance/save.md#a-commit"
    assert f"| [A commit]({link}) | **0 of 1 met** |" in first.splitlines()
    assert "python -m benchmarks commit_speed" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## A commit"]


@pytest.mark.parametrize("is_met", [True, False])
def test_a_missed_target_has_a_reason(tmp_path: Path, is_met: bool) -> None:
    record(tmp_path, ok=is_met)
    assert (FIGURE.limit in written(tmp_path)[1]) == (not is_met)


def test_another_row_is_another_plot(tmp_path: Path) -> None:
    record(tmp_path)
    before = performance.digest(performance.rows_of(FIGURE, tmp_path))
    record(tmp_path, ours=0.4)
    assert performance.digest(performance.rows_of(FIGURE, tmp_path)) != before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (0.28849, "0.288"),
        (12345.6, "12,346"),
        (7, "7"),
        (10_000, "10,000"),
    ],
)
def test_numbers_are_short(value: Any, text: str) -> None:
    assert performance.number(value) == text


def test_the_figures_of_the_front_page_are_those_that_were_measured() -> None:
    cells = (performance.DOCS.parent / "README.md").read_text("utf-8")
    named = {each.name: performance.rows_of(each) for each in FIGURES}
    lost = {row["way"]: row for row in named["goodput"] if row["strike"] == "SIGTERM"}
    ways = "tfpreempt", "tensorflow_handler", "backup_and_restore"
    assert {lost[way]["lives"] for way in ways} == {10}
    assert {lost[way]["save_steps"] for way in ways} == {50}
    found = " | ".join(str(lost[way]["wasted_steps"]) for way in ways)
    assert f"| {found} (a save every 50 steps) |" in cells
    (real,) = (r for r in named["notice_to_exit"] if r["state"] == "ResNet-50")
    assert (
        f"ResNet-50, two workers | {real['ours']:.2g} s | {real['theirs']:.2g} s |"
        in cells
    )
    (copies,) = named["copies_written"]
    assert [round(copies["ours"]), round(copies["theirs"])] == [1, 2]
    assert "| the state once | the state twice |" in cells
