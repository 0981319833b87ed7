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
    """Without the warnings, which are right here: there are thousands of them."""
    with silent():
        yield trial


def trial(rng: random.Random) -> Facts:
    """Many schedules: one takes a millisecond or two."""
    for _ in range(EACH):
        run(draw(random.Random(rng.getrandbits(64))))
    return {"schedules": EACH}


CAMPAIGN = Campaign(
    name="schedules",
    promise=(
        "Notices, deaths, freezes, errors and failing saves at random moments of a "
        f"simulated cluster, {EACH} schedules in a trial: one step is agreed on, "
        "nobody waits for ever or leaves as finished while another one restarts."
    ),
    trials=200,
    short=1,
    mark="slow",
    prepare=prepare,
    fixed=(
        "A worker that was many steps from the boundary of a periodic save that had "
        "failed, or was asynchronous, answered no notice before it came there, and was "
        "taken for dead (`cluster/test_schedules.py`).",
        "While a machine with a long grace had its first commit made, the last call of "
        "another one came: that commit did not end the run, and there was hardly time "
        "for one more, which missed a worker's part (`cluster/test_schedules.py`).",
        "Workers that need no collective trained on and finished, under a notice for "
        "which one of them had been left out as too slow; that one started again, "
        "alone (`cluster/test_schedules.py`).",
    ),
)
