"""SIGTERM at a random moment, and SIGKILL when the grace that was told is over."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.harness import (
    RESTART,
    Place,
    Worker,
    Zygote,
    place,
    records,
    wait_until,
)
from tfpreempt.checkpoint.restore import newest_verified

ENOUGH = 1.5
"""Times a step and a raw write that a grace must be."""

TIMES = ((0.3, 1), (1, 1.5), (1.5, 2), (1.5, 2), (2, 3), (3, 6))
"""By how many a grace is drawn. What a write takes varies, and so does that."""

GRACES = (2.0, 6.0)
MEBIBYTES = (1, 64)
STEPS_BEFORE = 3  # at most; among them the one that traces
DISK = Path("/var/tmp")  # which outlives a restart, so it is none in memory


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """The zygote that forks workers."""
    zygote = Zygote()

    def trial(rng: random.Random) -> Facts:
        where = rng.choice(("memory", "disk"))
        with place(zygote) if where == "memory" else on_disk(zygote) as here:
            return {"where": where} | notice(here, rng)

    with contextlib.closing(zygote):
        yield trial


@contextlib.contextmanager
def on_disk(zygote: Zygote) -> Iterator[Place]:
    """As `place`, where a write takes its time."""
    made = Place(zygote, Path(tempfile.mkdtemp(prefix="tfpreempt-test-", dir=DISK)))
    try:
        yield made
    finally:
        made.close()


def notice(here: Place, rng: random.Random) -> Facts:
    """One program that is told to go, and is killed if it has not gone."""
    mebibytes, grace = rng.randint(*MEBIBYTES), rng.uniform(*GRACES)
    low, high = rng.choice(TIMES)
    step = max(0.01, grace / rng.uniform(low, high) - raw_write(here, mebibytes))
    options = [f"--pause={step:.3f}", f"--mebibytes={mebibytes}", f"--grace={grace}"]
    options += rng.choice((["--save-every=1"], ["--save-every=2", "--sync-saves"]))
    [worker] = here.start("train.py", "--steps=1000000", *options)
    worker.wait_line("step", rng.randint(1, STEPS_BEFORE))
    needed = step + raw_write(here, mebibytes)
    time.sleep(rng.uniform(0, step))
    seconds = terminate(worker, grace)
    story = (
        f"{options}, {grace / needed:.2f} times what it needs, over after "
        f"{seconds:.2f} s\n{worker.output[-5000:]}"
    )
    assert worker.code == RESTART, f"{worker.code}, {story}"
    newest = newest_verified(str(here.checkpoints))
    known = [record["step"] for record in records(here.checkpoints, "commit")]
    saved = newest.step if newest is not None else 0
    assert saved >= max(known, default=0), story
    trained, is_enough = len(worker.lines("step")), grace >= ENOUGH * needed
    assert saved == trained or not is_enough, f"{saved} of {trained}, {story}"
    return {
        "times": f"{low} to {high}",
        "enough" if is_enough else "short": (
            "committed" if saved == trained else "lost"
        ),
    }


def terminate(worker: Worker, grace: float) -> float:
    """SIGTERM, and SIGKILL when the grace is over; how many seconds it lived."""
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: worker.code is not None, "it leaves", grace)
    seconds = time.monotonic() - began
    if worker.code is None:
        worker.send(signal.SIGKILL)
        wait_until(lambda: worker.code is not None, "it is killed")
    return seconds


def raw_write(here: Place, mebibytes: int) -> float:
    """Seconds that so many bytes take to the disk."""
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
        "SIGTERM at a random moment of a program with 1 to 64 MiB of state, in memory "
        "or on a disk, that was told a grace of 2 to 6 s, and SIGKILL when that is "
        f"over. Where the grace is {ENOUGH} times a step and a write of these bytes, "
        "or more, the newest step is committed; where it is less, that or the commit "
        "before stands. The process is gone by then, with the restart code."
    ),
    trials=400,
    short=2,
    mark="multiprocess",
    prepare=prepare,
    fixed=(
        "A notice within a periodic save that training waits for was served after one "
        "more step (`handler/test_notices.py`).",
        "A process that had committed could be killed while Python took itself apart, "
        "which nothing can end (`handler/test_session.py`).",
        "At the deadline a journal on a busy disk could outlast what was left of the "
        "grace (`handler/test_session.py`).",
    ),
)
