"""Formats the report as an HTML page: one file, without scripts, usable offline."""

from __future__ import annotations

import datetime
from importlib import resources

from tfpreempt.cli.report import view
from tfpreempt.cli.report.goodput import MEANINGS, PLAINLY
from tfpreempt.cli.report.process_spans import Phase
from tfpreempt.cli.report.run_report import Interruption, RunReport
from tfpreempt.cli.sizes import seconds_text, size_text
from tfpreempt.core.lazy_import import to_install
from tfpreempt.core.log_output import plain
from tfpreempt.errors import ConfigurationError

_ZOOMED = 12
"""Number of interruptions for which a separate timeline is drawn."""

_CURVES = 24  # largest number of metrics for which curves are drawn
_ROWS = 500  # largest number of rows in the table of commits


def make_page(report: RunReport, source: str) -> str:
    """Returns the HTML page for a report.

    Args:
        report: report to show.
        source: path or URI of the run, for the title.

    Raises:
        ConfigurationError: jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
        import markupsafe

        from tfpreempt.cli.report import plots
    except ImportError as error:
        raise ConfigurationError(
            f"--html needs {error.name}, which is not installed. Install the packages "
            f"for drawing: {to_install('report')}"
        ) from error
    environment = jinja2.Environment(
        autoescape=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds_text, "size": size_text}
    template = resources.files("tfpreempt.cli.report").joinpath("page.html")
    # Do not escape: `plots` has escaped the user's text in its SVG.
    svg = markupsafe.Markup
    begin, end = report.begin, max(report.end, report.begin + 1e-3)
    seen = {span.phase for worker in report.workers for span in worker.spans}
    measured = {name: v for name, v in report.durations.items() if v}
    curves = list(report.metrics.items())
    zooms = [
        svg(plots.timeline(report, *_around(report, each)))
        for each in report.interruptions[-_ZOOMED:]
    ]
    page = environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        source=source,
        began=datetime.datetime.fromtimestamp(begin, datetime.timezone.utc),
        headline=view.headline(report),
        written=view.written(report),
        account=[
            ("good", "kept steps", report.account.good, "goodput", _GOOD),
            *(
                (f"bad-{k.name.lower()}", PLAINLY[k], s, k.value, MEANINGS[k])
                for k, s in report.account.bad.items()
            ),
        ],
        idle=view.IDLE if report.idle_seconds > view.LEAST_IDLE else "",
        account_plot=svg(plots.account(report.account)),
        phases=[phase for phase in Phase if phase in seen],
        timeline=svg(plots.timeline(report, begin, end)),
        hidden=max(0, len(report.workers) - plots.WORKERS),
        columns=view.COLUMNS,
        interruptions=(rows := [view.cells(e, begin) for e in report.interruptions]),
        folded=max(0, len(rows) - view.SHOWN),
        zooms=zooms,
        curves=[
            (
                name,
                svg(plots.curve(report, name, points, by_step=False)),
                svg(plots.curve(report, name, points, by_step=True)),
            )
            for name, points in curves[:_CURVES]
        ],
        other_curves=[name for name, _ in curves[_CURVES:]],
        durations_plot=svg(plots.durations(measured)) if measured else "",
        durations={
            name: view.distribution(values) for name, values in measured.items()
        },
        commits=report.commits[-_ROWS:],
    )
    return str(page)


_GOOD = "steps that are part of the result of the run"


def _around(report: RunReport, each: Interruption) -> tuple[float, float]:
    """Returns the begin and the end of the timeline of an interruption."""
    resumed = each.resumed_seconds
    until = report.end if resumed is None else each.at + resumed
    margin = max(0.5, 0.15 * (until - each.at))
    return max(report.begin, each.at - margin), min(report.end, until + margin)
