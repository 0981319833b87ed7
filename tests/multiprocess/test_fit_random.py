"""`model.fit`, interrupted at random moments by real signals, comes out the same.

SIGTERM and SIGKILL, to one worker or to all, while the program starts, traces, trains,
validates or ends. After each SIGTERM the next process trains the next step; after a
SIGKILL, one since the last periodic commit. At the end weights, optimizer, History and
the order of rows are those of a fit that nobody interrupted.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.multiprocess.fits import DATA, LINES, Fit, undisturbed
from tests.multiprocess.harness import Zygote, place
from tests.multiprocess.storm import Storm

pytestmark = [pytest.mark.multiprocess, pytest.mark.tensorflow]


def weather(zygote: Zygote, rng: random.Random, *, world: int, cycles: int) -> None:
    """Fits of random kinds, one after another, until so often was interrupted."""
    while cycles:
        line, data = rng.choice(LINES), rng.choice(DATA)
        fit = Fit(line=line, data=data, world=world, epochs=4)
        with place(zygote) as here:
            print(here.path.name, fit)
            storm = Storm(here, fit, rng)
            cycles -= storm.run(cycles)
            assert storm.last.results() == undisturbed(zygote, fit)


def test_one_process(zygote: Zygote, rng: random.Random) -> None:
    """24 cycles, in two fits at a time."""
    seeds = [rng.getrandbits(64) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(weather, zygote, random.Random(seed), world=1, cycles=12)
            for seed in seeds
        ]
        for each in running:
            each.result()


def test_two_workers(zygote: Zygote, rng: random.Random) -> None:
    """6 cycles."""
    weather(zygote, rng, world=2, cycles=6)
