"""Fits, interruptions and checks for the tests of `model.fit` in real processes."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Iterable
from typing import Any

from tests.multiprocess.harness import (
    RESTART,
    Cluster,
    Place,
    Worker,
    Zygote,
    place,
)

LINES = ("keras", "tf_keras")
DATA = ("tfdata", "repeated", "arrays", "sequence", "generator", "index", "loader")
POINTS = ("first", "mid", "last", "validation", "twice", "three")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A kind of fit of programs/fit.py."""

    line: str
    data: str
    world: int = 1
    steps_per_execution: int = 1
    epochs: int = 3

    @property
    def batches(self) -> int:
        """Number of batches of an epoch, for at least three steps."""
        return 8 if self.steps_per_execution == 1 else 3 * self.steps_per_execution

    def start(self, here: Place, *more: object) -> Cluster:
        """Starts the fit, with more arguments."""
        options = {
            "line": self.line,
            "data": self.data,
            "strategy": "mwms" if self.world > 1 else "none",
            "epochs": self.epochs,
            "batches": self.batches,
            "steps-per-execution": self.steps_per_execution,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        return here.start("fit.py", *arguments, *more, world=self.world)

    def holds(self, point: str) -> tuple[str, ...]:
        """Returns the points of the interruptions, in order, as WHERE:EPOCH:BATCH."""
        last = self.batches - 1
        late = self.batches - max(2, self.steps_per_execution)
        return {
            "first": ("begin:0:0",),
            "mid": ("end:1:3",),
            "last": (f"end:1:{last}",),
            # If the length of the data is unknown, Keras requests one more batch.
            "ended": (f"end:0:{last}", f"begin:0:{self.batches}"),
            "validation": ("validate:1:0",),
            "twice": ("end:1:3", f"begin:1:{late}"),
            "three": ("end:0:3", "validate:1:0", "begin:2:4"),
        }[point]

    def steps(self) -> list[tuple[int, int]]:
        """Returns the epoch and the last batch of each step of the fit."""
        step = self.steps_per_execution
        ends = range(step - 1, self.batches, step)
        return [(epoch, end) for epoch in range(self.epochs) for end in ends]


def trained(workers: Iterable[Worker]) -> list[tuple[int, int]]:
    """Returns the steps that processes have trained in sequence; see `Fit.steps`."""
    return [
        (int(epoch), int(batch))
        for worker in workers
        for epoch, batch in worker.lines("trained")
    ]


@functools.cache
def undisturbed(zygote: Zygote, fit: Fit) -> list[dict[str, Any]]:
    """Returns the results of a fit without interruptions and without tfpreempt."""
    with place(zygote) as made:
        cluster = fit.start(made, "--plain")
        cluster.expect(*[0] * fit.world)
        return cluster.results()


def interrupt(here: Place, fit: Fit, hold: str, victim: int) -> Cluster:
    """Starts a fit, and sends SIGTERM to one worker while all workers are blocked."""
    here.hold()
    cluster = fit.start(here, f"--hold-at={hold}")
    for worker in cluster:
        worker.wait_line("holding")
    cluster[victim].send(signal.SIGTERM)
    cluster[victim].wait_line("noticed")
    here.release()
    cluster.expect(*[RESTART] * fit.world)
    return cluster


def assert_exact(here: Place, zygote: Zygote, fit: Fit, point: str) -> None:
    """Checks that an interrupted fit has the results of an uninterrupted fit."""
    clusters = [
        interrupt(here, fit, hold, number % fit.world)
        for number, hold in enumerate(fit.holds(point), start=1)
    ]
    clusters.append(fit.start(here))
    clusters[-1].expect(*[0] * fit.world)
    for worker in range(fit.world):
        assert trained(each[worker] for each in clusters) == fit.steps()
    assert clusters[-1].results() == undisturbed(zygote, fit)
    assert all("no callback" not in each.output for each in clusters[-1])
