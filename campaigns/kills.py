"""SIGKILL at random instants; then the same command resumes the run.

Half of the kills come at a time drawn from the duration of a whole run. The other half
come before a file operation, drawn from the operations of an undisturbed run; see
programs/killed.py. For these kills the phase is drawn first, so that a phase with few
operations is hit, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from campaigns.campaign import Campaign, Facts, Trial
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
from tfpreempt.core.snapshot_memory import SnapshotMemory

MOST = 4
"""Kills of one run; afterwards the run trains to its end."""
AFTER = 0.2
"""Longest delay in seconds until the other workers are killed too, as by a platform."""
ROOM = 64 << 20
TOO_LATE = "too late"
NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*([.-]([0-9a-f]*\d[0-9a-f]*|[0-9a-f]{8}))*")
NEITHER = re.compile(r"/\.tfpreempt-put-|\.metadata\.json$|\.renewals$")
KEPT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program that a trial kills.

    Attributes:
        name: name for people.
        program: file under programs/, and its arguments.
        world: number of processes.
        is_supervised: whether it is a supervisor, with the program as its workers.
        workers: number of workers of a supervisor.
    """

    name: str
    program: tuple[str, ...]
    world: int = 1
    is_supervised: bool = False
    workers: int = 1

    @property
    def can_be_recorded(self) -> bool:
        """Whether programs/recorded.py can run the job: one or two workers alone."""
        return self.world <= 2 and not self.is_supervised

    def start(self, here: Place, wrapper: str = "killed.py", **env: str) -> Cluster:
        """Starts the job in a directory, with the same command each time.

        Args:
            here: directory of the run.
            wrapper: program that runs the job's program.
            **env: more environment variables.
        """
        memory = here.path / "memory"
        memory.mkdir(exist_ok=True)
        lent = SnapshotMemory(directory=str(memory), bytes=ROOM, workers=self.world)
        env |= lent.to_environment()
        env["TFPREEMPT_MIRROR_DIR"] = f"{here.path}/mirror"
        env["TMPDIR"] = str(here.path)  # files that SIGKILL leaves are here
        if self.is_supervised:
            file, *more = self.program
            command = [sys.executable, PROGRAMS / file, here.checkpoints, *more]
            options = ["--log-dir", here.path / "logs", "--backoff", 0]
            options += ["--workers", self.workers, "--"]
            program = ["supervisor.py", *options, *command]
        else:
            program = list(self.program)
        has_workers = any(each.startswith("--strategy=mwms") for each in self.program)
        has_config = has_workers and not self.is_supervised
        return here.start(
            wrapper, *program, world=self.world, tf_config=has_config, env=env
        )

    def said(self, cluster: Cluster, here: Place) -> list[Worker]:
        """Returns the workers, with the logs that contain their output."""
        if not self.is_supervised:
            return list(cluster)
        return [Worker(0, here.path / "logs/worker-0.log", here.path / "never")]


TRAIN = ("train.py", "--shares", "--save-freq=3", "--pause=0.02", "--strategy=mwms")
TRAIN_SYNC = (*TRAIN, "--sync-saves")  # workers write shares, which the chief merges
JOBS = {
    Job(name="states", program=("chain.py", "30")): 700,
    Job(name="snapshots", program=("chain.py", "60", "rarely")): 150,
    Job(name="save_fn", program=("chain.py", "30", "save_fn")): 200,
    Job(name="supervisor", program=("chain.py", "20"), is_supervised=True): 240,
    Job(name="tensorflow", program=TRAIN): 160,
    Job(name="tensorflow", program=TRAIN, world=2): 60,
    Job(name="tensorflow", program=TRAIN_SYNC, world=2): 100,
    Job(name="tensorflow", program=TRAIN_SYNC, world=3): 80,
    Job(name="manager", program=(*TRAIN, "--form=manager")): 110,
}
"""Jobs, with weights."""

