"""Makes the last part of docs/reliability.md of the summaries in docs/reliability/.

Usage: python -m tests.docs.reliability. The summaries are what `make campaign` left
there; the rest is what each campaign says of itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from campaigns.__main__ import CAMPAIGNS
from campaigns.campaign import Campaign
from tests.docs.performance import DOCS, number, table

PAGE = DOCS / "reliability.md"
SUMMARIES = DOCS / "reliability"

HEAD = """\
## Campaigns

What was done to tfpreempt at random, how often, and how often a promise was broken. Of
each campaign a short form is part of `make test-all`, with another seed each time;
`make campaign` runs all of them in full, goes on where it was cut off, and makes this
part of the page of what it finds. A fault is fixed, and stays as a test. The
last column names the commits that were tried.
"""

COLUMNS = (
    "campaign",
    "trials",
    "of",
    "faults",
    "fixed before",
    "minutes",
    "seed",
    "code",
)
FIXED = {"campaign", "seed", "trials", "faults", "seconds", "code"}


def page(directory: Path = SUMMARIES) -> str:
    """The whole page; a campaign that has no summary is left out."""
    written, _, _ = PAGE.read_text("utf-8").partition(HEAD.splitlines()[0])
    found = [
        (campaign, json.loads(path.read_text("utf-8")))
        for name, campaign in CAMPAIGNS.items()
        if (path := directory / f"{name}.json").exists()
    ]
    overview = table(COLUMNS, [line(*each) for each in found])
    return written + "\n".join(
        [HEAD, overview, "", *(section(*each) for each in found)]
    )


def line(campaign: Campaign, summary: dict[str, Any]) -> list[str]:
    """A campaign in the table."""
    faults = summary["faults"]
    return [
        f"[{campaign.name}](#{campaign.name})",
        number(summary["trials"]),
        number(campaign.trials),
        f"**{faults}**" if faults else "0",
        number(len(campaign.fixed)),
        number(round(summary["seconds"] / 60)),
        f"{summary['seed']}",
        ", ".join(f"`{commit}`" for commit in summary["code"]),
    ]


def section(campaign: Campaign, summary: dict[str, Any]) -> str:
    """What a campaign does and promises, what its trials were, what it found."""
    facts = {name: value for name, value in summary.items() if name not in FIXED}
    kinds = [
        f"- {name}: {counted(value) if isinstance(value, dict) else number(value)}"
        for name, value in facts.items()
    ]
    parts = [f"### {campaign.name}\n\n{campaign.promise}\n", "\n".join(kinds) + "\n"]
    if campaign.fixed:
        parts.append("Found, and fixed:\n")
        parts.append("\n".join(f"- {each}" for each in campaign.fixed) + "\n")
    return "\n".join(parts)


def counted(kinds: dict[str, int]) -> str:
    """How many trials were of which kind."""
    return ", ".join(f"{kind} {number(count)}" for kind, count in kinds.items())


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
