"""Draws the plots of docs/performance.md: small, and readable on light and on dark.

The background is transparent, letters are letters and grey, and colours stand out from
both black and white.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from tests.docs.figures import Figure, Plot

Row = dict[str, Any]
GREY = "#7f7f7f"
COLOURS = ("#2f81f7", "#db6d28", "#2da44e", "#a371f7", GREY)
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "tfpreempt",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}
INCHES = 7.0
PARTS = {
    "useful_seconds": "useful steps",
    "lost_seconds": "lost steps",
    "saves_seconds": "saves",
    "way_out_seconds": "exit",
    "start_up_seconds": "start-up",
}


def draw(figure: Figure, rows: Sequence[Row], path: Path, digest: str) -> None:
    """Draws a figure into a file.

    Args:
        figure: figure to draw.
        rows: rows of the figure.
        path: path of the SVG file.
        digest: digest of the rows, which is written to the file to detect an old plot.
    """
    with mpl.rc_context(STYLE):
        canvas = Canvas(layout="constrained")
        DRAWN[figure.plot](canvas, figure, rows)
        canvas.savefig(
            path,
            format="svg",
            transparent=True,
            metadata={"Title": figure.title, "Description": digest, "Date": None},
        )


def dots(canvas: Canvas, figure: Figure, rows: Sequence[Row]) -> None:
    """Draws a line for each row: a dot at each median, and a line to the p95."""
    canvas.set_size_inches(INCHES, 0.9 + 0.24 * len(rows) * (len(figure.sides) + 0.6))
    axes = canvas.subplots()
    axes.set_xscale(figure.scale)
    height = 0.8 / len(figure.sides)
    for rank, (field, name) in enumerate(figure.sides.items()):
        colour = GREY if field == "raw" else COLOURS[rank]
        label = name.replace("`", "")
        for place, row in enumerate(rows):
            if row.get(field) is None:
                continue
            y = place + (rank - (len(figure.sides) - 1) / 2) * height
            late = row.get(f"{field}_p95", row[field])
            axes.plot([row[field], late], [y, y], color=colour)
            axes.plot(row[field], y, "o", color=colour, label=label)
            label = "_"  # one entry in the legend
    label = "bar"
    for place, row in enumerate(rows):
        if (value := _bar(row)) is not None:
            edges = place - 0.42, place + 0.42
            axes.plot([value] * 2, edges, "--", color=GREY, label=label)
            label = "_"
    axes.set_yticks(range(len(rows)), [figure.label_of(row) for row in rows])
    axes.invert_yaxis()
    if unit := rows[0].get("unit"):
        axes.set_xlabel(f"{unit}; a line ends at the 95th percentile")
    if figure.scale == "linear":
        axes.set_xlim(left=0)
    _finish(canvas, axes)


def _bar(row: Row) -> float | None:
    """Returns the position of the bar; None without a bar on this axis."""
    match row.get("bar_of"):
        case "ratio":
            return float(row["bar"] * row["theirs"])
        case "ours" | "ours_p95":
            return float(row["bar"])
        case _:
            return None


def lines(canvas: Canvas, figure: Figure, rows: Sequence[Row]) -> None:
    """Draws time over workers, without and with crashed workers."""
    canvas.set_size_inches(INCHES, 3.2)
    panels = canvas.subplots(1, 2, sharey=True)
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    styles = dict(zip(figure.sides, ("-", ":"), strict=True))
    for axes, has_dead in zip(panels, (False, True), strict=True):
        for protocol, colour in zip(protocols, COLOURS, strict=False):
            mine = [
                row
                for row in rows
                if row["protocol"] == protocol and (row["dead"] > 0) == has_dead
            ]
            for field, style in styles.items():
                points = [(r["workers"], r[field]) for r in mine if field in r]
                if points:
                    axes.plot(*zip(*points, strict=True), f"o{style}", color=colour)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="workers",
            title="one in a hundred is dead" if has_dead else "all live",
        )
        axes.grid(True, which="major")
    for protocol, colour in zip(protocols, COLOURS, strict=False):
        panels[0].plot([], [], "o-", color=colour, label=protocol)
    for field, style in styles.items():
        panels[0].plot([], [], style, color=GREY, label=figure.sides[field])
    panels[0].set_ylabel(f"{rows[0]['unit']}, median")
    _finish(canvas, panels[0])


def parts(canvas: Canvas, figure: Figure, rows: Sequence[Row]) -> None:
    """A bar for each row, of the parts of its wall time."""
    canvas.set_size_inches(INCHES, 1.0 + 0.3 * len(rows))
    axes = canvas.subplots()
    names = [figure.label_of(row) for row in rows]
    left = [0.0] * len(rows)
    for (field, name), colour in zip(PARTS.items(), COLOURS, strict=True):
        shares = [100 * row[field] / row["wall_seconds"] for row in rows]
        axes.barh(names, shares, left=left, color=colour, label=name, height=0.7)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the wall time")
    _finish(canvas, axes)


def _finish(canvas: Canvas, axes: Axes) -> None:
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    canvas.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=6
    )


DRAWN: dict[Plot, Callable[[Canvas, Figure, Sequence[Row]], None]] = {
    Plot.DOTS: dots,
    Plot.LINES: lines,
    Plot.PARTS: parts,
}
