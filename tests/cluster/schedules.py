"""Random schedules of a simulated cluster, and the promises of every run."""

from __future__ import annotations

import dataclasses
import json
import random
import re

from tests.cluster.simulation import (
    AskToSave,
    Ending,
    FailSave,
    Fault,
    Freeze,
    Kill,
    Preempt,
    Raise,
    RunReport,
    Schedule,
    SimulatedCluster,
    SlowStore,
    WorkerReport,
)
from tfpreempt.core.events import Outcome

GRACES = (None, 0, 1, 2, 3, 5, 7, 15, 30, 120)
SPEEDS = ((1, 5), (5, 50), (50, 150), (100, 400), (200, 1500))
STORES = ((0, 2), (0, 20), (1, 100))
COMMIT = re.compile(r"tfpreempt/0/(\d+)/commit$")


def draw(r: random.Random) -> Schedule:
    """Draws a schedule."""
    world = r.choice((1, 2, 2, 3, 3, 4, 5, 6))
    collectives = r.random() < 0.6
    speeds = tuple(r.choice(SPEEDS) for _ in range(1 if collectives else world))
    lengths = (r.randint(0, 30),) * world
    if not collectives:
        longest = r.choice((3, 20, 100))
        lengths = tuple(r.randint(0, longest) for _ in range(world))
    is_gentle = r.random() < 0.4  # time enough, nothing worse than notices
    if is_gentle and collectives:
        lengths = (r.choice((10, 50, 200)),) * world
    saves = ((0, 10), (100, 300), (500, 3000))
    schedule = Schedule(
        lengths=lengths,
        fits=r.choice((1, 1, 1, 2)),
        collectives=collectives,
        collective_save=collectives and r.random() < 0.5,
        step_ms=speeds,
        save_ms=r.choice(saves[:2] if is_gentle else saves),
        store_ms=r.choice(STORES),
        gap_ms=r.choice(((0, 1), (0, 5))),
        start_ms=r.choice(((0, 0), (0, 100), (0, 100 if is_gentle else 2000))),
        save_timeout_ms=30_000 if is_gentle else r.choice((5000, 30_000)),
        seed=r.getrandbits(32),
    )
    found = notices(r, schedule, GRACES[:2] + GRACES[6:] if is_gentle else GRACES)
    if not is_gentle:
        found += worse(r, schedule)
    has_shares = r.random() < 0.5
    return dataclasses.replace(schedule, faults=tuple(found), shares=has_shares)


def notices(
    r: random.Random, schedule: Schedule, graces: tuple[float | None, ...]
) -> list[Fault]:
    """Notices, often at once, some twice; and now and then a periodic save."""
    world = len(schedule.lengths)
    found: list[Fault] = []
    together = when(r, schedule)
    for _ in range(r.choice((0, 1, 1, 2, 2, 3, 4))):
        spot = together if r.random() < 0.5 else when(r, schedule)
        grace = r.choice(graces)
        found.append(Preempt(worker=r.randrange(world), grace_seconds=grace, **spot))
        if r.random() < 0.2:
            found.append(found[-1])
    if r.random() < 0.2:
        found.append(AskToSave(worker=0, **when(r, schedule)))
    return found


def worse(r: random.Random, schedule: Schedule) -> list[Fault]:
    """Draws additional faults, which most runs have."""
    world = len(schedule.lengths)
    found: list[Fault] = []
    for _ in range(r.choice((0, 1, 1, 2))):
        who = {"worker": r.randrange(world), **when(r, schedule)}
        match r.randrange(5):
            case 0:
                found.append(Kill(**who))
            case 1:
                found.append(Freeze(**who, lasts_ms=r.choice((300, 4000, 60_000))))
            case 2:
                found.append(Raise(**who))
            case 3:
                found.append(FailSave(**who))
            case 4:
                extra, lasts = r.choice((100, 1000)), r.choice((500, 20_000))
                found.append(SlowStore(**who, extra_ms=extra, lasts_ms=lasts))
    return found


