"""A story's page: one file that opens offline, light and dark, without a script."""

from __future__ import annotations

import datetime
from importlib import resources

from tfpreempt.cli.report import view
from tfpreempt.cli.report.goodput import MEANINGS, PLAINLY
from tfpreempt.cli.report.lives import Phase
from tfpreempt.cli.report.story import Interruption, Story
from tfpreempt.cli.sizes import seconds_text, size_text
from tfpreempt.core.loading import to_install
from tfpreempt.errors import ConfigurationError

_ZOOMED = 12
"""Interruptions of which a timeline of their own is drawn."""

_CURVES = 24
_ROWS = 500  # of the table of commits


def make_page(story: Story, place: str) -> str:
    """The page of a story, as HTML.

    Args:
        story: to tell.
        place: where it was read from, for the title.

    Raises:
        ConfigurationError: what draws it is not installed.
    """
    try:
        import jinja2
        import markupsafe

        from tfpreempt.cli.report import plots
    except ImportError as error:
        raise ConfigurationError(
            f"--html needs {error.name}, which is not installed. Install what it is "
            f"drawn with: {to_install('report')}"
        ) from error
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds_text, "size": size_text}
    template = resources.files("tfpreempt.cli.report").joinpath("page.html")
    svg = markupsafe.Markup  # ours: what it holds of others is escaped already
    begin, end = story.begin, max(story.end, story.begin + 1e-3)
    seen = {span.phase for worker in story.workers for span in worker.spans}
    measured = {name: v for name, v in story.durations.items() if v}
    curves = list(story.metrics.items())
    zooms = [
        svg(plots.timeline(story, *_around(story, each)))
        for each in story.interruptions[-_ZOOMED:]
    ]
    told = environment.from_string(template.read_text(encoding="utf-8")).render(
        story=story,
        place=place,
        began=datetime.datetime.fromtimestamp(begin, datetime.timezone.utc),
        headline=view.headline(story),
        written=view.written(story),
        account=[
            ("good", "steps that were kept", story.account.good, "goodput", _GOOD),
            *(
                (f"bad-{k.name.lower()}", PLAINLY[k], s, k.value, MEANINGS[k])
                for k, s in story.account.bad.items()
            ),
        ],
        account_plot=svg(plots.account(story.account)),
        phases=[phase.value for phase in Phase if phase in seen],
        timeline=svg(plots.timeline(story, begin, end)),
        hidden=max(0, len(story.workers) - plots.WORKERS),
        columns=view.COLUMNS,
        interruptions=(rows := [view.cells(e, begin) for e in story.interruptions]),
        folded=max(0, len(rows) - view.SHOWN),
        zooms=zooms,
        curves=[
            (
                name,
                svg(plots.curve(story, name, points, by_step=False)),
                svg(plots.curve(story, name, points, by_step=True)),
            )
            for name, points in curves[:_CURVES]
        ],
        other_curves=[name for name, _ in curves[_CURVES:]],
        durations_plot=svg(plots.durations(measured)) if measured else "",
        durations={name: view.spread(values) for name, values in measured.items()},
        commits=story.commits[-_ROWS:],
    )
    return str(told)


_GOOD = "training that later starts, or the end, went on from"


def _around(story: Story, each: Interruption) -> tuple[float, float]:
    """The time that an interruption's own timeline shows."""
    away = each.away_seconds
    until = story.end if away is None else each.at + away
    margin = max(0.5, 0.15 * (until - each.at))
    return max(story.begin, each.at - margin), min(story.end, until + margin)
