"""Writes the campaigns of docs/reliability-tests.md, and docs/campaigns.md.

Usage: python -m tests.docs.reliability. `make campaign` leaves the summaries in
docs/reliability/, and the code of each campaign has the description.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.__main__ import CAMPAIGNS
from campaigns.campaign import Campaign
from tests.docs.performance import DOCS, number, table

PAGE = DOCS / "reliability-tests.md"
DETAILS = DOCS / "campaigns.md"
SUMMARIES = DOCS / "reliability"

HEAD = """\
## Campaigns

A campaign applies random faults and checks a promise after each trial. `make test-all`
runs a short form of each campaign with a new seed; `make campaign` runs the full form,
resumes an interrupted campaign, and writes the table below. A fault that was found is
fixed, and gets a test. [Campaigns](campaigns.md) has the promise, the trials and the
fixed faults of each campaign.
"""

DETAILS_HEAD = """\
# Campaigns

A campaign applies random faults to tfpreempt and checks a promise after each trial. The
[table of all campaigns](reliability-tests.md#campaigns) shows how many trials ran, and
how many broke the promise. `make campaign` writes both pages.

Each entry under "Faults found, all fixed" describes the behavior before the fix, and
names the tests that were added with the fix. The lists of trials have three kinds of
lines: the random seed and the Git commits of the code; sums over all trials; and the
number of trials of each kind. `python -m campaigns --seed S --only NUMBER NAME` repeats
one trial.
"""

COLUMNS = ("campaign", "trials of", "faults", "fixed before")
FIXED = {"campaign", "seed", "trials", "faults", "seconds", "code"}


def found(directory: Path) -> Iterator[tuple[Campaign, dict[str, Any]]]:
    """Yields each campaign that has a summary, with the summary."""
    for name, campaign in CAMPAIGNS.items():
        if (path := directory / f"{name}.json").exists():
            yield campaign, json.loads(path.read_text("utf-8"))


def page(directory: Path = SUMMARIES) -> str:
    """Returns docs/reliability-tests.md with its table of campaigns.

    Args:
        directory: the summaries.
    """
    written, _, _ = PAGE.read_text("utf-8").partition(HEAD.splitlines()[0])
    overview = table(COLUMNS, [line(*each) for each in found(directory)])
    return written + "\n".join([HEAD, overview, ""])


def details(directory: Path = SUMMARIES) -> str:
    """Returns docs/campaigns.md, with a section for each campaign.

    Args:
        directory: the summaries.
    """
    return "\n".join([DETAILS_HEAD, *(section(*each) for each in found(directory))])


def line(campaign: Campaign, summary: dict[str, Any]) -> list[str]:
    """Returns the row of a campaign in the table."""
    faults = summary["faults"]
    return [
        f"[{campaign.name}](campaigns.md#{campaign.name})",
        f"{number(summary['trials'])} of {number(campaign.trials)}",
        f"**{faults}**" if faults else "0",
        number(len(campaign.fixed)),
    ]


def section(campaign: Campaign, summary: dict[str, Any]) -> str:
    """Returns the promise, the trials and the fixed faults of a campaign."""
    facts = {name: value for name, value in summary.items() if name not in FIXED}
    facts = {campaign.labels.get(n, n): value for n, value in facts.items()}
    counts = {n: value for n, value in facts.items() if not isinstance(value, dict)}
    kinds = {n: value for n, value in facts.items() if isinstance(value, dict)}
    totals = "; ".join(f"{number(value)} {name}" for name, value in counts.items())
    minutes, trials = round(summary["seconds"] / 60), summary["trials"]
    commits = ", ".join(f"`{commit}`" for commit in summary["code"])
    run = [
        f"- {number(trials)} trial{'s' * (trials != 1)} in {number(minutes)} minutes; "
        f"seed {summary['seed']}; code {commits}",
        *([f"- sums over all trials: {totals}"] if totals else []),
        *(f"- trials by {name}: {counted(value)}" for name, value in kinds.items()),
    ]
    parts = [f"## {campaign.name}\n\n{campaign.promise}\n"]
    if campaign.fixed:
        parts.append("Faults found, all fixed:\n")
        parts.append("\n".join(f"- {each}" for each in campaign.fixed) + "\n")
    parts.append('<details markdown="1">\n<summary>Trials</summary>\n')
    parts.append("\n".join(run) + "\n\n</details>\n")
    return "\n".join(parts)


def counted(kinds: dict[str, int]) -> str:
    """Returns the number of trials of each kind."""
    return ", ".join(f"{number(count)} with `{kind}`" for kind, count in kinds.items())


def main() -> None:
    """Writes both pages."""
    PAGE.write_text(page(), encoding="utf-8")
    DETAILS.write_text(details(), encoding="utf-8")


if __name__ == "__main__":
    main()
