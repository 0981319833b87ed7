"""The shipped agreement, in every order of events that small clusters can have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster._values import Cluster
from tests.cluster.explore import Result, explore, show
from tfpreempt.coordination.protocol_types import NoticeKind
from tfpreempt.core.events import Outcome

F, T, P = NoticeKind.FINAL, NoticeKind.TRAIN_ON, NoticeKind.PERIODIC
FREE: dict[str, Any] = {"collectives": False, "collective_save": False}
LOCAL: dict[str, Any] = {"collective_save": False}
COMMITTED, LOST, FINISHED = map(
    str, (Outcome.COMMITTED, Outcome.LOST, Outcome.FINISHED)
)
GOOD = {COMMITTED, FINISHED}
BAD = {COMMITTED, FINISHED, LOST}

# The chief raises an error in the round of a periodic save, whose boundary one worker
# has reached; the machine of another goes away.
SKIPPED_SAVE = Cluster(
    workers=3,
    lengths=(1,),
    notices=(P, F),
    notices_to=(2,),
    detaches=1,
    detaches_of=(0,),
)

# Scenarios, and ends that at least one path must reach: a search that never gets
# there proves nothing.
SMALL: dict[str, tuple[Cluster, set[str]]] = {
    "one worker": (Cluster(workers=1, lengths=(3,)), GOOD),
    "one worker, two notices": (Cluster(workers=1, notices=(F, F)), GOOD),
    "one worker, local save": (Cluster(workers=1, **LOCAL, save_failures=1), BAD),
    "two workers": (Cluster(lengths=(1,)), GOOD),
    "crash": (Cluster(lengths=(1,), crashes=1), BAD | {"dead", "raised"}),
    "false suspicion": (Cluster(lengths=(1,), suspicions=1), BAD),
    "detach": (Cluster(lengths=(1,), detaches=1), BAD | {"raised"}),
    "save fails": (Cluster(lengths=(1,), save_failures=1), BAD),
    "shares, crash": (
        Cluster(lengths=(1,), crashes=1, shares=True, **LOCAL),
        BAD | {"dead"},
    ),
    "periodic, crash": (Cluster(lengths=(1,), notices=(P,), crashes=1), {FINISHED}),
}
LARGE: dict[str, tuple[Cluster, set[str]]] = {
    "one worker, two rounds": (Cluster(workers=1, notices=(T, P)), GOOD),
    "two late notices": (Cluster(notices=(F, F)), GOOD),
    "crash, local save": (Cluster(lengths=(1,), crashes=1, **LOCAL), BAD | {"dead"}),
    "crash, two steps": (Cluster(crashes=1, **LOCAL), BAD | {"dead", "raised"}),
    "two crashes": (Cluster(lengths=(1,), crashes=2), BAD | {"dead"}),
    "crash and suspicion": (Cluster(lengths=(1,), crashes=1, suspicions=1), BAD),
    "detach, two steps": (Cluster(detaches=1), BAD | {"raised"}),
    "save fails, two steps": (Cluster(save_failures=1), BAD),
    "uneven": (Cluster(lengths=(1, 2), **FREE), GOOD),
    "uneven, chief first": (Cluster(lengths=(1, 3), **FREE), GOOD),
    "uneven, chief last": (Cluster(lengths=(3, 1), **FREE), GOOD),
    "uneven, crash": (Cluster(lengths=(1, 2), crashes=1, **FREE), BAD | {"dead"}),
    "shares, save fails": (
        Cluster(lengths=(1,), save_failures=1, shares=True, **LOCAL),
        BAD,
    ),
    "shares, two rounds, crash": (
        Cluster(lengths=(1,), notices=(T,), crashes=1, shares=True, **LOCAL),
        BAD,
    ),
    "shares, uneven, crash": (
        Cluster(lengths=(1, 2), crashes=1, shares=True, **FREE),
        BAD | {"dead"},
    ),
    "shares, uneven, suspicion": (
        Cluster(lengths=(2, 1), suspicions=1, shares=True, **FREE),
        BAD,
    ),
    "shares, three, crash": (
        Cluster(workers=3, lengths=(1,), crashes=1, shares=True, **LOCAL),
        BAD | {"dead"},
    ),
    "uneven, suspicion": (Cluster(lengths=(1, 2), suspicions=1, **FREE), BAD),
    "uneven, detach": (Cluster(lengths=(2, 1), detaches=1, **FREE), BAD | {"raised"}),
    "uneven, two rounds": (Cluster(lengths=(2, 1), notices=(T,), **FREE), GOOD),
    "two rounds": (Cluster(notices=(T,)), GOOD),
    "two rounds, late final": (Cluster(lengths=(1,), notices=(T, F)), GOOD),
    "two rounds, crash": (Cluster(lengths=(1,), notices=(T,), crashes=1), BAD),
    "two rounds, suspicion": (Cluster(lengths=(1,), notices=(T,), suspicions=1), BAD),
    "periodic, late final": (Cluster(notices=(P, F)), GOOD),
    "periodic, save fails": (
        Cluster(lengths=(1,), notices=(P, F), save_failures=1),
        BAD,
    ),
    "periodic, uneven, save fails": (
        Cluster(lengths=(1, 2), notices=(P, F), save_failures=1, **FREE),
        BAD,
    ),
    "three workers": (Cluster(workers=3, lengths=(1,)), GOOD),
    "three, two late notices": (
        Cluster(workers=3, lengths=(1,), notices=(F, F), notices_to=(0, 1)),
        GOOD,
    ),
    "three, crash": (Cluster(workers=3, lengths=(1,), crashes=1), BAD | {"dead"}),
    "three, suspicion": (Cluster(workers=3, lengths=(1,), suspicions=1), BAD),
    "three, detach": (Cluster(workers=3, lengths=(1,), detaches=1), BAD | {"raised"}),
    "three, periodic, error, late final": (
        SKIPPED_SAVE,
        {LOST, "raised"},
    ),
    "three, uneven": (
        Cluster(workers=3, lengths=(3, 1, 2), notices_to=(1,), **FREE),
        GOOD,
    ),
    "three, two rounds": (
        Cluster(workers=3, lengths=(1,), notices=(T,), notices_to=(1,)),
        GOOD,
    ),
}


@pytest.mark.slow  # searches long
@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_events(name):
    check(name, *SMALL[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_events_in_larger_clusters(name):
    check(name, *LARGE[name])


def check(name: str, cluster: Cluster, wanted: set[str]) -> None:
    result = explore(cluster, limit=2_000_000)
    assert not result.violations, show(name, result)
    missing = wanted - reached(result)
    assert not missing, f"no path ends with {missing}: {show(name, result)}"
    if not may_lose(cluster):
        assert all(len(set(ending)) == 1 for ending in result.endings), "ends differ"
        assert LOST not in reached(result)


def reached(result: Result) -> set[str]:
    return {end for ending in result.endings for end in ending}


def may_lose(cluster: Cluster) -> bool:
    """Returns whether a fault may cost a commit."""
    faults = (cluster.crashes, cluster.suspicions, cluster.detaches)
    return any(faults) or cluster.save_failures > 0