def when(r: random.Random, schedule: Schedule) -> dict[str, int]:
    """Somewhere in the run: at a step, or at a time, not rarely near the end."""
    longest = max(schedule.lengths) * schedule.fits
    if r.random() < 0.5:
        return {"at_step": max(1, r.choice((r.randint(0, longest), longest)))}
    slowest = max((low + high) // 2 for low, high in schedule.step_ms)
    return {"at_ms": r.randint(0, longest * slowest + 500)}


# --- what must be true ---------------------------------------------------------------


def wrong(schedule: Schedule, report: RunReport) -> list[str]:
    """Returns the broken promises of a run; empty if there are none."""
    found = [f"torn: {torn}" for torn in report.torn]
    found += [f"hangs: {w}" for w in report.workers if w.ending is Ending.HUNG]
    found += split(schedule, report)
    found += [f"torn: {m}" for m in report.markers if set(m.shares) - {m.boundary}]
    found += uncommitted(report)
    found += late(schedule, report)
    found += mixed(schedule, report)
    if is_calm(schedule):
        found += lost_in_calm(schedule, report)
    return found


def split(schedule: Schedule, report: RunReport) -> list[str]:
    """Saves of one round at different boundaries; the last of a worker excepted."""
    seen: dict[int, set[int]] = {}
    for w in report.workers:
        length = schedule.lengths[w.worker]
        ends = {length * (fit + 1) for fit in range(schedule.fits)}
        for save in w.saves:
            is_final = not schedule.collectives and save.boundary in ends
            if not (is_final or save.alone):
                seen.setdefault(save.round, set()).add(save.boundary)
    return [
        f"split: round {round} saves at {sorted(at)}"
        for round, at in seen.items()
        if len(at) > 1
    ]


def uncommitted(report: RunReport) -> list[str]:
    """Leaving as committed without a commit, or a commit without its marker."""
    commits = {
        int(found[1]): json.loads(text)["kind"]
        for key, text in report.store.items()
        if (found := COMMIT.match(key))
    }
    marked = {(marker.round, marker.kind.value) for marker in report.markers}
    problems = [
        f"no marker for the commit of round {round}: {kind}"
        for round, kind in commits.items()
        if kind != "none" and (round, kind) not in marked
    ]
    if not {"exit", "alone"} & set(commits.values()):
        problems += [
            f"no commit for {w}"
            for w in report.workers
            if w.outcome is Outcome.COMMITTED
        ]
    return problems


def late(schedule: Schedule, report: RunReport) -> list[str]:
    """Returns the workers that run after their machine's end, plus the time of an exit.

    Frozen workers do not count.
    """
    found = []
    for w in report.workers:
        ended, gone = w.ended_at_ms, w.machine_gone_at_ms
        if w.was_frozen or ended is None or gone is None:
            continue
        if ended > gone + schedule.exit_ms[1]:
            found.append(f"late: {w}")
    return found


def mixed(schedule: Schedule, report: RunReport) -> list[str]:
    """Returns a worker that finishes while another restarts without a fault."""
    host = report.workers[0]
    if host.was_frozen or host.is_overdue or host.ending is not Ending.LEFT:
        return []  # the store fell silent, and some may not have read the outcome
    finished = [w for w in report.workers if w.outcome is Outcome.FINISHED]
    restarts = [w for w in report.workers if restarts_in_health(w)]
    return [f"mixed: {w}" for w in restarts] if finished else []


def restarts_in_health(w: WorkerReport) -> bool:
    """Left with the restart code, not because it could not wait any longer."""
    restarts = w.outcome in (Outcome.COMMITTED, Outcome.LOST)
    return restarts and w.ending is Ending.LEFT and not (w.is_overdue or w.was_frozen)


# --- calm ----------------------------------------------------------------------------


def is_calm(schedule: Schedule) -> bool:
    """Returns whether all faults are notices with enough time.

    A save or another notice shortly before a machine's end leaves too little time: the
    last round of the machine may come during the save.
    """
    if not all(isinstance(f, (Preempt, AskToSave)) for f in schedule.faults):
        return False
    times = [1000 * (getattr(f, "grace_seconds", 0) or 0) for f in schedule.faults]
    least = min((t or schedule.save_timeout_ms for t in times), default=10**9)
    begins = [f.at_ms for f in schedule.faults if f.at_ms is not None]
    ends = [
        f.at_ms + 1000 * f.grace_seconds
        for f in schedule.faults
        if isinstance(f, Preempt) and f.at_ms is not None and f.grace_seconds
    ]
    least = min([least, *(end - at for end in ends for at in begins if at <= end)])
    return least >= needed(schedule)


def needed(schedule: Schedule) -> int:
    """Milliseconds from a notice to its commit, with room to spare."""
    step = max(high for _, high in schedule.step_ms) + schedule.gap_ms[1]
    steps = 2
    if not schedule.collectives:
        steps += max(schedule.lengths) * schedule.fits
    save = schedule.save_ms[1] + schedule.marker_ms[1]
    start = schedule.start_ms[1]
    return 4 * (steps * step + save + start) + 80 * schedule.store_ms[1] + 1000


def lost_in_calm(schedule: Schedule, report: RunReport) -> list[str]:
    """Anything but one and the same good end for all.

    A commit has the shards of all workers, unless one needs longer than `peer_timeout`
    to reach the decision: no wait for a peer is longer than that.
    """
    ends = {(w.ending, w.outcome) for w in report.workers}
    good = [{(Ending.LEFT, Outcome.COMMITTED)}, {(Ending.LEFT, Outcome.FINISHED)}]
    world = tuple(range(len(report.workers)))
    problems = [] if ends in good else [f"lost in calm: {ends}"]
    if schedule.save_timeout_ms < needed(schedule):
        return problems
    return problems + [
        f"a share is missing: {m}" for m in report.markers if m.workers != world
    ]


def smallest(schedule: Schedule) -> Schedule:
    """Returns a failing schedule from which no fault can be removed."""
    for i in range(len(schedule.faults)):
        fewer = schedule.faults[:i] + schedule.faults[i + 1 :]
        less = dataclasses.replace(schedule, faults=fewer)
        if wrong(less, SimulatedCluster(less).run()):
            return smallest(less)
    return schedule
