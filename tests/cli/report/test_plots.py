"""The plots show the values of the report."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.cli.report.scripted import Scripted
from tests.cli.report.test_run_report import one_of_each
from tfpreempt.cli.report import plots
from tfpreempt.cli.report.run_report import RunReport

pytestmark = pytest.mark.slow  # imports matplotlib

POINT = re.compile(r"([ML]) ([-\d.]+) ([-\d.]+)|z")


def area(path: str) -> float:
    """Returns the total area of the polygons of an SVG path."""
    total = 0.0
    corners: list[tuple[float, float]] = []
    for found in POINT.finditer(path):
        if found[1] == "M" or found[0] == "z":
            for one, two in zip(corners, [*corners[1:], *corners[:1]], strict=True):
                total += (one[0] * two[1] - two[0] * one[1]) / 2
            corners = []
        if found[1]:
            corners.append((float(found[2]), float(found[3])))
    return abs(total)


def painted(report: RunReport, row: int = 0) -> dict[str, float]:
    """The share of a worker's lane that each phase has on the timeline."""
    svg = plots.timeline(report, report.begin, report.end)
    found = re.findall(rf'id="[^"]*span-{row}-(\w+)">.*?<path d="([^"]*)"', svg, re.S)
    corners = [each for _, path in found for each in POINT.findall(path) if each[0]]
    xs, ys = ([float(each[at]) for each in corners] for at in (1, 2))
    lane = (max(xs) - min(xs)) * (max(ys) - min(ys))
    return {phase: area(path) / lane for phase, path in found}


def shares(report: RunReport, row: int = 0) -> dict[str, float]:
    """Returns the share of each phase in a worker's time."""
    spans = report.workers[row].spans
    total = sum(span.seconds for span in spans)
    found: dict[str, float] = {}
    for span in spans:
        found[span.phase.value] = (
            found.get(span.phase.value, 0.0) + span.seconds / total
        )
    return found


def a_day() -> Scripted:
    """Healthy, with a commit a minute."""
    run = Scripted()
    run.start()
    for _ in range(25 * 60):
        run.train(118)
        run.save(0.5)
    run.finish()
    return run


def many_restarts(count: int = 100) -> Scripted:
    run = Scripted()
    run.start()
    for number in range(count):
        run.train(30)
        run.log(loss=1 / (number + 1))
        run.save(0.5)
        run.train(7)
        if number % 3 == 2:
            run.kill()
        else:
            run.preempt(worker=number % 2)
        run.down(5.0)
        run.start()
    run.train(20)
    run.finish()
    return run


@pytest.mark.parametrize("run", [one_of_each, a_day, many_restarts])
def test_each_phase_has_the_area_of_its_seconds(run: type[Scripted]) -> None:
    report = run().report()
    assert painted(report) == pytest.approx(shares(report), abs=0.002)


def marks(svg: str) -> list[float]:
    """Returns the positions of interruptions, in percent of the axis."""
    colour = re.escape("var(--mark)")
    found = re.findall(rf'<path d="M ([-\d.]+) [^"]*"[^>]*stroke: {colour}', svg)
    return [float(each) for each in found]


def test_a_curve_of_the_journal_marks_the_step_of_an_interruption() -> None:
    report = many_restarts(3).report()
    points = report.metrics["loss"]
    steps = np.array([each.step for each in report.interruptions], float)
    drawn = np.array(marks(plots.curve(report, "loss", points, by_step=True)))
    assert np.diff(drawn)[1] / np.diff(drawn)[0] == pytest.approx(
        np.diff(steps)[1] / np.diff(steps)[0], rel=0.01
    )


def test_a_curve_over_time_is_marked_where_the_timeline_is() -> None:
    report = many_restarts(3).report()
    points = report.metrics["loss"]
    begin, end = report.begin, report.end
    ats = [(each.at - begin) / (end - begin) for each in report.interruptions]
    drawn = marks(plots.curve(report, "loss", points, by_step=False))
    lane = marks(plots.timeline(report, begin, end))
    for row in (drawn, lane):
        share = (row[2] - row[0]) / (row[1] - row[0])
        assert share == pytest.approx((ats[2] - ats[0]) / (ats[1] - ats[0]), rel=0.01)


def test_very_many_times_are_counted_and_not_drawn_one_by_one() -> None:
    times = [0.1 + n % 97 / 1000 for n in range(20_000)] + [9.0]
    assert len(plots.durations({"save": times})) < 60_000


def test_of_a_very_long_name_of_a_metric_the_beginning_is_drawn() -> None:
    """A name of a megabyte took half a minute."""
    report = many_restarts(3).report()
    svg = plots.curve(report, 1000 * "a", report.metrics["loss"], by_step=False)
    assert 50 * "a" in svg
    assert 500 * "a" not in svg


def test_points_between_two_interruptions_each_are_seen() -> None:
    report = many_restarts(100).report()
    svg = plots.curve(report, "loss", report.metrics["loss"], by_step=False)
    assert len(re.findall(r"<use [^>]*fill: var\(--good\)|<use [^>]*good", svg)) >= 100
