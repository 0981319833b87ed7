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
        "A worker that was many steps before the boundary of a periodic save "
        "answered no notice until that boundary, if the save had failed or was "
        "asynchronous. The worker counted as crashed (`cluster/test_schedules.py`).",
        "While a machine with a long grace period waited for its first commit, "
        "another machine announced its last moments. The commit did not end the "
        "run, and hardly any time was left for a second commit, which missed a "
        "worker's part (`cluster/test_schedules.py`).",
        "Workers without collectives finished training after a notice for which a "
        "slow worker had been left out. The slow worker restarted alone "
        "(`cluster/test_schedules.py`).",
    ),
)
