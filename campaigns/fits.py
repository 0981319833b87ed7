"""Interrupts `model.fit` at random moments by real signals, and compares the result.

SIGTERM or SIGKILL hits one worker or all workers while the program starts, traces,
trains, validates or ends. After a SIGTERM the worker begins no further step, and the
next process trains the next step. After a SIGKILL the next process trains a step since
the last periodic commit. At the end the weights, the optimizer, the History and the
order of the rows are those of an uninterrupted fit.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.fits import DATA, LINES, Fit, undisturbed
from tests.multiprocess.harness import Zygote, place
from tests.multiprocess.storm import Storm

CYCLES = 6


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: runs the zygote process that forks workers."""
    zygote = Zygote()

    def trial(rng: random.Random) -> Facts:
        line, data = rng.choice(LINES), rng.choice(DATA)
        world = rng.choices((1, 2), (3, 1))[0]
        fit = Fit(line=line, data=data, world=world, epochs=4)
        with place(zygote) as here:
            storm = Storm(here, fit, rng)
            interruptions = storm.run(CYCLES)
            assert storm.last.results() == undisturbed(zygote, fit)
        return {
            "line": line,
            "data": data,
            "workers": f"{world}",
            "interruptions": interruptions,
            **storm.ends,
        }

    with contextlib.closing(zygote):
        yield trial


CAMPAIGN = Campaign(
    name="fits",
    promise=(
        "`model.fit` gets SIGTERM or SIGKILL, on one worker or on all workers, "
        "while the fit starts, traces, trains, validates or ends. After SIGTERM the "
        "fit finishes the running step, begins no new step, and exits with the "
        "restart code. No committed step is skipped or repeated. At the end the "
        "weights, the optimizer, the History and the order of rows are the same as "
        "in an uninterrupted fit."
    ),
    trials=40,
    short=1,
    mark="multiprocess",
    prepare=prepare,
)
