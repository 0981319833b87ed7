"""Random schedules of the simulated cluster, which runs the real coordinator."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from campaigns.campaign import Campaign, Facts, Trial, silent
from tests.cluster.schedules import draw
from tests.cluster.test_schedules import run

EACH = 500


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: hides thousands of warnings, which are correct here."""
    with silent():
        yield trial


def trial(rng: random.Random) -> Facts:
    """Runs many schedules: each takes a millisecond or two."""
    for _ in range(EACH):
        run(draw(random.Random(rng.getrandbits(64))))
    return {"schedules": EACH}


CAMPAIGN = Campaign(
    name="schedules",
    promise=(
        "A simulated cluster has notices, deaths, freezes, errors and failing saves "
        "at random moments, 500 schedules in a trial. The workers agree on one "
        "step, no worker waits for ever, and no worker ends as finished while "
        "another worker restarts."
    ),
    trials=200,
    short=1,
    mark="slow",
    prepare=prepare,
    fixed=(
        "A periodic save had failed, or was asynchronous. A worker that was still "
        "many steps before the boundary of this save did not answer a notice until it "
        "reached the boundary, so the other workers treated this worker as crashed. "
        "Fixed (`cluster/test_schedules.py`).",
        "After a notice with a long grace period, the run was about to commit and "
        "then to continue training. Before this commit, another machine announced "
        "that it had only seconds left. Nevertheless the run continued after the "
        "commit, instead of exiting. Too little time was left for a second commit, so "
        "the second commit lacked the part of a worker. Fixed "
        "(`cluster/test_schedules.py`).",
        "After a notice, the workers agreed on a step without a slow worker that had "
        "not answered in time. The slow worker exited, to be restarted. The steps of "
        "this run needed no collectives, so the other workers trained to the end, "
        "instead of exiting. So the slow worker was restarted without peers. Fixed "
        "(`cluster/test_schedules.py`).",
    ),
)
