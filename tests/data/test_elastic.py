"""A run resumes with other numbers of workers and replicas, with the same batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(400),
]
pytest.importorskip("tensorflow")

from tests.multiprocess.harness import (  # noqa: E402
    RESTART,
    Cluster,
    Place,
    Zygote,
    place,
)

PROGRAM = str(Path(__file__).with_name("elastic_program.py"))
BATCHES = 15
Batches = dict[int, list[int]]


@pytest.fixture
def here(zygote: Zygote) -> Iterator[Place]:
    """Directory of a run and its restarts."""
    with place(zygote) as made:
        yield made


def start(
    here: Place, way: str, data: str, size: tuple[int, int], how: str, *more: object
) -> Cluster:
    """Starts so many workers with so many replicas each; no workers: one process
    without a cluster."""
    world, replicas = size
    arguments = (way, data, replicas, how, *more)
    has_config = world > 0
    return here.start(PROGRAM, *arguments, world=max(world, 1), tf_config=has_config)


def batches(cluster: Cluster) -> Batches:
    """Returns the global batch of each step, joined from all replicas."""
    world = len(cluster.workers)
    found: dict[int, dict[int, list[int]]] = {}
    for index, worker in enumerate(cluster):
        for step, *text in worker.lines("took"):
            for number, ids in enumerate(json.loads(" ".join(text))):
                found.setdefault(int(step), {})[index + number * world] = ids
    return {
        step: [each for _, ids in sorted(parts.items()) for each in ids]
        for step, parts in found.items()
    }


def train(
    here: Place, way: str, data: str, *sizes: tuple[int, int]
) -> tuple[Batches, list[dict[str, Any]]]:
    """Trains with the first size, is preempted, and resumes with the next size.

    No step may be trained twice or skipped. Returns the results.
    """
    taken: Batches = {}
    for number, size in enumerate(sizes, start=1):
        is_last = number == len(sizes)
        how = "whole" if is_last else "preempted"
        cluster = start(here, way, data, size, how)
        cluster.expect(*[0 if is_last else RESTART] * max(size[0], 1))
        now = batches(cluster)
        assert sorted(now) == list(range(len(taken), len(taken) + len(now)))
        taken |= now
    assert len(taken) == BATCHES
    return taken, cluster.results()


@pytest.mark.parametrize(
    ("way", "data"),
    [
        *(("loop", "index"), ("loop", "by batch")),
        *(("fit", "nested"), ("fit", "numpy"), ("fit", "sequence")),
    ],
)
def test_the_global_batches_are_those_of_the_undisturbed_run(
    zygote: Zygote, here: Place, way: str, data: str
) -> None:
    with place(zygote) as undisturbed:
        expected, [one] = train(undisturbed, way, data, (1, 1))
    taken, results = train(here, way, data, (2, 1), (1, 1), (4, 1), (1, 3))
    assert taken == expected
    for result in results:
        # Records the samples of each step as whole numbers, equal in any order.
        assert result["seen"] == one["seen"]
        assert result["total"] == one["total"]
        if way == "loop":
            assert result["means"] == pytest.approx(one["means"], rel=1e-6)


def test_as_many_replicas_in_other_processes_have_the_same_weights(
    zygote: Zygote, here: Place
) -> None:
    with place(zygote) as undisturbed:
        expected = train(undisturbed, "loop", "index", (0, 2))
    taken, results = train(here, "loop", "index", (2, 1), (2, 1), (1, 2), (0, 2))
    assert taken == expected[0]
    assert results == expected[1]  # bit for bit


@pytest.mark.parametrize(
    ("way", "data", "first", "second"),
    [
        ("loop", "auto", (2, 1), (1, 1)),
        ("loop", "auto", (0, 2), (0, 3)),
        ("fit", "auto", (1, 1), (2, 1)),
        ("fit", "grain", (2, 1), (1, 1)),
    ],
)
def test_a_position_in_other_units_is_not_one_in_global_batches(
    here: Place, way: str, data: str, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """A loop reads its data from the start, a fit again; a warning says so."""
    start(here, way, data, first, "preempted").expect(*[RESTART] * max(first[0], 1))
    cluster = start(here, way, data, second, "whole")
    cluster.expect(*[0] * max(second[0], 1))
    told = "these data start from the beginning" if way == "loop" else "are read again"
    assert told in cluster[0].output


@pytest.mark.parametrize(("way", "data"), [("loop", "index"), ("fit", "sequence")])
def test_replicas_that_cannot_share_a_batch_equally_are_refused(
    here: Place, way: str, data: str
) -> None:
    start(here, way, data, (1, 1), "preempted", 10).expect(RESTART)
    refused = start(here, way, data, (3, 1), "whole", 10)
    refused.expect(1, 1, 1)
    told = "has 10 samples, which cannot be divided equally among 3 replicas"
    for worker in refused:
        assert told in worker.output
        assert "use 1, 2, 5 or 10 replicas in total" in worker.output
    # No file was changed; with a supported size the run resumes.
    start(here, way, data, (2, 1), "whole", 10).expect(0, 0)
