"""Many real workers are preempted again and again, without a lost step.

Sixteen processes on the few cores of one machine are at different steps at any time;
two or three processes rarely are. So a decided step is ahead of some workers and behind
others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
from collections.abc import Iterator

from campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.harness import (
    RESTART,
    Cluster,
    Place,
    Zygote,
    place,
    records,
)

WORKERS = 16
PREEMPTIONS = 20
READY_STEPS = 3
"""Number of steps of each worker before one worker receives SIGTERM."""
START_SECONDS = 300.0
END_SECONDS = 180.0
"""Longest time in seconds for all workers to start, or to end, on few cores."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """One run of all workers, up to a preemption.

    Attributes:
        step: the committed step, which is the last step of each worker.
        decided: seconds from the signal until the last worker knew the step.
        gone: seconds from the signal until the last process had ended.
    """

    step: int
    decided: float
    gone: float


def start(here: Place, workers: int, steps: int = 1_000_000) -> Cluster:
    """Starts all workers of one run, which ends after a number of steps."""
    return here.train("mwms", workers, "--steps", steps)


def preempt(here: Place, workers: int, victim: int, before: int = 0) -> Preempted:
    """Starts all workers, and sends SIGTERM to one worker during its steps.

    Args:
        here: directory of the run.
        workers: number of workers.
        victim: worker that receives SIGTERM.
        before: the previously committed step; 0 at first.

    Raises:
        AssertionError: a step was lost, or a worker exited in an unexpected way.
    """
    cluster = start(here, workers)
    for worker in cluster:
        worker.wait_line("step", READY_STEPS, START_SECONDS)
    check_restored(cluster, before)
    began = cluster[victim].send(signal.SIGTERM)
    cluster.expect(*[RESTART] * workers, limit=END_SECONDS)
    told = [r for r in records(here.checkpoints, "decision") if r["wall"] >= began]
    assert len(told) == workers, f"{len(told)} of {workers} workers know a decision"
    committed = int(records(here.checkpoints, "commit")[-1]["step"])
    trained = [int(worker.lines("step")[-1][0]) for worker in cluster]
    assert set(trained) == {committed}, (
        f"step {committed} is committed, and made were {trained}\n{cluster.story()}"
    )
    return Preempted(
        step=committed,
        decided=max(record["wall"] for record in told) - began,
        gone=max(worker.ended_at for worker in cluster) - began,
    )


def check_restored(cluster: Cluster, step: int) -> None:
    """Checks that all workers resume from a step."""
    restored = [int(worker.lines("restored")[0][0]) for worker in cluster]
    assert set(restored) == {step}, f"{step} was committed: {restored}"


def try_crowd(
    zygote: Zygote, rng: random.Random, workers: int, preemptions: int
) -> Facts:
    """Preempts a different worker several times, and then trains to the end.

    The end is a few steps after the last preemption. So the uninterrupted run for the
    comparison is made afterwards.
    """
    with place(zygote) as here:
        step = 0
        for _ in range(preemptions):
            step = preempt(here, workers, rng.randrange(workers), step).step
        end = step + READY_STEPS
        last = start(here, workers, end)
        last.expect(*[0] * workers, limit=START_SECONDS + END_SECONDS)
        check_restored(last, step)
        results, story = last.results(), last.story()
    with place(zygote) as here:
        undisturbed = start(here, workers, end)
        limit = START_SECONDS + END_SECONDS + end
        undisturbed.expect(*[0] * workers, limit=limit)
        assert results == undisturbed.results(), story
    return {"workers": f"{workers}", "preemptions": preemptions, "steps": end}


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: runs the zygote process that forks workers."""
    with contextlib.closing(Zygote()) as zygote:
        yield lambda rng: try_crowd(zygote, rng, WORKERS, PREEMPTIONS)


CAMPAIGN = Campaign(
    name="crowd",
    promise=(
        "16 processes of TensorFlow's multi-worker training are preempted 20 times. "
        "Each time, a different process gets SIGTERM during a step. All processes "
        "exit with the restart code, and the committed step is the last step of "
        "every process, so no step is lost. All processes resume from the commit. "
        "At the end the weights, the momentum, the metric of each worker, and the "
        "next values of data and generators are the same bytes as in an "
        "uninterrupted run."
    ),
    trials=1,
    short=0,
    mark="multiprocess",
    prepare=prepare,
    labels={
        "workers": "number of workers",
    },
)
