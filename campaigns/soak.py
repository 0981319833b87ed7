"""An hour of training with an event every few seconds, in two pairs of workers.

One pair runs under `tfpreempt run`. Again and again its workers are notified, killed
and stopped, and commits are removed, while the supervisor keeps running. The workers of
the other pair are never restarted. So each step of the first pair can be compared with
the same step of the other pair.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from campaigns.campaign import Campaign, Facts, Trial
from campaigns.damage import flip, garble, truncate
from campaigns.kills import step_of
from tests.multiprocess.harness import Place, Zygote, place, wait_until
from tests.multiprocess.supervised import Run, run
from tfpreempt.core.snapshot_memory import SnapshotMemory

WORLD = 2
TRAIN = ("--steps=1000000000", "--soak", "--shares", "--save-freq=20")
TRAIN += ("--pause=0.03", "--strategy=mwms")
OPTIONS = ("--hang-timeout", "4")
OPTIONS += ("--kill-after", "1", "--max-failures", "1000000")
MEMORY = 64 << 20
MOMENT = 4.0
"""Longest time in seconds until the next disturbance."""
SHORT_STOP = 1.5
"""Seconds of a stop after which no worker counts as crashed or hung."""
STEPS = 50
"""Steps after a start or a disturbance until processes are measured."""
LIMIT = 240.0

Sample = dict[str, int]
"""Measured values, by unit."""

Digests = dict[tuple[int, int], str]
"""Digest of a worker's state after a step, from the first pair that made the step."""


class Pair:
    """Two workers of one run, observed by their logs.

    Args:
        logs: log of each worker; the next process of the worker appends to the log.
        digests: digests of all pairs.
    """

    def __init__(self, logs: Sequence[Path], digests: Digests) -> None:
        self._logs = logs
        self._digests = digests
        self._read = [0] * WORLD
        self.restored = [-1] * WORLD
        self.starts = [0] * WORLD
        self.steps = [0] * WORLD
        """Number of steps since the last start."""
        self.newest = 0

    def look(self) -> None:
        """Reads new lines of the logs, and compares each step with earlier digests."""
        for worker, log in enumerate(self._logs):
            if not log.exists():
                continue
            with log.open("rb") as file:
                file.seek(self._read[worker])
                whole, _, _ = file.read().rpartition(b"\n")
            self._read[worker] += len(whole) + bool(whole)
            for line in whole.decode(errors="replace").splitlines():
                word, *said = line.split() or [""]
                if word == "restored":
                    self.starts[worker] += 1
                    self.restored[worker], self.steps[worker] = int(said[0]), 0
                elif word == "step":
                    self._check(worker, int(said[0]), said[1])

    def _check(self, worker: int, step: int, digest: str) -> None:
        expected = self.restored[worker] + self.steps[worker] + 1
        assert step == expected, f"worker {worker}: step {step}, not {expected}"
        known = self._digests.setdefault((worker, step), digest)
        assert known == digest, f"worker {worker}: {digest} at {step}, not {known}"
        self.steps[worker] += 1
        self.newest = max(self.newest, step)

    def wait_steps(self, more: Sequence[int] = (0, 0), starts: int = 0) -> None:
        """Waits until each worker has started `starts` times and trained more steps."""

        def has_gone_on() -> bool:
            self.look()
            counts = zip(self.steps, more, strict=True)
            has_stepped = all(now >= before + STEPS for now, before in counts)
            return has_stepped and min(self.starts) >= starts

        try:
            wait_until(has_gone_on, "steps", LIMIT)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def story(self) -> str:
        """Returns the end of each log."""
        return "\n".join(
            log.read_text(errors="replace")[-4000:] if log.exists() else f"no {log}"
            for log in self._logs
        )


