"""Mirrors in gs:// and s3:// over a network with random faults; without TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks import mirror_memory, mirror_speed
from campaigns import clouds
from campaigns.campaign import Campaign, Facts, Trial, unseen, warned_of
from campaigns.clouds import Cloud, Link, Weather
from tests.checkpoint.fakes import OwnContents, names, open_directory, write_part
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror import import_commit
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.state.contents import StagedSave
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.events import Fault
from tfpreempt.storage.open_store import open_store

ACTIONS = 10
PLACE = "bucket/run"
LATE = 20.0  # additional seconds for a busy machine
LIMIT = 60.0  # seconds for an upload without faults
MOST_BYTES = 256 << 20  # growth of the process in all trials
LARGE = 128  # MiB of a file; four or more parts move at a time
SHARE_OF_LARGE = 1 / 40  # of the trials
MOST_MIB = {
    # Each thread has a piece of 1 MiB in memory, for any size of a part: 4 and 15 MiB.
    ("gs", "upload"): 32,
    ("gs", "download"): 32,
    # 40 MiB are in flight, some of them twice, and 8 MiB are being checksummed.
    ("s3", "upload"): 96,
    # Each of four threads has a piece of 8 MiB three times: as chunks, joined, and in
    # Python. The allocator, with a heap for each thread, keeps the same amount.
    ("s3", "download"): 192,
}
OFTEN = ("503", "never came", "half an answer", "late")  # frequent faults with progress

Files = dict[str, bytes]
"""Bytes of files, by name with "/" between the parts."""


class Skewed(SystemClock):
    """A wall clock that is wrong, by up to days.

    Args:
        seconds: error of the clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