JAX = ("train.py", "--save-freq=3", "--pause=0.02")
JAX_JOBS = {
    Job(name="jax", program=(*JAX, "--strategy=none")): 1,
    Job(name="jax", program=(*JAX, "--strategy=mwms,whole"), world=2): 3,
    Job(
        name="jax",
        program=(*JAX, "--sync-saves", "--strategy=mwms,whole,asynchronous"),
        world=2,
    ): 3,
    Job(
        name="jax",
        program=(*JAX, "--strategy=mwms,asynchronous"),
        world=2,
    ): 3,
    Job(name="jax", program=(*JAX, "--strategy=mwms"), world=3): 2,
    Job(
        name="supervisor",
        program=(*JAX, "--strategy=mwms"),
        is_supervised=True,
        workers=2,
    ): 2,
}

RARE = {"share": 4, "merge": 8, "takeover": 2, "restore": 2}
"""Phases with a weight above 1, because only few jobs or few runs have the phase."""
AT_START = {"read": "restore", "lease": "takeover"}
"""Phases of operations at the start of a run that resumes, by kind of operation."""
REMOVED = 0.15
"""Share of the kills after which a commit is removed, as by hand."""

RESUMED = "resumed at step"
TAKEN = re.compile(r"the snapshot of step (\d+) stopped training")

Operations = list[collections.Counter[str]]
"""Number of operations of each kind, for each worker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """An undisturbed run of a job, and a second run that only restores.

    Attributes:
        results: results of the workers.
        seconds: duration of the first run.
        operations: file operations of the first run.
        at_start: file operations of the second run.
        left: names of the files of the run, see `left_in`.
    """

    results: list[str]
    seconds: float
    operations: Operations
    at_start: Operations
    left: set[str]

    def phases(self, *, is_restart: bool) -> dict[str, list[dict[str, Any]]]:
        """Returns the plans of programs/killed.py, by the phase of the kill."""
        found = collections.defaultdict(list)
        for operations in (self.operations, *[self.at_start] * is_restart):
            for worker, counts in enumerate(operations):
                for kind, count in counts.items():
                    plan = {"worker": worker, "kind": kind, "count": count}
                    if operations is not self.at_start:
                        found[kind].append(plan)
                    elif kind in AT_START:
                        found[AT_START[kind]].append(plan)
        return found


def watch(zygote: Zygote, job: Job) -> Undisturbed:
    """Runs the job undisturbed."""
    with place(zygote) as here:
        cluster, began = job.start(here), time.monotonic()
        cluster.expect(*[0] * job.world)
        seconds = time.monotonic() - began
        results = results_of(job, cluster, here)
        operations = take_operations(job, here)
        job.start(here).expect(*[0] * job.world)
        at_start = take_operations(job, here)
        left = left_in(here)
    return Undisturbed(
        results=results,
        seconds=seconds,
        operations=operations,
        at_start=at_start,
        left=left,
    )


def take_operations(job: Job, here: Place) -> Operations:
    """Returns the file operations of the run that has just ended."""
    files = [here.path / f"operations-{worker}" for worker in range(job.world)]
    found = [collections.Counter(file.read_text().split()) for file in files]
    for file in files:
        file.unlink()
    return found


def results_of(job: Job, cluster: Cluster, here: Place) -> list[str]:
    """Returns the last result of each worker; a log may be of several runs."""
    found = (worker.lines("result")[-1] for worker in job.said(cluster, here))
    return [" ".join(each) for each in found]


def left_in(here: Place) -> set[str]:
    """Returns the names of the files of a run, without their numbers and tokens.

    Excluded are snapshots, because the supervisor reclaims their memory, and files that
    only some runs have: the note of a commit, and the first renewal of a lease.
    """
    found = set()
    for root in (here.checkpoints, here.path / "mirror"):
        for path in root.rglob("*"):
            name = str(path.relative_to(here.path))
            if name.startswith("ckpt/journal") or NEITHER.search(name):
                continue
            found.add(NUMBERS.sub("#", name))
    return found


def check_kept(here: Place) -> None:
    """Checks that at most one commit more than `max_to_keep` exists.

    Retention comes last in a save, so a kill may leave one commit more. The same holds
    for the mirror. A local commit also remains while its upload is running.
    """
    mirror = here.path / "mirror"
    most = {here.checkpoints: KEPT + 1 + mirror.exists(), mirror: KEPT + 1}
    for root, allowed in most.items():
        commits = sorted(root.glob("*/COMMITTED"))
        assert len(commits) <= allowed, commits


def newest_snapshot(job: Job, cluster: Cluster) -> int:
    """Returns the step of the newest intact snapshot of a run's reports; 0: none."""
    if job.name != "snapshots":
        return 0
    return max(map(int, TAKEN.findall(cluster[0].output)), default=0)


