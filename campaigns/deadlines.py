"""SIGTERM at a random moment, and SIGKILL at the end of the grace period."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.harness import (
    RESTART,
    Cluster,
    Place,
    Worker,
    Zygote,
    place,
    records,
    wait_until,
)
from tests.multiprocess.storm import have_ended, send
from tfpreempt.checkpoint.restore.restore import newest_verified
from tfpreempt.core.deadline import remaining_after_delay

ENOUGH = 1.5
"""A grace period is enough from this multiple of one step and one raw write."""

TIMES = ((0.3, 1), (1, 1.5), (1.5, 2), (1.5, 2), (2, 3), (3, 6))
"""Ranges from which the multiple is drawn; several, because write times vary."""

WORLDS = {1: 3, 2: 1}
"""Numbers of workers, with weights."""

GRACES = (2.0, 6.0)
MEBIBYTES = (1, 64)
STEPS_BEFORE = 3  # at most; the first step traces
DISK = Path("/var/tmp")  # files here survive a reboot, so the disk is not in memory


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: runs the zygote process that forks workers."""
    zygote = Zygote()

    def trial(rng: random.Random) -> Facts:
        where = rng.choice(("memory", "disk"))
        with place(zygote) if where == "memory" else on_disk(zygote) as here:
            return {"where": where} | notice(here, rng)

    with contextlib.closing(zygote):
        yield trial


@contextlib.contextmanager
def on_disk(zygote: Zygote) -> Iterator[Place]:
    """Context manager: a test directory on a disk, where a write takes time."""
    made = Place(zygote, Path(tempfile.mkdtemp(prefix="tfpreempt-test-", dir=DISK)))
    try:
        yield made
    finally:
        made.close()


def notice(here: Place, rng: random.Random) -> Facts:
    """Sends SIGTERM to a program, and SIGKILL if it has not exited in time.

    The program has one process, or two processes of which one or both get SIGTERM.
    """
    [world] = rng.choices(list(WORLDS), list(WORLDS.values()))
    mebibytes, grace = rng.randint(*MEBIBYTES), rng.uniform(*GRACES)
    low, high = rng.choice(TIMES)
    is_sync = rng.random() < 0.5
    # Of two workers one may be a step ahead, and a synchronous save is in that step.
    writes = 2 if is_sync and world > 1 else 1
    raw = writes * raw_write(here, mebibytes)
    left = grace if world == 1 else remaining_after_delay(grace)
    step = max(0.01, left / rng.uniform(low, high) - raw)
    options = [f"--pause={step:.3f}", f"--mebibytes={mebibytes}", f"--grace={grace}"]
    options += ["--save-freq=2", "--sync-saves"] if is_sync else ["--save-freq=1"]
    strategy = "mwms" if world > 1 else "none"
    cluster = here.train(strategy, world, "--steps=1000000", *options)
    told = rng.sample(list(cluster), rng.randint(1, world))
    told[0].wait_line("step", rng.randint(1, STEPS_BEFORE))
    raw = writes * raw_write(here, mebibytes)
    time.sleep(rng.uniform(0, step))
    seconds = terminate(cluster, told, grace)
    # The duration of the newest finished step: steps are slower on a busy machine.
    took = [float(s) for worker in cluster for (s,) in worker.lines("took")[-1:]]
    needed = max(step, *took) + raw
    story = (
        f"{options}, {left / needed:.2f} times what it needs, over after "
        f"{seconds:.2f} s\n{cluster.story()}"
    )
    codes = cluster.wait()
    assert codes == [RESTART] * world, f"{codes}, {story}"
    found = newest_verified(str(here.checkpoints))
    known = [record["step"] for record in records(here.checkpoints, "commit")]
    saved = found.step if found is not None else 0
    assert saved >= max(known, default=0), story
    trained = max(len(worker.lines("step")) for worker in cluster)
    is_enough = left >= ENOUGH * needed
    assert saved == trained or not is_enough, f"{saved} of {trained}, {story}"
    return {
        "workers": f"{world}",
        "times": f"{low} to {high}",
        "enough" if is_enough else "short": (
            "committed" if saved == trained else "lost"
        ),
    }


def terminate(cluster: Cluster, told: Sequence[Worker], grace: float) -> float:
    """Sends SIGTERM to some workers, and SIGKILL to all at the end of the grace period.

    Returns:
        The seconds from SIGTERM to the end of the workers.
    """
    began = time.monotonic()
    send(told, signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: have_ended(cluster.workers), "they leave", grace)
    seconds = time.monotonic() - began
    send(cluster.workers, signal.SIGKILL)
    return seconds


def raw_write(here: Place, mebibytes: int) -> float:
    """Returns the seconds of a plain write of some MiB to the disk."""
    file, data = here.path / "raw", os.urandom(mebibytes << 20)
    began = time.monotonic()
    with file.open("wb", buffering=0) as raw:
        raw.write(data)
        os.fsync(raw.fileno())
    seconds = time.monotonic() - began
    file.unlink()
    return seconds


CAMPAIGN = Campaign(
    name="deadlines",
    promise=(
        "A program with 1 to 64 MiB of state, in memory or on a disk, gets SIGTERM "
        "at a random moment with a grace period of 2 to 6 s, and SIGKILL at the end "
        "of the period. The program is one process, or two processes that train "
        "together; of two, one or both get the notice. If the grace period is at "
        "least 1.5 times a step plus a write of the state, the newest step is "
        "committed. With less time, the newest step is committed, or the previous "
        "commit is still valid. All processes exit before SIGKILL, with the restart "
        "code. With two processes, half a second of the grace period, but at most a "
        "fifth of it, is reserved for the message from one process to the other. A "
        "periodic save that training waits for counts as part of the step."
    ),
    trials=400,
    short=2,
    mark="multiprocess",
    prepare=prepare,
    fixed=(
        "If a notice arrived during a periodic save for which training waits, the "
        "process trained one more step before it handled the notice. Fixed "
        "(`handler/test_notices.py`).",
        "After its commit, a process could be killed at the end of its grace period "
        "while Python was finalizing, because no timeout limited the finalization. "
        "Fixed (`handler/test_session.py`).",
        "At the deadline, a write of the journal to a busy disk could take longer "
        "than the rest of the grace period. Fixed (`handler/test_session.py`).",
    ),
    labels={
        "where": "storage",
        "workers": "number of workers",
        "times": "grace period divided by the time needed",
        "enough": "newest step, if the grace period was long enough",
        "short": "newest step, if the grace period was too short",
    },
)