class RandomContents(OwnContents):
    """Files with different bytes in each save."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def capture(self, save: StagedSave, *_: Any, **__: Any) -> None:
        save.create_staging()
        for name in names("ckpt"):
            size = self._rng.choice([0, 20, 900, 4000, 15_000, 40_000])
            path = pathlib.Path(save.staging, name)
            path.write_bytes(b"%d;" % save.step + self._rng.randbytes(size))

    def restore(
        self, prefix: str, *, with_data: bool = True, is_partial: bool = False
    ) -> None:
        """Does nothing: the trial compares the files themselves."""


def files_below(path: str) -> Files:
    """Returns all files below a directory."""
    root = pathlib.Path(path)
    return {
        str(each.relative_to(root)): each.read_bytes()
        for each in root.rglob("*")
        if each.is_file()
    }


class World:
    """A cloud, all commits that were made, and the checks of their copies.

    Args:
        cloud: the object store.
    """

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.committed: dict[str, Files] = {}  # by folder in the store
        self.wrong: list[str] = []

    def shown(self) -> dict[str, Files]:
        """Returns the folders with a marker and a manifest, and their files."""
        folders: dict[str, Files] = {}
        for name, data in self.cloud.objects().items():
            folder, _, inside = name.removeprefix("run/").partition("/")
            folders.setdefault(folder, {})[inside] = data
        both = {"COMMITTED", "MANIFEST.json"}
        return {name: has for name, has in folders.items() if both <= set(has)}

    def look(self) -> None:
        """Checks after each change that the store shows only complete commits."""
        for folder, files in self.shown().items():
            expected = self.committed.get(folder, {})
            if files != expected:
                differ = {
                    name
                    for name in files.keys() | expected.keys()
                    if files.get(name) != expected.get(name)
                }
                self.wrong.append(f"{folder} is shown, and differs in {differ}")


class Machine:
    """A machine: disk, clock, network link to the cloud, and process.

    Args:
        rng: source of the random numbers.
        world: the cloud and the commits.
        directory: checkpoint directory on the disk.
        skew: error of the clock, in seconds.
    """

    def __init__(
        self, rng: random.Random, world: World, directory: str, skew: float
    ) -> None:
        self._rng, self._world = rng, world
        self.directory, self._clock = directory, Skewed(skew)
        weather = random.Random(rng.getrandbits(64))
        self.link = Link(world.cloud, weather, world.look)
        with mock.patch.dict(os.environ, self.link.environment()):
            self._store = open_store(f"{world.cloud.scheme}://{PLACE}")
            with contextlib.suppress(errors.CheckpointError):
                list(self._store.folders())  # connects to the link
        self.newest: Entry | None = None  # commit of the process
        self.mirror: Mirror | None = None
        self._step = 0
        self._leases: list[Lease] = []

    def start(self, keep: int) -> None:
        """Starts a process, which restores the newest commit of the disk and the store.

        Raises:
            CheckpointError: the store is unreachable, and the disk has no commit.
        """
        newest = max(map(sequence_of, self._world.shown()), default=0)
        failed = self.link.failed
        with warned_of() as warned:
            local, lost = self._start(keep)
        found = 0 if self.newest is None else self.newest.sequence or 0
        assert found >= local, f"{found} is restored, and {local} is here"
        if found >= newest:
            return
        what = f"{found} is restored, and the store shows {newest}"
        assert self.newest is not None, f"{what}: it begins anew"
        assert self.link.failed > failed, f"{what}, and nothing was in the way"
        said = [*lost, *(each for each in warned if self.newest.path in each)]
        assert any(self._store.uri in each for each in said), f"{what}; {warned}"

    def _start(self, keep: int) -> tuple[int, list[str]]:
        """Returns the newest local sequence number (or 0), and the reported losses."""
        lease = Lease(30.0, pause=self._wait_for_lease)
        policy = RetentionPolicy(max_to_keep=keep)
        mirror = Mirror(self._store, policy=policy, lease=lease)
        self._leases.append(lease)  # the release may not reach the store
        self._opened = open_directory(
            self.directory, RandomContents(self._rng), mirror=mirror, clock=self._clock
        )
        self._opened.start()
        opened = self._opened
        lost: list[str] = []
        found = local = opened.newest(lost.append)
        fetch_newer = functools.partial(
            opened.fetch_newer, found, lost.append, lost.append
        )
        try:
            if import_commit.look_for_newer(
                mirror, found, fetch_newer, instead="begin anew"
            ):
                found = opened.newest(lost.append)
                assert found is not None
            if found is None and lost:
                raise errors.CheckpointCorruptedError(lost[0])
        except errors.CheckpointError:
            mirror.close()
            raise
        if found is not None:
            opened.restore(found)
            self._step = found.step or 0
            here = files_below(found.path)
            assert here == self._world.committed[folder_of(found)], found.path
        mirror.begin(self.directory, found, self.record)
        self.newest, self.mirror = found, mirror
        return 0 if local is None else local.sequence or 0, lost

    def _wait_for_lease(self, seconds: float) -> float:
        self._world.wrong.append("it waits for a lease that nobody has")
        return seconds

    def record(self, fault: Fault) -> None:
        """Checks a fault for the journal."""
        assert fault.where == "mirror"

    def commit(self, attempt: str) -> None:
        """Saves a commit, which succeeds for any state of the network."""
        assert self.mirror is not None
        self._step += 1
        staged = write_part(self._opened, self._step, attempt)
        made = staged.publish("save", [0])
        assert made is not None
        self.newest = catalog.read_at(made.path)
        self._world.committed[folder_of(self.newest)] = files_below(made.path)

    @property
    def is_copied(self) -> bool:
        """Whether the store shows the newest commit, byte for byte."""
        assert self.newest is not None
        folder = folder_of(self.newest)
        shown = self._world.shown().get(folder)
        return shown == self._world.committed[folder]

    @property
    def has_commit(self) -> bool:
        """Whether the disk has a commit."""
        return any(each.is_committed for each in catalog.scan(self.directory))

    def die(self) -> None:
        """Cuts the power: no further request reaches the store."""
        self.link.down()
        if self.mirror is not None:
            self.mirror.stop()

    def leave(self) -> None:
        """Ends the process."""
        if self.mirror is not None:
            self.mirror.close()

    def close(self) -> None:
        """Closes the link, at the end of the test."""
        self.link.close()


def folder_of(entry: Entry) -> str:
    """Returns the folder of a commit in the store."""
    return f"{entry.step}.{entry.token}"


def drawn_cloud(rng: random.Random) -> Cloud:
    """Draws a cloud; Google's more often, because requests to moto are slower."""
    return clouds.Gcs() if rng.random() < 0.75 else clouds.S3()


def drawn_weather(rng: random.Random) -> Weather:
    """Draws the faults: none, one fault with some probability, or a few of each."""
    kind = rng.random()
    if kind < 0.2:
        return {}
    if kind < 0.6:
        return {rng.choice(clouds.TROUBLES): rng.choice([0.1, 0.5, 1.0])}
    share = rng.choice([0.02, 0.05, 0.09])
    return dict.fromkeys(clouds.TROUBLES, share)


