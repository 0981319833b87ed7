"""Measures, in simulated time, how long 10 to 10,000 workers take to agree on a step.

tfpreempt runs its real coordinator on every worker of the simulated cluster
(`tests/cluster`). TensorFlow and JAX are represented by the messages of their protocols
(`agreement_others`). All use the same store: a message takes 1 ms each way, and the
store serves 20 messages per millisecond, in the order of arrival. A request and its
reply are one message. A reply that was delayed until the key existed is one more.

One worker receives a notice at a random moment. `known` is the time until the last
living worker knows the step to save at. `through` is the time until the worker with the
notice may continue training. In each cluster one percent of the workers, at least
one, may have crashed before, at random, and the service reports this. Then TensorFlow's
handler never continues training, and JAX never decides.

A round is a seed; the bar is for the 99th percentile of the rounds. Steps contain no
collective, because a crashed worker would end such steps before any agreement. Ten
thousand workers are a separate bench, because the bench takes long.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.agreement_others import (
    MESSAGES_A_MS,
    TRAVEL_MS,
    VALUES_A_MESSAGE,
    Agreed,
    Jax,
    Scenario,
    TensorFlow,
)
from benchmarks.row import percentile, side
from tests.cluster.simulation import Kill, Preempt, Schedule, SimulatedCluster

SIZES = (10, 100, 1000)
LARGE = 10_000
DEAD_SHARE = 0.01
KNOWN_BAR = 3.0
MESSAGES_BAR = 6.0
WALL_BAR = 60.0
DIES_AT_MS = 100
LONG = 10_000  # intervals: more than any worker reaches


def rows(rounds: int = 100) -> Iterator[dict[str, Any]]:
    """Yields a row for each protocol, size up to 1,000, and share of crashed workers.

    Args:
        rounds: number of seeds of each size.
    """
    for workers in SIZES:
        yield from rows_of("agreement_scale", workers, rounds)


def rows_of_large(rounds: int = 10) -> Iterator[dict[str, Any]]:
    """Yields the rows with 10,000 workers.

    Args:
        rounds: number of seeds.
    """
    yield from rows_of("agreement_10000", LARGE, rounds)


def rows_of(bench: str, workers: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each protocol and share of crashed workers.

    Args:
        bench: name of the bench.
        workers: number of workers of each cluster.
        seeds: number of clusters.
    """
    protocols: dict[str, Callable[[Scenario], Agreed]] = {
        "tfpreempt": agree,
        "tensorflow": lambda scenario: TensorFlow(scenario).run(),
        "jax": lambda scenario: Jax(scenario).run(),
    }
    logging.disable(logging.WARNING)
    try:
        for share in (0.0, DEAD_SHARE):
            scenarios = [draw(workers, share, seed) for seed in range(seeds)]
            for name, protocol in protocols.items():
                yield {"bench": bench, **row(name, scenarios, protocol)}
    finally:
        logging.disable(logging.NOTSET)


def draw(workers: int, dead_share: float, seed: int) -> Scenario:
    """Draws a notice at a random worker, and crashes of workers other than worker 0."""
    r = random.Random(seed)
    noticed = r.randrange(workers)
    mortal = [j for j in range(1, workers) if j != noticed]
    count = max(1, round(dead_share * workers)) if dead_share else 0
    return Scenario(
        workers=workers,
        noticed=noticed,
        at_ms=r.randrange(600, 800),  # all workers wait for a notice by then
        dead=frozenset(r.sample(mortal, count)),
        seed=seed,
    )


def agree(scenario: Scenario) -> Agreed:
    """Runs the real coordinators until all living workers know the decision."""
    preempt = Preempt(worker=scenario.noticed, at_ms=scenario.at_ms, grace_seconds=None)
    deaths = (Kill(worker=j, at_ms=DIES_AT_MS) for j in scenario.dead)
    cluster = SimulatedCluster(
        Schedule(
            lengths=(LONG,) * scenario.workers,
            collectives=False,
            collective_save=False,
            step_ms=((100, 300),),
            store_ms=(TRAVEL_MS, TRAVEL_MS),
            store_rate=MESSAGES_A_MS,
            heartbeat_ms=scenario.at_ms - DIES_AT_MS,
            faults=(*deaths, preempt),
            seed=scenario.seed,
        )
    )
    while cluster.timeline.now < scenario.at_ms and cluster.step():
        pass
    before = cluster.store.served
    alive = scenario.workers - len(scenario.dead)
    while len(cluster.decided) < alive and cluster.step():
        pass
    all_know = len(cluster.decided) == alive
    known = (max(cluster.decided.values()) - scenario.at_ms) / 1000
    return Agreed(
        known=known if all_know else None,
        through=known if all_know else None,
        messages=(cluster.store.served - before) / scenario.workers,
        values=1,
    )


def row(
    name: str, scenarios: Sequence[Scenario], protocol: Callable[[Scenario], Agreed]
) -> dict[str, Any]:
    """Returns the row of one protocol at one size."""
    found, walls = [], []
    for scenario in scenarios:
        gc.collect()
        began = time.perf_counter()
        gc.disable()  # garbage collections would take half of the time
        try:
            found.append(protocol(scenario))
        finally:
            gc.enable()
        walls.append(time.perf_counter() - began)
    known = [each.known for each in found if each.known is not None]
    through = [each.through for each in found if each.through is not None]
    messages = max(each.messages for each in found)
    result = {
        "protocol": name,
        "workers": scenarios[0].workers,
        "dead": len(scenarios[0].dead),
        **tail("known", known),
        **tail("through", through),
        "unit": "s, simulated",
        "undecided": len(found) - len(known),
        "messages_a_worker": round(messages, 3),
        "values_read_a_worker": found[0].values,
        "seeds": len(scenarios),
        "wall_seconds": round(statistics.median(walls), 3),
        "wall_longest": round(max(walls), 3),
    }
    if name == "tfpreempt":
        is_known = len(known) == len(found) and result["known_p99"] <= KNOWN_BAR
        is_cheap = messages <= MESSAGES_BAR and max(walls) <= WALL_BAR
        result |= {
            "bar": KNOWN_BAR,
            "bar_of": "known_p99",
            "messages_bar": MESSAGES_BAR,
            "wall_bar": WALL_BAR,
            "ok": is_known and is_cheap,
        }
    if name == "jax":
        result["values_a_message_time"] = VALUES_A_MESSAGE
    return result


def tail(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Returns the fields of one time; no fields if an event never happened."""
    if not seconds:
        return {}
    return {
        **side(name, seconds, 4),
        f"{name}_p99": round(percentile(seconds, 99), 4),
    }
