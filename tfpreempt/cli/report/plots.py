"""Draws the plots of the HTML page with matplotlib, as SVG.

matplotlib draws with placeholder colours. The placeholders are then replaced by CSS
variables of the page, so a plot has the right colours in the light and the dark style.
"""

from __future__ import annotations

import dataclasses
import html
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfpreempt.cli.report.goodput import PLAINLY, Badput, GoodputBreakdown
from tfpreempt.cli.report.process_spans import MADE_STEPS, Phase, Span
from tfpreempt.cli.report.run_report import Point, ReportedWorker, RunReport
from tfpreempt.cli.sizes import seconds_text
from tfpreempt.core.log_output import plain

WORKERS = 32
"""Largest number of workers in a timeline."""

_CELLS = 800  # cells (columns) of a worker's row; more cells could not be seen
_CELLS_OF_ALL = 8000  # cells of all workers together, to limit the size of the page
_TITLE = 100  # characters of a metric's name that are drawn
_POINTS = 1500  # largest number of points in a curve
_LINES = 50  # if there are more interruptions, ticks are drawn, not lines
_DOTS = 300  # if a row has more durations, so many of their quantiles are drawn
_INCHES = 9.0
_LANE = 0.34  # height of a worker's row in inches
_NAMES = ["ink", "rule", "mark", "good", *Phase]
_NAMES += [f"bad-{kind.name.lower()}" for kind in Badput]
_COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(_NAMES, start=1)}
_INK, _RULE = _COLOURS["ink"], _COLOURS["rule"]
_STYLE: Any = {  # Any: in matplotlib's type hints the keys are one long Literal
    "axes.edgecolor": _RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "tfpreempt",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.color": _RULE,
    "ytick.labelcolor": _INK,
}
_UNITS = ((7200.0, 3600.0, "hours"), (240.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """A time axis that begins at the start of the run.

    Attributes:
        begin: start of the run, in seconds since the epoch.
        unit: length of the axis' unit in seconds.
        name: name of the unit, such as "hours".
    """

    begin: float
    unit: float
    name: str

    @classmethod
    def of(cls, report: RunReport, seconds: float) -> _Axis:
        """Returns the axis for a plot that shows `seconds` of a run."""
        unit, name = next((u, n) for least, u, n in _UNITS if seconds >= least)
        return cls(begin=report.begin, unit=unit, name=name)

    def at(self, time: Any) -> Any:
        """Returns the position of a time, or of an array of times, on the axis."""
        return (time - self.begin) / self.unit


def timeline(report: RunReport, begin: float, end: float) -> str:
    """Draws the phases of every worker, and marks the interruptions.

    Args:
        report: report of the run.
        begin: begin of the plot, in seconds since the epoch.
        end: end of the plot, in seconds since the epoch.
    """
    workers = report.workers[:WORKERS]
    axis, titles = _Axis.of(report, end - begin), {}
    edges = np.linspace(begin, end, min(_CELLS, _CELLS_OF_ALL // len(workers)) + 1)
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.62 + _LANE * len(workers), above=0.08)
        for row, worker in enumerate(workers):
            by_phase = _by_phase(worker, begin, end)
            for phase, heights in _heights(by_phase, edges).items():
                spans, name = by_phase[phase], f"span-{row}-{phase}"
                at = [0, *np.flatnonzero(np.diff(heights).any(axis=0)) + 1]
                x = np.repeat(axis.at(edges[[*at, -1]]), 2)[1:-1]
                low, high = np.repeat(row + 0.38 - 0.76 * heights[:, at], 2, axis=1)
                colour = _COLOURS[phase]
                outline = [*x, *x[::-1]], [*high, *low[::-1]]
                axes.fill(*outline, color=colour, lw=0, gid=name)
                took = seconds_text(sum(each.seconds for each in spans))
                often = f" in {len(spans)} spans" if len(spans) > 1 else ""
                titles[name] = f"worker {worker.index}, {phase}: {took}{often}"
        marks = [each.at for each in report.interruptions if begin <= each.at <= end]
        _mark(axes, [axis.at(each) for each in marks], "-")
        axes.set_yticks(
            range(len(workers)), [f"worker {worker.index}" for worker in workers]
        )
        axes.set_ylim(len(workers) - 0.5, -0.5 if len(marks) <= _LINES else -0.8)
        axes.set_xlim(axis.at(begin), axis.at(end))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"{axis.name} since the start of the run")
        return _to_svg(figure, titles)


def account(breakdown: GoodputBreakdown) -> str:
    """Draws goodput and badput as a single bar."""
    shares = {"good": ("kept steps", breakdown.good)}
    shares |= {
        f"bad-{kind.name.lower()}": (PLAINLY[kind], seconds)
        for kind, seconds in breakdown.bad.items()
    }
    titles, left = {}, 0.0
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.8)
        for name, (text, seconds) in shares.items():
            share = 100 * seconds / breakdown.total if breakdown.total else 0.0
            colour = _COLOURS[name]
            axes.broken_barh([(left, share)], (0, 1), facecolors=colour, gid=name)
            titles[name] = f"{text}: {seconds_text(seconds)}, {share:.1f} %"
            left += share
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("% of the time of all workers")
        return _to_svg(figure, titles)


def curve(
    report: RunReport, name: str, points: Sequence[Point], *, by_step: bool
) -> str:
    """Draws a metric over steps or over time, and marks the interruptions.

    Args:
        report: report of the run.
        name: name of the metric.
        points: points of the metric.
        by_step: whether the x axis has steps; if False, it has the time.
    """
    axis = _Axis.of(report, report.seconds)
    times, steps, values = np.array(points).T
    if len(times) > _POINTS:
        chosen = np.linspace(0, len(times) - 1, _POINTS).astype(int)
        times, steps, values = times[chosen], steps[chosen], values[chosen]
    marks = [each.at for each in report.interruptions]
    cuts = np.searchsorted(times, marks)  # interrupt the curve at every interruption
    if by_step:
        x, at = steps, _steps_at(report, name, steps, cuts)
        label = "logged step"
    else:
        x, at = (times - axis.begin) / axis.unit, [axis.at(each) for each in marks]
        label = f"{axis.name} since the start of the run"
    x, values = (np.insert(each, cuts, np.nan) for each in (x, values))
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(2.3, above=0.27)
        few = "o" if len(x) < 80 else ""
        axes.plot(x, values, few + "-", color=_COLOURS["good"], lw=1.5, ms=3)
        padded = np.concatenate([[np.nan], values, [np.nan]])
        # Points without a neighbour have no line, so draw them as dots.
        is_alone = np.isnan(padded[:-2]) & np.isnan(padded[2:])
        lone = x[is_alone], values[is_alone]
        axes.plot(*lone, "o", color=_COLOURS["good"], ms=3 if few else 1.5)
        # Use the range of the timeline; extend it if points lie outside.
        if not by_step:
            least, most = min(0.0, np.nanmin(x)), max(axis.at(report.end), np.nanmax(x))
            if most > least:
                axes.set_xlim(least, most)
        _mark(axes, at, (0, (4, 3)))
        axes.grid(True, axis="y")
        axes.set_title(plain(name[:_TITLE]), loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(label)
        return _to_svg(figure)


def _steps_at(
    report: RunReport, name: str, steps: np.ndarray, cuts: np.ndarray
) -> list[float]:
    """Returns the positions on the step axis at which interruptions are marked.

    A metric from the journal has the step numbers of the run, so the mark is at the
    step of the interruption. A step of TensorBoard may mean something else, such as an
    epoch, so the mark is between the last point before the interruption and the first
    point after the interruption.

    Args:
        report: report of the run.
        name: name of the metric.
        steps: steps of the metric's points.
        cuts: for every interruption, the number of points before the interruption.
    """
    at: list[float] = []
    for each, cut in zip(report.interruptions, cuts, strict=True):
        if name in report.own_metrics and each.step is not None:
            at.append(each.step)
        elif cut:
            after = steps[min(cut, len(steps) - 1)]
            at.append(float(steps[cut - 1] + after) / 2)
    return at


def _mark(axes: Axes, at: Sequence[float], style: Any) -> None:
    """Marks interruptions: by lines; if there are many, by ticks at the top.

    Args:
        axes: plot to draw into.
        at: positions of the interruptions on the x axis.
        style: line style of matplotlib, for lines.
    """
    is_line = len(at) <= _LINES
    least, colour = 0.0 if is_line else 0.94, _COLOURS["mark"]
    width, style = (1.0, style) if is_line else (0.6, "-")
    for each in at:
        axes.axvline(each, least, color=colour, lw=width, ls=style, zorder=3)


def durations(measured: Mapping[str, Sequence[float]]) -> str:
    """Draws a row for every kind of duration: dots, and the median.

    Args:
        measured: durations in seconds, at least one of each kind, by name of the kind.
    """
    every = [value for values in measured.values() for value in values]
    is_log = min(every) > 0 and max(every) > 20 * min(every)
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.75 + 0.4 * len(measured))
        for row, values in enumerate(measured.values()):
            count = min(len(values), _DOTS)
            dots = np.quantile(values, np.linspace(0, 1, count))
            # Spread the dots vertically, so that equal values do not hide each other.
            spread = [row + 0.22 * ((7 * n) % 11 - 5) / 5 for n in range(count)]
            axes.plot(dots, spread, "o", color=_COLOURS["good"], ms=4, alpha=0.55)
            middle = float(np.median(values))
            axes.plot([middle] * 2, [row - 0.36, row + 0.36], color=_INK, lw=1.6)
        axes.set_yticks(range(len(measured)), list(measured))
        axes.set_ylim(len(measured) - 0.5, -0.5)
        if is_log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: seconds_text(value))
            axes.set_xlabel("time (logarithmic); a line is the median")
        else:
            axes.set_xlim(left=0)
            axes.set_xlabel("seconds; a line is the median")
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.set_axisbelow(True)
        return _to_svg(figure)


