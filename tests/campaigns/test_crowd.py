"""The short form of the crowd: some workers, two preemptions."""

from __future__ import annotations

import random

import pytest

from campaigns.crowd import try_crowd
from tests.multiprocess.harness import Zygote

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_workers_that_are_preempted_again_lose_no_step(
    zygote: Zygote, rng: random.Random
) -> None:
    facts = try_crowd(zygote, rng, workers=4, preemptions=2)
    assert facts["preemptions"] == 2
