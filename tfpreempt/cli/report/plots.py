"""The plots of a story, as SVG by matplotlib whose colours follow the page.

Each is drawn with colours that stand for names, and in the SVG these become variables
of the page's style: so one plot serves light and dark.
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

from tfpreempt.cli.report.goodput import PLAINLY, Account, Badput
from tfpreempt.cli.report.lives import Phase, Span
from tfpreempt.cli.report.story import Point, Story, Worker
from tfpreempt.cli.sizes import seconds_text

WORKERS = 32
"""Workers of which a timeline is drawn."""

_SEEN = 1500  # parts of a timeline's width that can be told apart
_POINTS = 1500  # of a curve
_INCHES = 9.0
_LANE = 0.34  # inches of a worker
_NAMES = ["ink", "rule", "mark", "good", *(phase.value for phase in Phase)]
_NAMES += [f"bad-{kind.name.lower()}" for kind in Badput]
_COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(_NAMES, start=1)}
_INK, _RULE = _COLOURS["ink"], _COLOURS["rule"]
_STYLE: Any = {  # whose names matplotlib has as one long Literal
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
    """Time since the beginning of a run."""

    begin: float
    unit: float
    name: str

    @classmethod
    def of(cls, story: Story, seconds: float) -> _Axis:
        """For a plot that shows so many seconds of it."""
        unit, name = next((u, n) for least, u, n in _UNITS if seconds >= least)
        return cls(begin=story.begin, unit=unit, name=name)

    def at(self, time: float) -> float:
        """A time on the axis."""
        return (time - self.begin) / self.unit


def timeline(story: Story, begin: float, end: float) -> str:
    """What each worker did, from one time to another; interruptions are marked."""
    workers = story.workers[:WORKERS]
    axis, titles = _Axis.of(story, end - begin), {}
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.75 + _LANE * len(workers))
        for row, worker in enumerate(workers):
            for phase, spans in _by_phase(worker, begin, end).items():
                name = f"span-{row}-{phase.value}"
                axes.broken_barh(
                    [
                        (axis.at(first), (last - first) / axis.unit)
                        for first, last in _merged(spans, (end - begin) / _SEEN)
                    ],
                    (row - 0.38, 0.76),
                    facecolors=_COLOURS[phase.value],
                    edgecolor="none",
                    gid=name,
                )
                took = seconds_text(sum(each.seconds for each in spans))
                often = f" in {len(spans)} times" if len(spans) > 1 else ""
                titles[name] = f"worker {worker.index}, {phase.value}: {took}{often}"
        for each in story.interruptions:
            if begin <= each.at <= end:
                axes.axvline(axis.at(each.at), color=_COLOURS["mark"], lw=1, zorder=3)
        axes.set_yticks(
            range(len(workers)), [f"worker {worker.index}" for worker in workers]
        )
        axes.set_ylim(len(workers) - 0.5, -0.5)
        axes.set_xlim(axis.at(begin), axis.at(end))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"{axis.name} since the run began")
        return _to_svg(figure, titles)


def account(told: Account) -> str:
    """Goodput and badput as one bar."""
    shares = {"good": ("steps that were kept", told.good)}
    shares |= {
        f"bad-{kind.name.lower()}": (PLAINLY[kind], seconds)
        for kind, seconds in told.bad.items()
    }
    titles, left = {}, 0.0
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.8)
        for name, (text, seconds) in shares.items():
            share = 100 * seconds / told.total if told.total else 0.0
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


def curve(story: Story, name: str, points: Sequence[Point], *, by_step: bool) -> str:
    """A metric over its steps or over time, with the interruptions marked."""
    axis = _Axis.of(story, story.seconds)
    times, steps, values = np.array(points).T
    if len(times) > _POINTS:
        chosen = np.linspace(0, len(times) - 1, _POINTS).astype(int)
        times, steps, values = times[chosen], steps[chosen], values[chosen]
    marks = [each.at for each in story.interruptions]
    if by_step:
        x, at = steps, list(np.interp(marks, times, steps))
        label = "step that it was logged with"
    else:
        x, at = (times - axis.begin) / axis.unit, [axis.at(each) for each in marks]
        label = f"{axis.name} since the run began"
    cuts = np.searchsorted(times, marks)  # nothing was logged between the two
    x, values = (np.insert(each, cuts, np.nan) for each in (x, values))
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(2.3)
        few = "o" if len(x) < 80 else ""
        axes.plot(x, values, few + "-", color=_COLOURS["good"], lw=1.5, ms=3)
        for each in at:
            axes.axvline(each, color=_COLOURS["mark"], lw=1, ls=(0, (4, 3)))
        axes.grid(True, axis="y")
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(label)
        return _to_svg(figure)


def durations(measured: Mapping[str, Sequence[float]]) -> str:
    """A dot for each time, and a line at the median."""
    rows = {name: values for name, values in measured.items() if values}
    every = [value for values in rows.values() for value in values]
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.75 + 0.4 * len(rows))
        for row, values in enumerate(rows.values()):
            # Spread within the row, so that equal ones are seen.
            spread = [row + 0.22 * ((7 * n) % 11 - 5) / 5 for n in range(len(values))]
            axes.plot(values, spread, "o", color=_COLOURS["good"], ms=4, alpha=0.55)
            middle = float(np.median(values))
            axes.plot([middle] * 2, [row - 0.36, row + 0.36], color=_INK, lw=1.6)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        if min(every) > 0 and max(every) > 20 * min(every):
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


def _figure(inches: float) -> tuple[Figure, Axes]:
    """A figure of one plot, so many inches high."""
    figure = Figure(figsize=(_INCHES, inches), layout="constrained")
    return figure, figure.subplots()


def _by_phase(worker: Worker, begin: float, end: float) -> dict[Phase, list[Span]]:
    """A worker's spans from one time to another, cut off there; phases in order."""
    found: dict[Phase, list[Span]] = {phase: [] for phase in Phase}
    for span in worker.spans:
        if span.begin < end and span.end > begin:
            first, last = max(begin, span.begin), min(end, span.end)
            cut = dataclasses.replace(span, begin=first, end=last)
            found[span.phase].append(cut)
    return {phase: spans for phase, spans in found.items() if spans}


def _merged(spans: Sequence[Span], gap: float) -> list[tuple[float, float]]:
    """Where a phase begins and ends, without gaps that cannot be seen.

    What is in such a gap is drawn over it, if its phase comes later in their order.
    """
    merged: list[tuple[float, float]] = []
    for span in spans:
        if merged and span.begin - merged[-1][1] < gap:
            merged[-1] = merged[-1][0], span.end
        else:
            merged.append((span.begin, span.end))
    return merged


def _to_svg(figure: Figure, titles: Mapping[str, str] | None = None) -> str:
    """The SVG element, to stand in a page beside others.

    Args:
        figure: what was drawn.
        titles: what is shown of a shape where the mouse is over it, by its gid.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    drawn = file.getvalue()
    svg = drawn[drawn.index("<svg") :]
    for name, text in (titles or {}).items():
        group = f'<g id="{name}">'
        svg = svg.replace(group, f"{group}<title>{html.escape(text)}</title>")
    prefix = f"p{zlib.crc32(svg.encode()):08x}-"  # ids are those of a page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg)
    svg = re.sub(r'^(<svg [^>]*?)height="[^"]*"', r"\1", svg)
    return re.sub("#0000([0-9a-f]{2})", _variable, svg)


def _variable(match: re.Match[str]) -> str:
    return f"var(--{_NAMES[int(match[1], 16) - 1]})"