def trial(rng: random.Random, cloud: Cloud) -> Facts:
    """Runs machines one after the other; the last ones have no faults."""
    world, keep, attempts = World(cloud), rng.choice([1, 2, 3]), 0
    facts: dict[str, int] = dict.fromkeys(
        ("commits", "starts", "starts refused", "deaths", "faults of copies"), 0
    )
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        machines: list[Machine] = []

        def machine(directory: str = "") -> Machine:
            """Returns a machine with an empty disk, or with an earlier disk."""
            disks = sorted({each.directory for each in machines})
            fresh = os.path.join(root, f"{len(machines)}")
            directory = directory or rng.choice([fresh, *disks[-2:]])
            skew = rng.choice([0.0, rng.uniform(-1e6, 1e6)])
            machines.append(Machine(rng, world, directory, skew))
            stack.callback(machines[-1].close)
            stack.callback(machines[-1].die)
            return machines[-1]

        def commit() -> None:
            nonlocal attempts
            attempts += 1
            here.commit(f"run-{attempts}")
            facts["commits"] += 1

        def start() -> None:
            before = here.link.failed
            try:
                here.start(keep)
            except errors.CheckpointError as error:
                refused = error
            else:
                facts["starts"] += 1
                return
            assert here.link.failed > before, f"refused without trouble: {refused}"
            assert not here.has_commit, f"refused with a commit here: {refused}"
            is_damage = isinstance(refused, errors.CheckpointCorruptedError)
            assert is_damage or "Make the storage reachable, or " in str(refused), (
                refused
            )
            facts["starts refused"] += 1

        here = machine()
        for _ in range(ACTIONS):
            if rng.random() < 0.5:
                here.link.begin(drawn_weather(rng))
            if here.mirror is None:
                start()
                continue
            match rng.choices(range(5), [6, 1, 1, 1, 1])[0]:
                case 0:
                    commit()
                case 1 if here.newest is not None:
                    if here.mirror.wait(rng.choice([0.0, 0.05, 0.2])):
                        assert here.is_copied
                case 2 if here.newest is not None:  # a notice
                    if silent := rng.random() < 0.3:
                        here.link.stall()
                    began, seconds = time.monotonic(), rng.choice([0.0, 0.05, 0.3])
                    if here.mirror.finish(seconds):
                        assert here.is_copied
                    assert time.monotonic() < began + seconds + LATE
                    if silent:
                        here.link.up()
                    here.leave()
                    facts["faults of copies"] += here.mirror.status.error_count
                    here = machine()
                case 3:
                    facts["deaths"] += 1
                    here.die()
                    here = machine()
                case 4:
                    here.link.stall()
                    for _ in range(2):
                        commit()
                    here.link.up()
            assert not world.wrong, world.wrong
        here.link.begin({})
        if here.mirror is None:
            start()
        assert here.mirror is not None
        for _ in range(2):  # the first may equal an abandoned upload
            commit()
            assert here.mirror.wait(LIMIT), here.mirror.status
            assert here.is_copied
        check_order(world, keep)
        here.leave()
        last, old = here.newest, here.directory
        assert last is not None

        here = machine(os.path.join(root, "new"))
        here.link.begin({rng.choice(["503", "401", "never came"]): 1.0})
        start()
        assert here.mirror is None, "it begins anew where the store cannot be asked"
        here.link.begin({})
        start()
        assert here.newest is not None
        assert here.newest.token == last.token
        commit()
        assert here.mirror.wait(LIMIT), here.mirror.status
        here.leave()
        last = here.newest

        here = machine(old)  # a disk with an older commit
        start()
        assert here.newest.token == last.token
        here.leave()
        assert not world.wrong, world.wrong
    for each in machines:
        for trouble, count in each.link.met.items():
            facts[trouble] = facts.get(trouble, 0) + count
    return {"store": cloud.scheme, **facts}


def large(rng: random.Random, cloud: Cloud) -> Facts:
    """Uploads and downloads a large commit, and checks the memory of the processes."""
    with mirror_speed.workplace() as root:
        link = Link(cloud, random.Random(rng.getrandbits(64)), lambda: None)
        place = f"{cloud.scheme}://{PLACE}"
        with (
            contextlib.closing(link),
            mock.patch.dict(os.environ, link.environment()),
        ):
            rare = dict.fromkeys(clouds.TROUBLES, 0.01)
            link.begin({**rare, rng.choice(OFTEN): 0.2, "all of it": 0.4})
            for way in mirror_speed.WAYS:
                grown = mirror_memory.grown(way, root, 1, LARGE, place)
                most = MOST_MIB[cloud.scheme, way]
                assert grown < most, f"{way}: {grown:.0f} MiB, not {most}"
    return {"store": cloud.scheme, "large moves": 2, **link.met}


