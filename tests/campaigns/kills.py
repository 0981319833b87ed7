"""SIGKILL at random instants; then the same command again, which goes on by itself.

Half of the kills come at a time drawn over the whole of a run, half before one of the
file operations that an undisturbed run was seen to make; see programs/killed.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator

from tests.campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.harness import (
    PROGRAMS,
    Cluster,
    Place,
    Worker,
    Zygote,
    place,
    records,
    wait_until,
)
from tests.multiprocess.storm import have_ended, send
from tfpreempt.core.memory import LentMemory

MOST = 4
"""Kills of one run, before it is left alone."""
AFTER = 0.2
"""Seconds at most until the others are killed too, as by whoever started them."""
ROOM = 64 << 20
TOO_LATE = "too late"
NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*([.-]([0-9a-f]*\d[0-9a-f]*|[0-9a-f]{8}))*")
NEITHER = re.compile(r"/\.tfpreempt-(probe|put)-|\.metadata\.json$|\.beat$")
KEPT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is killed.

    Attributes:
        name: for people.
        program: a file under programs/, and its arguments.
        world: number of processes.
        is_supervised: whether it is a supervisor, with the program as its worker.
    """

    name: str
    program: tuple[str, ...]
    world: int = 1
    is_supervised: bool = False

    @property
    def can_be_recorded(self) -> bool:
        """Whether one process does all."""
        return self.world == 1 and not self.is_supervised

    def start(self, here: Place, wrapper: str = "killed.py", **env: str) -> Cluster:
        """Starts it in that place, like any time before.

        Args:
            here: the place.
            wrapper: a program that runs programs.
            **env: more environment variables.
        """
        memory = here.path / "memory"
        memory.mkdir(exist_ok=True)
        lent = LentMemory(directory=str(memory), bytes=ROOM, workers=self.world)
        env |= lent.to_environment()
        env["TFPREEMPT_REMOTE_CHECKPOINT_DIR"] = f"{here.path}/mirror"
        env["TMPDIR"] = str(here.path)  # TensorFlow cannot clear up when it is killed
        if self.is_supervised:
            file, *more = self.program
            command = [sys.executable, PROGRAMS / file, here.checkpoints, *more]
            options = ["--log-dir", here.path / "logs", "--backoff", 0, "--"]
            program = ["supervisor.py", *options, *command]
        else:
            program = list(self.program)
        has_config = "--strategy=mwms" in self.program
        return here.start(
            wrapper, *program, world=self.world, tf_config=has_config, env=env
        )

    def said(self, cluster: Cluster, here: Place) -> list[Worker]:
        """Where its workers speak."""
        if not self.is_supervised:
            return list(cluster)
        return [Worker(0, here.path / "logs/worker-0.log", here.path / "never")]


