"""Runs campaigns; prints a line of JSON for each trial, and a summary of each campaign.

Usage: python -m campaigns [--trials N] [--seed S] [--record DIR] [NAME ...]

With --record DIR the lines are appended to DIR/NAME.jsonl, and a summary is written to
DIR/NAME.json. Trials of the seed that are already in DIR/NAME.jsonl are not run again,
so an interrupted campaign continues. By default the seed is the seed of the last line
of the file; without a line, the seed is new. `--seed S --only NUMBER NAME` repeats one
trial. The exit code is 1 if a trial has found a fault.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from benchmarks.row import show
from campaigns import (
    crowd,
    damage,
    deadlines,
    disks,
    fits,
    fuzz,
    kills,
    notices,
    peers,
    power,
    schedules,
    soak,
    stores,
    year,
)
from campaigns.campaign import Campaign, Line, Record

CAMPAIGNS: dict[str, Campaign] = {
    campaign.name: campaign
    for campaign in (
        schedules.CAMPAIGN,
        damage.CAMPAIGN,
        fuzz.CAMPAIGN,
        fits.CAMPAIGN,
        kills.CAMPAIGN,
        kills.JAX_CAMPAIGN,
        power.CAMPAIGN,
        disks.CAMPAIGN,
        stores.CAMPAIGN,
        notices.CAMPAIGN,
        notices.JAX_CAMPAIGN,
        peers.CAMPAIGN,
        peers.JAX_CAMPAIGN,
        crowd.CAMPAIGN,
        deadlines.CAMPAIGN,
        soak.CAMPAIGN,
        year.CAMPAIGN,
    )
}


def main() -> None:
    """Runs the named campaigns, or all campaigns."""
    parser = argparse.ArgumentParser(prog="python -m campaigns")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(CAMPAIGNS)}"
    )
    parser.add_argument("--trials", type=int, help="by default as many as each has")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this trial alone")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--record", type=Path, metavar="DIR")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(CAMPAIGNS):
        parser.error(f"no campaign {sorted(unknown)}; see --help")
    has_fault = False
    for name in asked.names or CAMPAIGNS:
        campaign = CAMPAIGNS[name]
        numbers = range(asked.trials or campaign.trials)
        if asked.only is not None:
            numbers = range(asked.only, asked.only + 1)
        record = Record(asked.record, campaign) if asked.record else None
        lines = run(campaign, numbers, asked.seed, asked.jobs, record)
        show(campaign.summary(lines))
        has_fault |= any(line["fault"] for line in lines)
    sys.exit(has_fault)


def run(
    campaign: Campaign,
    numbers: range,
    seed: int | None,
    jobs: int,
    record: Record | None,
) -> list[Line]:
    """Yields all lines of one campaign; the lines of the record are included."""
    known = record.lines(seed) if record else []
    if seed is None:
        seed = known[-1]["seed"] if known else random.SystemRandom().getrandbits(32)
    lines = [line for line in known if line["seed"] == seed]
    done = {line["trial"] for line in lines}
    wanted = [(seed, number) for number in numbers if number not in done]
    for line in campaign.run(wanted, jobs) if wanted else ():
        show(line)
        lines.append(line)
        if record:
            record.add(line)
            record.sum_up(seed)
    return lines


if __name__ == "__main__":
    main()