class Commits:
    """The commits of a directory; the campaign damages some, but never all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._damaged: set[int] = set()  # inodes, because names are reused

    def whole(self) -> list[Path]:
        """Returns the undamaged commits, the newest last."""
        found = [marker.parent for marker in self._directory.glob("*/COMMITTED")]
        whole = []
        for path in found:
            with contextlib.suppress(FileNotFoundError):  # deleted by retention
                if path.stat().st_ino not in self._damaged:
                    whole.append(path)
        return sorted(whole, key=step_of)

    def measure(self) -> Sample:
        """Counts the files, except of journals and of commits that were changed."""
        found = 0
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name != "journal" and path.stat().st_ino not in self._damaged:
                    found += 1 + len(list(path.rglob("*")))
        return {"files": found}

    def damage(self, rng: random.Random, *, is_newest: bool) -> None:
        """Damages a file of a commit, or deletes the commit; one stays intact."""
        whole = self.whole()
        if len(whole) < 2:
            return
        path = whole[-1 if is_newest else 0]
        with contextlib.suppress(FileNotFoundError):
            self._damaged.add(path.stat().st_ino)
            if rng.random() < 0.3:
                shutil.rmtree(path)
            else:
                files = sorted(file for file in path.rglob("*") if file.is_file())
                rng.choice((flip, garble, truncate))(rng.choice(files), rng)


# --- measurements --------------------------------------------------------------------

MOST = {"threads": 3, "descriptors": 3, "files": 4}
"""Largest allowed growth from the first to the second half of a run. Thread pools grow
a little on a busy machine, and the number of descriptors differs by two between starts.
A leak in each save or restart would add hundreds in an hour."""
SHARE = 0.04
"""Allowed growth of memory, as a share: the allocator of a worker varies by 9 MiB."""
KEPT = 3
"""Allowed growth of memory in KiB for each step of a process. TensorFlow alone keeps
1.6 KiB of each sum over two processes, and about 6 KiB of a save, which also sums."""
ENOUGH = 12
"""Number of samples from which halves are compared."""


def held_by(pid: int) -> Sample:
    """Returns the threads, descriptors and anonymous memory of a process."""
    process = Path(f"/proc/{pid}")
    status = process.joinpath("status").read_text().splitlines()
    [memory] = [line.split()[1] for line in status if line.startswith("RssAnon")]
    threads, descriptors = (len(os.listdir(process / name)) for name in ("task", "fd"))
    return {"threads": threads, "descriptors": descriptors, "KiB": int(memory)}


def check_flat(samples: dict[str, list[Sample]]) -> None:
    """Checks that the second half of the samples is not larger than the first.

    The first quarter of the samples does not count, because caches fill in that time.
    """
    for what, taken in samples.items():
        if len(taken) < ENOUGH:
            continue
        counted = taken[len(taken) // 4 :]
        half = len(counted) // 2
        before, after = (
            {unit: statistics.median(each[unit] for each in some) for unit in some[0]}
            for some in (counted[:half], counted[half:])
        )
        more = {unit: after[unit] - before[unit] for unit in before}
        kept = SHARE * before.get("KiB", 0) + KEPT * more.pop("steps", 0)
        for unit, value in more.items():
            most = {**MOST, "KiB": kept}[unit]
            assert value <= most, f"{value} {unit} more, {what}: {counted}"


# --- disturbances --------------------------------------------------------------------


class Soak:
    """Both pairs, and their disturbances.

    Args:
        made: the supervised run.
        calm_place: directory of the other run.
    """

    def __init__(self, made: Run, calm_place: Place) -> None:
        self._made = made
        self._lock = threading.Lock()
        digests: Digests = {}
        logs = [made.here.path / f"logs/worker-{i}.log" for i in range(WORLD)]
        self._stormy = Pair(logs, digests)
        memory = calm_place.path / "memory"
        memory.mkdir()
        lent = SnapshotMemory(directory=str(memory), bytes=MEMORY, workers=WORLD)
        self._alive = calm_place.start(
            "train.py", *TRAIN, world=WORLD, env=lent.to_environment()
        )
        logs = [calm_place.path / f"process-{i + 1}.log" for i in range(WORLD)]
        self._calm = Pair(logs, digests)
        self._commits = Commits(made.here.checkpoints)
        self._other_commits = Commits(calm_place.checkpoints)
        self._samples = defaultdict[str, list[Sample]](list)
        for pair in (self._stormy, self._calm):
            pair.wait_steps()

    def trial(self, rng: random.Random) -> Facts:
        """Disturbs each pair once."""
        with self._lock:
            before = self._stormy.newest
            beside = rng.choice(("stop", "damage", "nothing"))
            kind = rng.choice(("notice", "kill", "hang", "damage", "stop"))
            time.sleep(rng.uniform(0, MOMENT))
            if beside == "stop":
                self._stop(rng, [each.pid for each in self._alive])
            elif beside == "damage":
                self._other_commits.damage(rng, is_newest=False)
            for pair in (self._stormy, self._calm):
                pair.look()
            made = list(self._calm.steps)
            if kind == "stop":
                self._stop_supervised(rng)
            else:
                self._end(kind, rng)
            self._calm.wait_steps(made)
            assert self._calm.starts == [1] * WORLD, self._calm.story()
            more = self._sample(is_new=kind != "stop")
            check_flat(self._samples)
        steps = self._stormy.newest - before
        return {"stormy": kind, "calm": beside, "steps": steps, **more}

    def _stop_supervised(self, rng: random.Random) -> None:
        """Stops the supervised pair for a moment; the pair trains on."""
        made, starts = list(self._stormy.steps), list(self._stormy.starts)
        self._stop(rng, self._pids())
        self._stormy.wait_steps(made)
        assert self._stormy.starts == starts, self._stormy.story()

    def _end(self, kind: str, rng: random.Random) -> None:
        """Ends or hangs the supervised pair, and waits for its restart."""
        pair, pids = self._stormy, self._pids()
        if kind == "damage":
            self._commits.damage(rng, is_newest=rng.random() < 0.7)
        # These steps must not be lost; after a notice no step may be lost.
        reached = [step_of(commit) for commit in self._commits.whole()]
        if kind == "notice":
            reached.append(pair.newest)
        number = {"notice": signal.SIGTERM, "hang": signal.SIGSTOP}
        for pid in rng.choice([pids, pids[:1], pids[1:]]):
            os.kill(pid, number.get(kind, signal.SIGKILL))
        pair.wait_steps(starts=min(pair.starts) + 1)
        first, second = pair.restored
        assert first == second >= max(reached), (
            f"{kind}: {pair.restored} after {reached}\n{pair.story()}"
        )

    def _pids(self) -> list[int]:
        """Returns the process ids of the supervised workers."""
        return [self._made.pid(worker) for worker in range(WORLD)]

    @staticmethod
    def _stop(rng: random.Random, victims: Sequence[int]) -> None:
        """Stops processes so shortly that no worker counts as crashed."""
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0, SHORT_STOP))
        for pid in victims:
            os.kill(pid, signal.SIGCONT)

    def _sample(self, *, is_new: bool) -> Facts:
        """Measures all processes and directories; returns the growth since last time.

        Args:
            is_new: whether the workers of the supervised pair were restarted.
        """
        now = {
            "supervisor": held_by(self._made.supervisor.pid),
            "stormy directory": self._commits.measure(),
            "calm directory": self._other_commits.measure(),
        }
        for worker, calm in enumerate(self._alive):
            made = {"steps": self._calm.steps[worker]}
            now[f"calm worker {worker}"] = {**held_by(calm.pid), **made}
            if is_new:  # so that all samples of the worker have the same age
                now[f"stormy worker {worker}"] = held_by(self._made.pid(worker))
        more: Facts = {}
        for what, sample in now.items():
            taken = self._samples[what]
            taken.append(sample)
            for unit, value in sample.items():
                more[f"{unit} more, {what}"] = value - taken[-2:][0][unit]
        return more


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Both pairs train for as long as there are trials."""
    with (
        contextlib.closing(Zygote()) as zygote,
        place(zygote) as here,
        place(zygote) as calm_place,
        run(here, WORLD, *OPTIONS, program=("train.py", *TRAIN)) as made,
    ):
        yield Soak(made, calm_place).trial


CAMPAIGN = Campaign(
    name="soak",
    promise=(
        "Two workers run under `tfpreempt run` for an hour. About every 15 s one or "
        "both workers are notified, killed, hung or suspended, a commit is "
        "corrupted or removed before a kill, or the standby process is killed. "
        "Beside this *stormy* run, two *calm* workers train the same, and are never "
        "restarted: they are sometimes suspended, or their commits are corrupted or "
        "removed. The stormy run resumes "
        "from the newest intact commit or a newer snapshot; after a notice the run "
        "resumes at the newest step. The result of a step is the same bytes in "
        "every repetition and in the calm run. The supervisor's threads, descriptors "
        "and memory do not grow, and neither do the directories. A worker just after "
        "its restart has no more threads, descriptors and memory than after the "
        "earlier restarts. The calm workers grow only by the memory that TensorFlow "
        'keeps of each step, 3 KiB. (Among the sums, "more" is the last measurement '
        "minus the first.)"
    ),
    trials=240,
    short=2,
    mark="multiprocess",
    prepare=prepare,
    labels={
        "stormy": "disturbance of the stormy run",
        "calm": "disturbance of the calm run",
    },
)