def step_of(commit: Path) -> int:
    """Returns the step of a commit that is a directory."""
    return int(commit.name.split(".")[0])


def remove_a_commit(here: Place, rng: random.Random) -> int | None:
    """Removes a commit, as by hand; returns the newest remaining step.

    Returns None if there is no commit directory, or only one.
    """
    found = [path.parent for path in here.checkpoints.glob("[0-9]*/COMMITTED")]
    if len(found) < 2:
        return None
    found.remove(removed := rng.choice(found))
    shutil.rmtree(removed)
    return max(map(step_of, found))


def check_restored(job: Job, cluster: Cluster, here: Place, committed: int) -> int:
    """Checks that all workers have restored the reported commit, or a newer state.

    Returns:
        The newest step that is reported as committed now.
    """
    for worker in job.said(cluster, here):
        newest = 0 if job.is_supervised else committed  # supervisor: log of all runs
        for word, step, *_ in (line.split() for line in saying(worker)):
            if word == "restored":
                assert int(step) >= newest, f"{newest} is lost\n{worker.output}"
            else:
                newest = int(step)
        committed = max(committed, newest)
    commits = records(here.checkpoints, "commit")
    return max([committed, *(int(record["step"]) for record in commits)])


def saying(worker: Worker) -> list[str]:
    """Returns the log's lines about steps, in order."""
    lines = worker.output.splitlines()
    return [line for line in lines if re.match(r"(restored|committed) \d", line)]


