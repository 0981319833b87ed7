"""Writes docs/performance.md, its pages and its plots from docs/performance/*.jsonl.

    make performance                    measures, and then runs the next line
    python -m tests.docs.performance

`python -m benchmarks --record docs/performance` makes the rows; the texts are those of
tests/docs/figures.py. Only the plots need matplotlib (the extra `bench`). Each plot
contains a digest of its rows, so a test can detect an old plot.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.docs.figures import FIGURES, HEADLINES, TOPICS, Figure, Headline, Value
from tests.docs.gpu_page import TEXT as GPU_TEXT
from tests.docs.gpu_page import TITLE as GPU_TITLE
from tests.docs.gpu_page import gpu_page

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "performance.md"
ROWS = DOCS / "performance"

HEAD = """\
# Performance

Eight figures summarize the cost and the benefit of tfpreempt. Each figure links to its
measurement, and a note says where the measurement misses targets.
"""

FOOT = """\
"Ratio" is the time of tfpreempt divided by the time of the comparison. A target is the
largest good value; a missed target stays on its page, with the reason.

## How the figures are measured

All figures but those of the GPU come from `make bench` on one machine with two
processor cores, so workers share the processors. Programs that are compared run
alternately in one benchmark. Values are medians. The details of each figure have the
95th percentile (p95), the number of rounds, the versions, the load of the machine and
the command.
`docs/performance/` has the rows with all samples. `make performance` measures again
and writes these pages.
"""

TARGETS = {
    "ratio": "ratio",
    "ours": "median",
    "ours_p95": "p95",
    "known_p99": "p99",
    "of_waited": "share of a waited save",
}
PROGRAMS = {
    "python": "Python",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "tf_keras",
}
NOTHING = "-"
Row = dict[str, Any]


def rows_of(figure: Figure, directory: Path = ROWS) -> list[Row]:
    """Returns all recorded rows of a figure, in the order of its benchmarks."""
    paths = (directory / f"{bench}.jsonl" for bench in figure.benches)
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def digest(rows: Sequence[Row]) -> str:
    """Returns the digest of rows that a plot contains."""
    text = json.dumps(rows, sort_keys=True)
    return f"rows {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def pages(directory: Path = ROWS) -> dict[Path, str]:
    """Returns the text of each page, by its path under docs/."""
    found = [(figure, rows_of(figure, directory)) for figure in recorded(directory)]
    texts = {Path("performance.md"): overview(found)}
    for topic in TOPICS:
        parts = [f"# {topic.title}\n", f"{topic.text}\n"]
        sections = [section(f, rows) for f, rows in found if f.topic == topic.name]
        if sections:
            text = "\n".join([*parts, *sections])
            texts[Path(f"performance/{topic.name}.md")] = text
    if (gpu := directory / "gpu.jsonl").exists():
        texts[Path("performance/gpu.md")] = gpu_page(gpu)
    return texts


def overview(found: Sequence[tuple[Figure, list[Row]]]) -> str:
    """Returns docs/performance.md. Figures without rows are left out.

    Args:
        found: figures with their rows.
    """
    by_name = {figure.name: (figure, rows) for figure, rows in found}
    first = [
        headline(each, *by_name[each.figure])
        for each in HEADLINES
        if each.figure in by_name
    ]
    held = [
        [f"[{figure.title}]({link(figure)})", targets_met(rows)]
        for figure, rows in found
    ]
    topics = [
        f"- [{topic.title}](performance/{topic.name}.md): {topic.text}"
        for topic in TOPICS
        if any(figure.topic == topic.name for figure, _ in found)
    ]
    if (ROWS / "gpu.jsonl").exists():
        topics.append(f"- [{GPU_TITLE}](performance/gpu.md): {GPU_TEXT}")
    parts = [
        HEAD,
        table(["figure", "tfpreempt", "comparison"], first),
        "\n## All measurements\n",
        *topics,
        "",
        table(["measurement", "targets met"], held),
        "",
        FOOT,
    ]
    return "\n".join(parts)


def headline(each: Headline, figure: Figure, rows: Sequence[Row]) -> list[str]:
    """Returns a row of the first table.

    Args:
        each: content of the row.
        figure: figure of the values.
        rows: rows of the figure.
    """
    theirs = [f"{v.name}: {value_of(v, rows, each.unit)}" for v in each.theirs]
    held = targets_met(rows).strip("*").replace(" met", " targets met")
    note = f"; **[{held}]({link(figure)})**" if missed(rows) else ""
    return [
        f"[{each.text}]({link(figure)}){note}",
        f"**{value_of(each.ours, rows, each.unit)}**",
        ", ".join(theirs),
    ]


def value_of(value: Value, rows: Sequence[Row], unit: str = "") -> str:
    """Returns a value with its unit, from the first row that `value` selects."""
    for row in rows:
        if value.rows.items() <= row.items():
            return f"{number(row.get(value.field))} {unit}".strip()
    return NOTHING


def link(figure: Figure) -> str:
    """Returns the link of docs/performance.md to a figure."""
    return f"performance/{figure.topic}.md#{anchor(figure.title)}"


def recorded(directory: Path = ROWS) -> Iterator[Figure]:
    """Returns the figures that have rows."""
    return (figure for figure in FIGURES if rows_of(figure, directory))


def section(figure: Figure, rows: Sequence[Row]) -> str:
    """Returns the section of a figure: text, table, missed targets, plot, details."""
    parts = [f"## {figure.title}\n", f"{figure.text}\n", f"{figures(figure, rows)}\n"]
    if figure.limit and missed(rows):
        parts.append(f"**Missed target.** {figure.limit}\n")
    parts.append(f"![{figure.title}]({figure.name}.svg)\n")
    parts.append('<details markdown="1">')
    parts.append("<summary>Details, machine and command</summary>\n")
    if details := more_of(figure, rows):
        parts.append(f"{details}\n")
    parts.append(f"{circumstances(rows)}\n")
    parts.append("</details>\n")
    return "\n".join(parts)


def figures(figure: Figure, rows: Sequence[Row]) -> str:
    """Returns the narrow table of a figure: medians of two sides, and the target."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        (unit_of(rows), figure.label_of),
        *((name, _field(field)) for field, name in list(figure.sides.items())[:2]),
        ("target", target),
    ]
    return columns_of(columns, rows)