def _figure(inches: float, *, above: float | None = None) -> tuple[Figure, Axes]:
    """Returns a figure with one plot.

    Args:
        inches: height of the figure.
        above: inches reserved for a title above the axes. If a number is given, the
            left and right ends of the axes are the same in every figure. None:
            automatic layout.
    """
    if above is None:
        figure = Figure(figsize=(_INCHES, inches), layout="constrained")
        return figure, figure.subplots()
    figure = Figure(figsize=(_INCHES, inches))
    figure.subplots_adjust(0.085, 0.48 / inches, 0.985, 1 - above / inches)
    return figure, figure.subplots()


def _by_phase(
    worker: ReportedWorker, begin: float, end: float
) -> dict[Phase, list[Span]]:
    """Returns, for every phase, a worker's spans between two times.

    A span that begins before `begin` or ends after `end` is cut.
    """
    found: dict[Phase, list[Span]] = {phase: [] for phase in Phase}
    for span in worker.spans:
        if span.begin < end and span.end > begin:
            first, last = max(begin, span.begin), min(end, span.end)
            cut = dataclasses.replace(span, begin=first, end=last)
            found[span.phase].append(cut)
    return {phase: spans for phase, spans in found.items() if spans}


def _heights(
    by_phase: Mapping[Phase, Sequence[Span]], edges: np.ndarray
) -> dict[Phase, np.ndarray]:
    """Returns where every phase is drawn in the cells of a worker's row.

    A cell is a short interval of time, in which the phases are stacked. The height of a
    phase is its share of the interval. So the area of a phase is proportional to the
    time in the phase, even if single spans are too short to be seen. The phases with
    steps are at the bottom.

    Args:
        by_phase: for every phase, the spans of a worker, in order.
        edges: times of the cells' edges; the cells have equal widths.

    Returns:
        For each phase, an array with two rows: the lower and the upper end of the phase
        in every cell, from 0 to 1. Both are 0 in a cell without the phase.
    """
    found, low = {}, np.zeros(len(edges) - 1)
    for phase in sorted(by_phase, key=lambda each: each not in MADE_STEPS):
        spans = by_phase[phase]
        times = [edges[0], *(at for each in spans for at in (each.begin, each.end))]
        spent = [0.0, *(s for each in spans for s in (0.0, each.seconds))]
        until = np.interp(edges, times, np.cumsum(spent))
        high = (low + np.diff(until) / np.diff(edges)).round(6)
        found[phase] = np.array([low, high]) * (high > low)
        low = high
    return found


def _to_svg(figure: Figure, titles: Mapping[str, str] | None = None) -> str:
    """Converts a figure to an SVG element for a page with several figures.

    Args:
        figure: figure to convert.
        titles: tooltips of shapes, by the shape's gid (id in the SVG).
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    drawn = file.getvalue()
    svg = drawn[drawn.index("<svg") :]
    for name, text in (titles or {}).items():
        group = f'<g id="{name}">'
        svg = svg.replace(group, f"{group}<title>{html.escape(text)}</title>")
    prefix = f"p{zlib.crc32(svg.encode()):08x}-"  # makes the ids unique in the page

    def adapt(tag: re.Match[str]) -> str:
        own = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", tag[0])
        return re.sub("#0000([0-9a-f]{2})", _variable, own)

    svg = re.sub(r"<[a-z][^<>]*>", adapt, svg)  # text between tags stays
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg)
    return re.sub(r'^(<svg [^>]*?)height="[^"]*"', r"\1", svg)


def _variable(match: re.Match[str]) -> str:
    return f"var(--{_NAMES[int(match[1], 16) - 1]})"
