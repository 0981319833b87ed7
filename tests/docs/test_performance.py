"""docs/performance.md is what the rows under docs/performance/ say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import ALL
from tests.docs import performance
from tests.docs.figures import FIGURES

pytestmark = pytest.mark.slow  # imports all benches

AGAIN = "write the page again: python -m tests.docs.performance"
FIGURE = next(each for each in FIGURES if each.name == "commit_speed")


def test_the_page_is_what_the_rows_say() -> None:
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page(), AGAIN


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
    assert {path.stem for path in found if path.suffix == ".jsonl"} <= names
    assert {path.stem for path in found if path.suffix == ".svg"} == plots


def test_every_bench_has_a_figure() -> None:
    names = {bench for figure in FIGURES for bench in figure.benches}
    assert set(ALL) - names == set()


def test_every_row_says_what_it_is() -> None:
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


def test_a_row_is_a_line_of_the_table(tmp_path: Path) -> None:
    record(tmp_path)
    lines = performance.page(tmp_path).splitlines()
    assert (
        "| one tensor, 2,048 MiB, tmpfs | 0.5, p95 0.75 | 0.25 | 2 | 2 "
        "| ratio 1.15 | **no** |"
    ) in lines
    assert "| [A commit](#a-commit) | ratio 1.15 | 0 of 1 |" in lines
    assert "python -m benchmarks commit_speed" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## A commit"]


@pytest.mark.parametrize("is_met", [True, False])
def test_the_limit_is_told_where_a_bar_is_missed(tmp_path: Path, is_met: bool) -> None:
    record(tmp_path, ok=is_met)
    assert (FIGURE.limit in performance.page(tmp_path)) == (not is_met)


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


def test_the_table_of_goodput_on_the_front_page_is_what_was_measured() -> None:
    (goodput,) = (each for each in FIGURES if each.name == "goodput")
    cells = (performance.DOCS.parent / "README.md").read_text("utf-8")
    for row in performance.rows_of(goodput):
        share, again = row["goodput_without_start_up"], row["wasted_of_a_life"]
        assert f"| {share:.2f} | {again:g} |" in cells, row["way"]
