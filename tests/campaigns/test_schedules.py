"""As many random schedules of the simulated cluster as a coffee break allows."""

from __future__ import annotations

import logging
import random

import pytest

from tests.cluster.schedules import draw
from tests.cluster.test_schedules import run

SCHEDULES = 100_000


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_schedules(rng: random.Random) -> None:
    """None breaks a promise; the seed is in the header of the run."""
    logging.disable(logging.CRITICAL)
    try:
        for _ in range(SCHEDULES):
            run(draw(random.Random(rng.getrandbits(64))))
    finally:
        logging.disable(logging.NOTSET)