TRAIN = ("train.py", "--shares", "--save-every=3", "--pause=0.02", "--strategy=mwms")
JOBS = {
    Job(name="states", program=("chain.py", "30")): 8,
    Job(name="supervisor", program=("chain.py", "20"), is_supervised=True): 3,
    Job(name="tensorflow", program=TRAIN, world=1): 1,
    Job(name="tensorflow", program=TRAIN, world=2): 2,
    Job(name="tensorflow", program=TRAIN, world=3): 1,
    Job(name="manager", program=(*TRAIN, "--form=manager")): 1,
}
"""By weight."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """One run of a job that nothing happens to, and one more.

    Attributes:
        results: of the workers.
        seconds: from the start to the end.
        operations: how many of each kind, by worker.
        left: see `left_in`.
    """

    results: list[str]
    seconds: float
    operations: list[collections.Counter[str]]
    left: set[str]


def watch(zygote: Zygote, job: Job) -> Undisturbed:
    """Runs it undisturbed."""
    with place(zygote) as here:
        cluster, began = job.start(here), time.monotonic()
        cluster.expect(*[0] * job.world)
        seconds = time.monotonic() - began
        results = results_of(job, cluster, here)
        operations = [
            collections.Counter((here.path / f"operations-{i}").read_text().split())
            for i in range(job.world)
        ]
        job.start(here).expect(*[0] * job.world)
        left = left_in(here)
    return Undisturbed(
        results=results, seconds=seconds, operations=operations, left=left
    )


def results_of(job: Job, cluster: Cluster, here: Place) -> list[str]:
    """What each worker said last; a log may be that of several runs."""
    found = (worker.lines("result")[-1] for worker in job.said(cluster, here))
    return [" ".join(each) for each in found]


def left_in(here: Place) -> set[str]:
    """What lies in the places of a run; numbers and tokens do not count.

    The memory is not among them: whoever lends it takes it back. Nor is what nobody can
    tell from a file of a process that lives, and goes an hour later; nor a note, which
    some commits have, nor the beat of a lease, which takes a while to come.
    """
    found = set()
    for root in (here.checkpoints, here.path / "mirror"):
        for path in root.rglob("*"):
            name = str(path.relative_to(here.path))
            if not name.startswith("ckpt/journal") and not NEITHER.search(name):
                found.add(NUMBERS.sub("#", name))
    return found


def check_kept(here: Place) -> None:
    """No more commits are there than are kept, and one more: retention comes last."""
    commits = sorted(here.checkpoints.glob("*/COMMITTED"))
    assert len(commits) <= KEPT + 1, commits


def check_restored(job: Job, cluster: Cluster, here: Place, committed: int) -> int:
    """All workers have restored what was committed before, or something newer.

    Returns:
        The newest step that is reported as committed now.
    """
    for worker in job.said(cluster, here):
        newest = 0 if job.is_supervised else committed  # its log is that of all runs
        for word, step, *_ in (line.split() for line in saying(worker)):
            if word == "restored":
                assert int(step) >= newest, f"{newest} is lost\n{worker.output}"
            else:
                newest = int(step)
        committed = max(committed, newest)
    commits = records(here.checkpoints, "commit")
    return max([committed, *(int(record["step"]) for record in commits)])


def saying(worker: Worker) -> list[str]:
    """What it says of steps, in order."""
    lines = worker.output.splitlines()
    return [line for line in lines if re.match(r"(restored|committed) \d", line)]


def kill(
    job: Job, here: Place, known: Undisturbed, rng: random.Random
) -> tuple[Cluster, str]:
    """One run that is killed, and when."""
    victim = rng.randrange(job.world)
    if rng.random() < 0.5:
        when = "at a time"
        cluster = job.start(here)
        time.sleep(rng.uniform(0, known.seconds))
        send([cluster[victim]], signal.SIGKILL)
    else:
        operations = known.operations[victim]
        kind = rng.choice(sorted(operations))
        count = rng.randint(1, operations[kind])
        plan = {"worker": victim, "kind": kind, "count": count}
        cluster = job.start(here, KILL_AT=json.dumps(plan))
        when = f"before {kind}"
    everyone = list(cluster)
    wait_until(
        lambda: cluster[victim].code is not None,
        f"an end, killed {when}",
        say=cluster.story(),
    )
    is_killed = cluster[victim].code == -signal.SIGKILL
    if is_killed and not have_ended(everyone):
        time.sleep(rng.uniform(0, AFTER))
        send(everyone, signal.SIGKILL)
    if is_killed:
        cluster.wait()
        return cluster, when
    cluster.expect(*[0] * job.world)
    return cluster, TOO_LATE


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """The zygote that forks all of them, and what each job is undisturbed."""
    zygote = Zygote()
    undisturbed = functools.cache(functools.partial(watch, zygote))

    def trial(rng: random.Random) -> Facts:
        job = rng.choices(list(JOBS), list(JOBS.values()))[0]
        known = undisturbed(job)
        whens: list[str] = []
        with place(zygote) as here:
            try:
                committed = 0
                for _ in range(rng.randint(1, MOST)):
                    cluster, when = kill(job, here, known, rng)
                    whens.append(when)
                    committed = check_restored(job, cluster, here, committed)
                    if when == TOO_LATE:
                        break
                for _ in range(2):
                    cluster = job.start(here)
                    cluster.expect(*[0] * job.world)
                    committed = check_restored(job, cluster, here, committed)
                    assert results_of(job, cluster, here) == known.results
                differs = left_in(here) ^ known.left
                assert not differs, f"left, or gone: {sorted(differs)}"
                check_kept(here)
            except Exception as error:
                raise AssertionError(f"{job}, {whens}: {error}") from error
            restored = records(here.checkpoints, "restored", tier="memory")
        return {
            "job": job.name,
            "processes": f"{job.world}",
            "kills": len(whens) - whens.count(TOO_LATE),
            "went on from memory": len(restored),
            **collections.Counter(whens),
        }

    with contextlib.closing(zygote):
        yield trial


CAMPAIGN = Campaign(
    name="kills",
    promise=(
        "SIGKILL, once or several times in a row, to a handler with named States, to "
        "the supervisor, to TensorFlow's multi-worker training with 1, 2 and 3 "
        "processes, and to one with a CheckpointManager: half of them at any time of a "
        "run, half before a file operation of a save, a share, a merge, a rename, "
        "retention, an upload, a snapshot, a restore or the lease. The same command "
        "again goes on from the newest commit that was reported, or a newer one, and "
        "comes to the same bytes; one more run later nothing lies there that an "
        "undisturbed run does not leave."
    ),
    trials=1800,
    short=5,
    mark="multiprocess",
    prepare=prepare,
)
