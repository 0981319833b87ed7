"""Power loss: records a run, and rebuilds its disk as a crash may have left it.

The method is that of ALICE and CrashMonkey. Every operation before an instant was made;
data that were not synced before the instant are lost or partly present:

- In a file, these data are the bytes written since the file's last sync. The file has
  the old bytes, or all new bytes, or new bytes up to an offset, followed by zeros or by
  old bytes.
- In a directory, these data are single entries, as if the file system wrote the entries
  in any order; or all entries since an instant, as in a journaling file system. A
  renamed file has either its old name or its new name.

Each worker runs on a machine of its own, and the machines share a file system. Bytes
are in the memory of the machine that wrote them, until this machine syncs them; no
other machine can sync them. Names are stored in one place, so a sync of a directory by
any machine syncs all names of the directory. All machines lose power at once.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.campaign import Campaign, Facts, Trial
from campaigns.kills import (
    JOBS,
    Job,
    check_kept,
    check_restored,
    left_in,
    results_of,
    watch,
)
from tests.multiprocess.harness import Cluster, Place, Zygote, place
from tfpreempt.checkpoint.directory import catalog, layout, user_metadata
from tfpreempt.checkpoint.restore.restore import newest_verified
from tfpreempt.checkpoint.restore.verification import faults
from tfpreempt.core.journal import parse_record
from tfpreempt.storage.local import LocalStore

MOST = 3
"""Largest number of power losses of one run, one after the other."""
LOOKS = 20
"""Additional instants of each run, whose disk is only checked."""
ROOT = 0
CHIEF = 0
PLACES = ("ckpt", "mirror", "memory")
RECORDED = [job for job in JOBS if job.can_be_recorded]

Step = list[Any]
Tree = dict[tuple[int, str], tuple[int, bool]]
"""Inode number and whether it is a directory, for each directory and name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A recorded run, and the instant of the power loss.

    Attributes:
        steps: operations before the instant; see programs/recorded.py.
        rng: draws the lost data.
    """

    steps: list[Step]
    rng: random.Random

    def rebuild(self, directory: Path) -> None:
        """Writes a disk as a power loss at the instant may leave it."""
        for name in PLACES:
            shutil.rmtree(directory / name, ignore_errors=True)
        self._fill(ROOT, directory, self._tree(), {})

    def _fill(self, folder: int, path: Path, tree: Tree, made: dict[int, Path]) -> None:
        for (parent, name), (number, is_folder) in tree.items():
            below = path / name
            if parent != folder:
                continue
            if is_folder:
                below.mkdir()
                self._fill(number, below, tree, made)
            elif number in made:
                os.link(made[number], below)
            else:
                data, changed_at = self._content(number)
                below.write_bytes(data)
                os.utime(below, ns=(changed_at, changed_at))
                made[number] = below

    def _tree(self) -> Tree:
        """Returns the remaining entries of all directories."""
        synced = {step[1]: i for i, step in enumerate(self.steps) if step[0] == "sync"}
        names = {
            i: step[3] if step[0] == "moved" else step[1]
            for i, step in enumerate(self.steps)
            if step[0] in ("entry", "gone", "moved")
        }
        kept = {i for i, folder in names.items() if synced.get(folder, -1) > i}
        if self.rng.random() < 0.5:
            kept = set(range(self.rng.randint(max(kept), len(self.steps)) + 1))
        else:
            share = self.rng.random()
            kept |= {i for i in names if self.rng.random() < share}
        tree: Tree = {}
        for kind, *what in (self.steps[i] for i in names if i in kept):
            if kind == "gone":
                tree.pop((what[0], what[1]), None)
                continue
            *_, folder, name, number, is_folder = what
            if kind == "moved":  # the old name may not be the recorded one
                tree = {key: each for key, each in tree.items() if each[0] != number}
            tree[folder, name] = (number, is_folder)
        return tree

    def _content(self, number: int) -> tuple[bytes, int]:
        """Returns the remaining bytes of a file, and their time."""
        versions = [(b"", 0)]  # contents at the last sync, and since then
        writers = [CHIEF]  # the machine of each version
        for step in self.steps:
            if step[:2] == ["data", number]:
                versions.append((base64.b64decode(step[2]), step[3]))
                writers.append(step[4])
            elif step[:2] == ["sync", number]:
                while step[2] in writers[1:]:  # up to the last version of this machine
                    del versions[0], writers[0]
        old, *later = versions
        new = self.rng.choice(later or [old])
        if new == old:
            return old
        cut = self.rng.randint(0, len(new[0]))
        behind = self.rng.choice((b"", bytes(len(new[0]) - cut), old[0][cut:]))
        return self.rng.choice((old, new, (new[0][:cut] + behind, new[1])))

    def reported(self, cluster: Cluster) -> Reported:
        """Returns the steps in the chief's output and journal before the instant."""
        sizes = [step[1] for step in self.steps if step[0] == "said"]
        output = cluster[CHIEF].output.encode()[: max(sizes, default=0)].decode()

        def newest(pattern: str) -> int:
            return max([0, *map(int, re.findall(pattern, output, re.MULTILINE))])

        journals = {step[3] for step in self.steps if step[2:3] == ["worker-0.jsonl"]}
        texts = [
            base64.b64decode(step[2])
            for step in self.steps
            if step[0] == "data" and step[1] in journals
        ]
        found = map(parse_record, b"".join(texts[-1:]).splitlines())
        steps = [each["step"] for each in found if each and each["event"] == "commit"]
        return Reported(
            committed=max([newest(r"^committed (\d+)\n"), *map(int, steps)]),
            noted=newest(r"^noted (\d+)\n"),
            copied=newest(r"checkpoint for step (\d+) uploaded to .+\n"),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The newest steps that were reported as committed, noted and mirrored."""

    committed: int = 0
    noted: int = 0
    copied: int = 0

    def check(self, directory: Path, world: int) -> None:
        """Checks that a disk has the reported steps, with parts of `world` workers."""
        problems: list[str] = []
        newest = newest_verified(str(directory / "ckpt"), problems.append)
        step = newest.step or 0 if newest else 0
        assert step >= self.committed, f"{self}, there is {step}: {problems}"
        if newest and newest.manifest and world > 1:
            there = {file.name.split("/")[0] for file in newest.manifest.files}
            parts = {layout.worker_name(worker) for worker in range(world)}
            assert parts <= there, f"{self}, there is {step}, without {parts - there}"
        if newest and step == self.noted:
            assert user_metadata.read(newest) == {"step": step}, "a note is lost"
        store = LocalStore(str(directory / "mirror"))
        copies = catalog.commits(store, problems.append)
        whole = [each for each in copies if not faults(each, every_byte=True)]
        step = max((each.step or 0 for each in whole), default=0)
        assert step >= self.copied, f"{self}, there is a copy of {step}: {problems}"


def run(job: Job, here: Place, before: Reported, rng: random.Random) -> Reported:
    """Runs a job up to a power loss at a random instant; also checks other instants.

    Args:
        job: the job.
        here: directory of the run.
        before: steps that were reported before this run.
        rng: draws the lost data.

    Returns:
        The steps that were reported up to the power loss.
    """
    cluster = job.start(here, "recorded.py", RECORD="yes")
    cluster.expect(*[0] * job.world)
    check_restored(job, cluster, here, before.committed)
    record = here.path / "recorded.jsonl"
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    record.unlink()
    start = steps.index(["sync", ROOT, CHIEF])
    looked_at = here.path / "looked-at"
    looked_at.mkdir(exist_ok=True)
    for directory in (*[looked_at] * LOOKS, here.path):
        crash = Crash(steps=steps[: rng.randint(start + 1, len(steps))], rng=rng)
        told = crash.reported(cluster)
        told = Reported(
            committed=max(before.committed, told.committed),
            noted=told.noted or before.noted,
            copied=max(before.copied, told.copied),
        )
        crash.rebuild(directory)
        told.check(directory, job.world)
    return told


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: runs the zygote, and makes the undisturbed run of each job."""
    zygote = Zygote()
    undisturbed = functools.cache(functools.partial(watch, zygote))

    def trial(rng: random.Random) -> Facts:
        job = rng.choice(RECORDED)
        known = undisturbed(job)
        restarts = rng.randint(1, MOST)
        with place(zygote) as here:
            told = Reported()
            for _ in range(restarts):
                told = run(job, here, told, rng)
            committed = told.committed
            for _ in range(2):
                cluster = job.start(here, "recorded.py", RECORD="")
                cluster.expect(*[0] * job.world)
                committed = check_restored(job, cluster, here, committed)
                assert results_of(job, cluster, here) == known.results
            differs = sorted(left_in(here) ^ known.left)
            assert not differs, f"left, or gone: {differs}"
            check_kept(here)
        crashes = restarts * (LOOKS + 1)
        return {
            "job": job.name,
            "workers": f"{job.world}",
            "crashes": crashes,
            "with a restart": restarts,
        }

    with contextlib.closing(zygote):
        yield trial


CAMPAIGN = Campaign(
    name="power",
    promise=(
        "The power fails at a random instant of a recorded run, once or several "
        "times in a row. The run has one worker, or two workers that share a disk "
        "and each write a part of a commit. Unsynced data are lost or partly "
        "present: in the checkpoint directory, the lease, the metadata that the "
        "program adds to checkpoints, mirrors and snapshots on a disk. Every commit, "
        "metadata file and mirrored commit that the program had reported as written "
        "before the failure is present and intact, with the parts of all workers. "
        "The same command resumes from the newest of these commits and ends with the "
        "same bytes."
    ),
    trials=250,
    short=3,
    mark="multiprocess",
    prepare=prepare,
    fixed=(
        "tfpreempt did not sync the parent directory of a new checkpoint directory, "
        "so a power failure could remove the directory with all commits. The folders "
        "of an object store in a local directory had the same fault. Fixed "
        "(`checkpoint/test_directories.py`, `storage/test_local_store.py`).",
        "The `checkpoint` file of a CheckpointManager was not synced. After a power "
        "failure the file was empty, and every start failed. Fixed "
        "(`checkpoint/test_writer.py`).",
        "Two saves of a CheckpointManager with the same number were interrupted, one "
        "after the other. The next start treated the files of the first save as a "
        "checkpoint that another program had written after the last commit. So the "
        "start restored no States. Fixed (`checkpoint/test_restore.py`).",
    ),
    labels={
        "crashes": "simulated power failures",
        "with a restart": "power failures with a restart of the job",
        "workers": "number of workers",
    },
)
