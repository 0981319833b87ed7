"""Writes docs/performance.md and its plots from the rows under docs/performance/.

    make performance                    measures, and then does what the next line does
    python -m tests.docs.performance

The rows are what `python -m benchmarks --record docs/performance` has left there, the
text is that of tests/docs/figures.py. Only the plots need matplotlib (the extra
`bench`). Each plot says of which rows it was drawn, so a test can tell an old one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.docs.figures import FIGURES, Figure

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "performance.md"
ROWS = DOCS / "performance"

HEAD = """\
# Performance

What tfpreempt costs and how fast it is, against TensorFlow, Keras, and the plainest
form of the same work. All figures are those of `make bench`, which prints them as JSON
lines; sides that are compared take turns in one run. A cell has the median and the
95th percentile, a ratio is that of the medians (of pairs: the median over neighbouring
rounds, which suffers less from other programs), and a bar is the largest value that is
good. The rows with their samples are under `docs/performance/`, and this page
is made of them by `make performance`, which measures anew.
"""

BARS = {"ratio": "ratio", "ours": "median", "ours_p95": "p95", "known_p99": "p99"}
PROGRAMS = {
    "python": "Python",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "tf_keras",
}
NOTHING = "-"
Row = dict[str, Any]


def rows_of(figure: Figure, directory: Path = ROWS) -> list[Row]:
    """All rows that were recorded of a figure, in the order of its benches."""
    paths = (directory / f"{bench}.jsonl" for bench in figure.benches)
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def digest(rows: Sequence[Row]) -> str:
    """Tells whether a plot was drawn of these rows."""
    text = json.dumps(rows, sort_keys=True)
    return f"rows {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def page(directory: Path = ROWS) -> str:
    """The whole page; a figure without rows is left out."""
    found = [(figure, rows_of(figure, directory)) for figure in recorded(directory)]
    overview = table(
        ["figure", "bar", "met"],
        [
            [f"[{figure.title}](#{anchor(figure.title)})", bars(rows), met(rows)]
            for figure, rows in found
        ],
    )
    sections = [section(figure, rows) for figure, rows in found]
    return "\n".join([HEAD, overview, "", *sections])


def recorded(directory: Path = ROWS) -> Iterator[Figure]:
    """The figures that there are rows of."""
    return (figure for figure in FIGURES if rows_of(figure, directory))


def section(figure: Figure, rows: Sequence[Row]) -> str:
    """One figure: what it is, its table, why a bar is missed, the plot, the command."""
    parts = [f"## {figure.title}\n", f"{figure.text}\n", f"{figures(figure, rows)}\n"]
    if figure.limit and missed(rows):
        parts.append(f"*Where the bar is not met.* {figure.limit}\n")
    parts.append(f"![{figure.title}](performance/{figure.name}.svg)\n")
    parts.append(f"{circumstances(rows)}\n")
    return "\n".join(parts)


def figures(figure: Figure, rows: Sequence[Row]) -> str:
    """The table of a figure. A column that no row has a value for is left out."""
    units = ", ".join(dict.fromkeys(row["unit"] for row in rows if "unit" in row))
    columns: list[tuple[str, Callable[[Row], str]]] = [
        (f"unit: {units}" if units else "", figure.label_of),
        *((name, _side(field)) for field, name in figure.sides.items()),
        ("rounds", lambda row: rounds(row, figure)),
        ("ratio", lambda row: number(row.get("ratio"))),
        ("of pairs", lambda row: number(row.get("ratio_of_pairs"))),
        *((name, _field(field)) for field, name in figure.more.items()),
        ("bar", bar),
        ("met", lambda row: number(row.get("ok"))),
    ]
    shown = [
        (name, cells)
        for name, cell in columns
        if set(cells := [cell(row) for row in rows]) != {NOTHING}
    ]
    lines = zip(*(cells for _, cells in shown), strict=True)
    return table([name for name, _ in shown], [list(line) for line in lines])


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _side(field: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        median, late = number(row.get(field)), row.get(f"{field}_p95")
        has_many = late is not None and len(row.get(f"{field}_all", "many")) > 1
        return f"{median}, p95 {number(late)}" if has_many else median

    return cell


def _field(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value: Any = row
        for part in name.split("."):
            value = value.get(part, {})
        return NOTHING if value == {} else number(value)

    return cell


def rounds(row: Row, figure: Figure) -> str:
    """How many samples the first side has."""
    for field in figure.sides:
        if f"{field}_samples" in row:
            return number(row[f"{field}_samples"])
        if f"{field}_all" in row:
            return number(len(row[f"{field}_all"]))
    return NOTHING


def number(value: Any) -> str:
    """A value in a cell: three digits that count, at least; yes and no."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def bar(row: Row) -> str:
    """What the row is held against, and which of its values."""
    if "bar" not in row:
        return NOTHING
    name = row["bar_of"]
    return f"{BARS.get(name, name.replace('_', ' '))} {number(row['bar'])}"


def bars(rows: Sequence[Row]) -> str:
    """All bars of a figure."""
    return ", ".join(dict.fromkeys(bar(row) for row in rows if "bar" in row)) or NOTHING


def met(rows: Sequence[Row]) -> str:
    """How many rows meet theirs."""
    held = [row["ok"] for row in rows if "ok" in row]
    return f"{sum(held)} of {len(held)}" if held else NOTHING


def missed(rows: Sequence[Row]) -> bool:
    """Whether a row does not meet its bar."""
    return not all(row.get("ok", True) for row in rows)


def circumstances(rows: Sequence[Row]) -> str:
    """The commands, and where and when each ran."""
    return "\n\n".join(
        f"{_where([row for row in rows if row['command'] == command])}\n\n"
        f"```bash\n{command}\n```"
        for command in dict.fromkeys(row["command"] for row in rows)
    )


def _where(rows: Sequence[Row]) -> str:
    machine = rows[0]["machine"]
    versions = ", ".join(
        f"{name} {machine[key]}" for key, name in PROGRAMS.items() if key in machine
    )
    dates = " and ".join(dict.fromkeys(row["date"] for row in rows))
    loads = [row["load"] for row in rows]
    return (
        f"Measured on {dates}: {machine['cores']} cores, {machine['memory_gib']} GiB "
        f"of memory, {machine['disk']} as the disk, {versions}; "
        f"load {min(loads)} to {max(loads)}."
    )


def anchor(title: str) -> str:
    """What a heading is linked by."""
    kept = (letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return "".join(kept).replace(" ", "-")


def main() -> None:
    """Writes the page and all plots; says which bars are missed without a reason."""
    from tests.docs import plots  # needs matplotlib

    PAGE.write_text(page(), encoding="utf-8")
    for figure in recorded():
        rows = rows_of(figure)
        plots.draw(figure, rows, ROWS / f"{figure.name}.svg", digest(rows))
        if missed(rows) and not figure.limit:
            print(
                f"{figure.name}: a bar is not met; say in tests/docs/figures.py, as "
                "its `limit`, what the limit is made of",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