def check_order(world: World, keep: int) -> None:
    """Checks that the store has no leftovers, and at most `keep` commits.

    Parts of an abandoned upload may stay until this run has a commit with a higher
    number.
    """
    shown = world.shown()
    assert len(shown) <= keep, sorted(shown)
    newest = max(map(sequence_of, shown))
    known = {*shown, "lease", "checkpoint"}
    left = []
    for name in world.cloud.objects():
        folder, _, inside = name.removeprefix("run/").partition("/")
        is_ahead = folder == "parts" and sequence_of(inside) >= newest
        if folder not in known and not is_ahead:
            left.append(name)
    assert not left, left


def sequence_of(folder: str) -> int:
    """Returns the sequence number of a commit, by the name of its folder."""
    return int(folder.partition(".")[2].partition("-")[0])


def check_process(others: set[threading.Thread], bytes_before: int) -> None:
    """Checks that the trial's threads have ended, and the process has not grown."""
    end = time.monotonic() + LIMIT
    for each in set(threading.enumerate()) - others:
        each.join(max(end - time.monotonic(), 0.0))
        assert not each.is_alive(), each.name
    grown = resident() - bytes_before
    assert grown < MOST_BYTES, f"{grown >> 20} MiB more"


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    pages = pathlib.Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: sets small pieces and short pauses; hides expected warnings."""
    one_at_a_time = threading.Lock()  # clients find the cloud by the environment
    before: list[int] = []

    def alone(rng: random.Random) -> Facts:
        with one_at_a_time:
            others = set(threading.enumerate())
            cloud = drawn_cloud(rng)
            kind = large if rng.random() < SHARE_OF_LARGE else trial
            with contextlib.closing(cloud):
                facts = kind(rng, cloud)
            before.append(resident())  # after the first trial, imports are done
            check_process(others, before[0])
            return facts

    with unseen(), clouds.small():
        yield alone


CAMPAIGN = Campaign(
    name="stores",
    promise=(
        "Machines commit, mirror, delete, crash, exit under a deadline, restart, or "
        "start elsewhere, over gs:// and s3://. The faults: 503 storms, stalls, "
        "resets, truncated and changed bodies, lost replies, whole objects instead "
        "of ranges, expired credentials and wrong clocks.\n\n"
        "- No exception reaches the program that saves.\n"
        "- A start resumes from the newest commit that the store lists. If the "
        "network fails, the start resumes from an older commit with a warning that "
        "names the store, and never starts from scratch if the store lists a "
        "commit.\n"
        "- Every commit that the store lists has exactly the bytes that the program "
        "committed.\n"
        "- After the faults end, the newest commit is present, no leftovers exist, "
        "and a new machine restores the commit.\n"
        "- A commit of 128 MiB is uploaded and downloaded with memory for the "
        "chunks in transit only."
    ),
    trials=5000,
    short=6,
    mark="slow",
    prepare=prepare,
    fixed=(
        "After a takeover of the lease, the new holder wrote a marker for a commit "
        "whose manifest had been changed in transit, so the commit could not be "
        "restored. Fixed "
        "(`checkpoint/test_store_lease.py::test_no_marker_is_made_of_a_manifest_that_a"
        "rrives_changed`).",
        "The checksums of manifests, markers and leases were not compared after a "
        "download, so a reply that was changed in transit looked like a corrupt "
        "object. Fixed "
        "(`storage/test_gcs_faults.py::test_they_are_where_more_was_asked_for_than_the"
        "re_is`, "
        "`checkpoint/test_mirror.py::test_a_manifest_that_once_arrives_changed_is_read"
        "_again`).",
        "If S3 sent the whole object in place of the requested range, each thread "
        "held several times 8 MiB more memory than necessary. Fixed "
        "(`campaigns/test_large.py::test_a_large_commit_is_transferred_in_bounded"
        "_memory`).",
    ),
    labels={
        "starts refused": "refused starts",
        "deaths": "crashes",
        "faults of copies": "failed upload attempts before an exit",
        "a changed answer": "changed replies",
        "never came": "lost requests",
        "half an answer": "truncated replies",
        "came in part": "truncated requests",
        "no answer": "lost replies",
        "401": "replies with status 401",
        "503": "replies with status 503",
        "late": "delayed requests",
        "came changed": "changed requests",
        "all of it": "whole objects in place of ranges",
        "large moves": "transfers of a commit of 128 MiB",
    },
)