def kill(
    job: Job,
    here: Place,
    known: Undisturbed,
    rng: random.Random,
    *,
    is_restart: bool,
) -> tuple[Cluster, str]:
    """Kills one run; returns its processes, and a text that names the instant."""
    if rng.random() < 0.5:
        when, victim = "killed at any time", rng.randrange(job.world)
        cluster = job.start(here)
        time.sleep(rng.uniform(0, known.seconds))
        send([cluster[victim]], signal.SIGKILL)
    else:
        phases = known.phases(is_restart=is_restart)
        weights = [RARE.get(phase, 1) for phase in phases]
        [phase] = rng.choices(list(phases), weights)
        plan = rng.choice(phases[phase])
        when = f"killed in {phase}"
        victim, plan["count"] = plan["worker"], rng.randint(1, plan["count"])
        cluster = job.start(here, KILL_AT=json.dumps(plan))
    if job.is_supervised:
        when = "killed in the supervisor"
    everyone = list(cluster)
    wait_until(
        lambda: cluster[victim].code is not None,
        f"an end, {when}",
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
def prepare(framework: str, jobs: Mapping[Job, int]) -> Iterator[Trial]:
    """Context manager: runs the zygote, and makes the undisturbed run of each job.

    Args:
        framework: framework of the programs.
        jobs: jobs with their weights.
    """
    zygote = Zygote(framework)
    undisturbed = functools.cache(functools.partial(watch, zygote))

    def trial(rng: random.Random) -> Facts:
        job = rng.choices(list(jobs), list(jobs.values()))[0]
        known = undisturbed(job)
        whens: list[str] = []
        with place(zygote) as here:
            try:
                committed, left = 0, None
                for _ in range(rng.randint(1, MOST)):
                    is_restart = bool(whens)
                    cluster, when = kill(job, here, known, rng, is_restart=is_restart)
                    whens.append(when)
                    committed = check_restored(job, cluster, here, committed)
                    committed = max(committed, newest_snapshot(job, cluster))
                    if when == TOO_LATE:
                        break
                    if not job.is_supervised and rng.random() < REMOVED:
                        left = remove_a_commit(here, rng)
                    if left is not None:
                        whens.append("a commit removed by hand")
                        committed = left
                        break
                for _ in range(2):
                    is_told = committed > 0 and not job.is_supervised
                    cluster = job.start(here)
                    cluster.expect(*[0] * job.world)
                    committed = check_restored(job, cluster, here, committed)
                    assert results_of(job, cluster, here) == known.results
                    assert RESUMED in cluster[0].output or not is_told
                differs = left_in(here) ^ known.left
                assert not differs, f"left, or gone: {sorted(differs)}"
                check_kept(here)
            except Exception as error:
                raise AssertionError(f"{job}, {whens}: {error}") from error
            restored = records(here.checkpoints, "restored", tier="memory")
        return {
            "job": job.name,
            "processes": f"{job.world * job.workers}",
            "kills": sum(when.startswith("killed") for when in whens),
            "resumed from memory": len(restored),
            **collections.Counter(whens),
        }

    with contextlib.closing(zygote):
        yield trial


CAMPAIGN = Campaign(
    name="kills",
    promise=(
        "SIGKILL hits a program, once or several times in a row. The programs are: "
        "a handler with named States that records, mirrors and deletes commits; a "
        "handler with a save_fn; a handler with snapshots and rare commits; the "
        "supervisor; TensorFlow's multi-worker training with 1, 2 and 3 processes; "
        "and a handler with a CheckpointManager. Half of the kills come at a random "
        "time. The other half come before a file operation of a save, a share, a "
        "merge, a rename, retention, an upload, a snapshot, a restore, the lease or "
        "its takeover. Sometimes a commit is removed by hand before the next start. "
        "The same command resumes from the newest reported commit that exists, from "
        "a newer commit, or from a newer intact snapshot, and names the commit or "
        "the snapshot. The final state is equal, byte for byte, to that of an "
        "uninterrupted run, and after one more run no extra file is left."
    ),
    trials=1440,
    short=5,
    mark="multiprocess",
    prepare=functools.partial(prepare, "tensorflow", JOBS),
    labels={
        "resumed from memory": "resumes from a snapshot",
        "too late": "kills after the end of the program",
        "a commit removed by hand": "commits removed by hand",
        "killed at any time": "kills at a random time",
        "killed in the supervisor": "kills of the supervisor",
        "killed in lease": "kills in the lease",
        "killed in rename": "kills in a rename",
        "killed in snapshot": "kills in a snapshot",
        "killed in retention": "kills in retention",
        "killed in restore": "kills in a restore",
        "killed in upload": "kills in an upload",
        "killed in read": "kills in a read",
        "killed in save": "kills in a save",
        "killed in takeover": "kills in a takeover",
        "killed in share": "kills in a share",
        "killed in merge": "kills in a merge",
        "processes": "number of processes",
    },
)

JAX_CAMPAIGN = dataclasses.replace(
    CAMPAIGN,
    name="jax-kills",
    promise=(
        "The same as `kills`, for loops on JAX with a `PyTreeState`, in 1, 2 and 3 "
        "processes of `jax.distributed`, and in 2 processes under the supervisor: "
        "with arrays that are divided among the processes, with periodic saves that "
        "are asynchronous or not, and with steps that end before they are computed. "
        "One process is killed, at a random time or before a file operation, and the "
        "others up to 0.2 s later. The same command resumes from the newest reported "
        "commit that exists or from a newer commit. The final bytes are the same as "
        "in an uninterrupted run, and after one more run no extra file is left."
    ),
    trials=120,
    short=2,
    prepare=functools.partial(prepare, "jax", JAX_JOBS),
)