def more_of(figure: Figure, rows: Sequence[Row]) -> str:
    """Returns the table of all other values of a figure, or "" without such values."""
    sides = list(figure.sides.items())
    columns: list[tuple[str, Callable[[Row], str]]] = [
        *((f"{name}, p95", _late(field)) for field, name in sides[:2]),
        *((name, _side(field)) for field, name in sides[2:]),
        ("rounds", lambda row: rounds(row, figure)),
        ("ratio", lambda row: number(row.get("ratio"))),
        ("ratio of pairs", lambda row: number(row.get("ratio_of_pairs"))),
        *((name, _field(field)) for field, name in figure.more.items()),
    ]
    text = columns_of([(unit_of(rows), figure.label_of), *columns], rows)
    return text if columns_of(columns, rows) else ""


def unit_of(rows: Sequence[Row]) -> str:
    """Returns the heading of the first column: the units of the rows."""
    units = ", ".join(dict.fromkeys(row["unit"] for row in rows if "unit" in row))
    return f"in {units}" if units else "case"


def columns_of(
    columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]
) -> str:
    """Returns a table. A column without values is left out.

    Args:
        columns: headings, and functions that return the cell of a row.
        rows: rows of the table.
    """
    shown = [
        (name, cells)
        for name, cell in columns
        if set(cells := [cell(row) for row in rows]) != {NOTHING}
    ]
    lines = zip(*(cells for _, cells in shown), strict=True)
    return table([n for n, _ in shown], [list(each) for each in lines]) if shown else ""


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _side(field: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        median, late = number(row.get(field)), row.get(f"{field}_p95")
        has_many = late is not None and len(row.get(f"{field}_all", "many")) > 1
        return f"{median}, p95 {number(late)}" if has_many else median

    return cell


def _late(field: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        has_many = len(row.get(f"{field}_all", "many")) > 1
        return number(row.get(f"{field}_p95")) if has_many else NOTHING

    return cell


def _field(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value: Any = row
        for part in name.split("."):
            value = value.get(part, {})
        return NOTHING if value == {} else number(value)

    return cell


def rounds(row: Row, figure: Figure) -> str:
    """Returns the number of samples of the first side."""
    for field in figure.sides:
        if f"{field}_samples" in row:
            return number(row[f"{field}_samples"])
        if f"{field}_all" in row:
            return number(len(row[f"{field}_all"]))
    return NOTHING


def number(value: Any) -> str:
    """Returns a value as a cell: at least three significant digits, or yes and no."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def target(row: Row) -> str:
    """Returns the value that has a target, compared with the target.

    A row without a target has its ratio instead.
    """
    if "bar" not in row:
        return f"ratio {number(row['ratio'])}" if "ratio" in row else NOTHING
    field = row["bar_of"]
    name = TARGETS.get(field, field.replace("_", " "))
    sign = "≤" if row[field] <= row["bar"] else ">"
    text = f"{name} {number(row[field])} {sign} {number(row['bar'])}"
    return text if row["ok"] else f"**missed: {text}**"


def targets_met(rows: Sequence[Row]) -> str:
    """Returns how many rows meet their target."""
    held = [row["ok"] for row in rows if "ok" in row]
    if not held:
        return "no target"
    text = f"{sum(held)} of {len(held)} met"
    return text if all(held) else f"**{text}**"


def missed(rows: Sequence[Row]) -> bool:
    """Returns whether a row misses its target."""
    return not all(row.get("ok", True) for row in rows)


def circumstances(rows: Sequence[Row]) -> str:
    """Returns each command, with its machine and date."""
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
    """Returns the anchor of a heading."""
    kept = (letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return "".join(kept).replace(" ", "-")


def main() -> None:
    """Writes the pages and all plots; names the targets missed without a reason."""
    from tests.docs import plots  # needs matplotlib

    for path, text in pages().items():
        (DOCS / path).write_text(text, encoding="utf-8")
    for figure in recorded():
        rows = rows_of(figure)
        plots.draw(figure, rows, ROWS / f"{figure.name}.svg", digest(rows))
        if missed(rows) and not figure.limit:
            print(
                f"{figure.name}: a target is missed; write the reason as the `limit` "
                "of the figure in tests/docs/figures.py",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
