"""What a living process has staged is not left over, whoever starts beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.fakes import Later, OwnPayload, make_saver, save
from tfpreempt.checkpoint import claims, layout, retention
from tfpreempt.core.clock import SystemClock
from tfpreempt.storage.files import LocalFiles

STAGED = """
import sys
from tests.checkpoint.fakes import *
payload = {"own": OwnPayload(), "flat": FlatPayload(sys.argv[1])}[sys.argv[2]]
saver = make_saver(sys.argv[1], payload)
staged = saver.stage(2, "theirs-1")
print("staged", flush=True)
sys.stdin.readline()
print(saver.commit(staged, "preemption", [0]).path, flush=True)
"""

HALF = """
import sys
from tests.checkpoint.fakes import *
def stop(name):
    print("half", flush=True)
    sys.stdin.readline()
saver = make_saver(sys.argv[1], FlatPayload(sys.argv[1], stop))
save(saver, 2)
print("saved", flush=True)
"""

SHARD = """
import sys
from tests.checkpoint.fakes import *
registry = StateRegistry()
word = Words("mine", "1", per_worker=True, registry=registry)
saver = make_saver(
    sys.argv[1], OwnPayload(False), worker=1, world=2,
    registry=registry,
)
staged = saver.stage(2, "theirs-1")
parts = pathlib.Path(staged.directory + ".parts", "0001")
parts.mkdir(parents=True)
parts.joinpath("0").write_text("data")
print("staged", flush=True)
sys.stdin.readline()
"""

MARKING = """
import sys
from tests.checkpoint.fakes import *
from tfpreempt.storage.files import LocalFiles
class Slow(LocalFiles):
    def rename(self, source, target):
        if target.endswith("COMMITTED"):
            print("renamed", flush=True)
            sys.stdin.readline()
        super().rename(source, target)
save(make_saver(sys.argv[1], OwnPayload(), files=Slow()), 2)
print("saved", flush=True)
"""


class Other:
    """Another program that saves in the same directory, and stands still in it."""

    def __init__(self, directory, program, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline(), "it failed"

    def go_on(self):
        """Returns what it says at its end."""
        said, _ = self._process.communicate("\n", timeout=30)
        assert self._process.returncode == 0
        return said.strip()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=30)


@pytest.fixture
def other(tmp_path):
    made = []

    def start(*program):
        made.append(Other(tmp_path, *program))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def starting(directory, **more):
    saver = make_saver(directory, OwnPayload(), **more)
    saver.start()
    return saver


PROGRAMS = {
    "own": (STAGED, "own"),
    "flat": (STAGED, "flat"),
    "half": (HALF,),
    "marking": (MARKING,),
}
QUICK = "own"  # the others each start an interpreter too


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] if name != QUICK else [])
        for name, each in PROGRAMS.items()
    ],
)
def test_a_start_leaves_a_living_programs_save_alone_and_removes_a_dead_ones(
    tmp_path, other, program
):
    if program == (HALF,):
        (tmp_path / "ckpt-2_temp").mkdir()  # as TensorFlow writes a flat one
    first = other(*program)
    before = {*tmp_path.rglob("*"), tmp_path / layout.TOKEN}
    starting(tmp_path, clock=Later())  # however long it stands still
    assert {*tmp_path.rglob("*")} == before
    first.go_on()
    assert make_saver(tmp_path).loader.newest().step == 2
    assert not (tmp_path / ".tfpreempt-staging").exists()
    for each in sorted(tmp_path.rglob("*"), reverse=True):
        each.unlink() if each.is_file() else each.rmdir()
    if program == (HALF,):
        (tmp_path / "ckpt-2_temp").mkdir()
    other(*program).kill()
    saver = starting(tmp_path)
    assert saver.loader.newest() is None
    assert {".tfpreempt-staging", "2", "ckpt-2_temp"} & set(
        os.listdir(tmp_path)
    ) == set()


@pytest.mark.parametrize("kind", ["second name", "pipe"])
def test_a_claim_that_cannot_be_locked_keeps_its_own_save_only(tmp_path, kind):
    """`cp -al` while a save is under way gives its claim a second name."""
    staging = tmp_path / "ckpt" / layout.STAGING
    for name in ("a-1", "b-1"):
        (staging / name).mkdir(parents=True)
        (staging / name / "ckpt.index").write_bytes(b"half")
    claim = staging / f"a-1{layout.CLAIM_SUFFIX}"
    if kind == "pipe":
        os.mkfifo(claim)
    else:
        claim.write_bytes(b"machine\n")
        (tmp_path / "second").hardlink_to(claim)
    starting(tmp_path / "ckpt")
    assert sorted(os.listdir(staging)) == ["a-1", claim.name]
    starting(tmp_path / "ckpt", clock=Later())
    assert not staging.exists()


@pytest.mark.slow  # starts two interpreters
def test_a_shard_whose_worker_lives_outlives_the_chief(tmp_path, other):
    worker = other(SHARD)
    chief = other(STAGED, "own")
    chief.kill()
    starting(tmp_path)
    staging = tmp_path / ".tfpreempt-staging"
    assert (staging / "theirs-1" / "worker-0001" / "mine.state").read_text() == "1"
    assert (staging / "theirs-1.parts" / "0001" / "0").read_text() == "data"
    worker.kill()
    starting(tmp_path)
    assert os.listdir(tmp_path) == [layout.TOKEN]


@pytest.mark.slow  # starts an interpreter
def test_a_save_takes_another_name_than_one_that_is_being_marked(tmp_path, other):
    first = other(MARKING)
    assert save(make_saver(tmp_path, OwnPayload()), 2).path == str(tmp_path / "2.2")
    first.go_on()
    assert sorted(e for e in os.listdir(tmp_path) if e[0] == "2") == ["2", "2.2"]


# --- where a lock says little --------------------------------------------------------


def left_over(staged, clock=None):
    with claims.left_over(str(staged), clock=clock or SystemClock()) as is_left:
        return is_left


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / layout.STAGING / "a-1"
    path.mkdir(parents=True)
    (path / "ckpt.index").write_bytes(b"half")
    return path


def test_what_another_machine_staged_is_left_over_once_it_is_quiet(staged, monkeypatch):
    monkeypatch.setattr(os, "major", lambda device: 0)  # no disk of this machine
    Path(str(staged) + layout.CLAIM_SUFFIX).write_text("another machine\n")
    assert not left_over(staged)
    assert left_over(staged, Later())
    (staged / "worker-0001").mkdir()
    (staged / "worker-0001" / "late.state").write_bytes(b"")
    ahead = Later().wall()
    os.utime(staged / "worker-0001" / "late.state", (ahead, ahead))
    assert not left_over(staged, Later())


def test_on_a_disk_of_this_machine_a_lock_is_enough(staged, monkeypatch):
    monkeypatch.setattr(os, "major", lambda device: 8)
    Path(str(staged) + layout.CLAIM_SUFFIX).write_text(
        "the machine that the disk was moved from"
    )
    assert left_over(staged)


def test_a_file_system_without_locks(staged, monkeypatch):
    def no_locks(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    claim = claims.take(LocalFiles(), str(staged))
    assert not left_over(staged)
    assert left_over(staged, Later())
    claim.release()


def test_a_claim_names_its_machine_before_it_is_locked(staged, monkeypatch):
    """Who is killed while it waits for the lock leaves no claim of nobody."""
    monkeypatch.setattr(os, "major", lambda device: 0)
    path = Path(str(staged) + layout.CLAIM_SUFFIX)
    named = []

    def lock(descriptor, how):
        named.append(path.read_bytes())
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lock)
    claims.take(LocalFiles(), str(staged)).release()
    monkeypatch.undo()
    monkeypatch.setattr(os, "major", lambda device: 0)
    assert named[0]
    assert left_over(staged)


def test_what_has_no_claim_has_no_writers(staged):
    assert left_over(staged)


def test_a_claim_that_is_cleared_away_meanwhile_is_made_anew(staged):
    class Late(LocalFiles):
        """The staging directory of a dead save goes while a worker comes to it."""

        def make_dirs(self, path):
            super().make_dirs(path)
            retention.clean(LocalFiles(), str(staged.parent.parent), Later())
            super().make_dirs(path)

    claims.take(LocalFiles(), str(staged)).release()
    claim = claims.take(Late(), str(staged))
    assert os.path.exists(str(staged) + layout.CLAIM_SUFFIX)
    claim.release()
    claim.release()


def test_a_folder_that_another_save_has_just_left_is_made_again(tmp_path: Path) -> None:
    """The end of a save that was given up comes between two lines of the next one."""

    class Emptied(LocalFiles):
        times = 0

        def make_dirs(self, path: str) -> None:
            super().make_dirs(path)
            self.times += 1
            if self.times == 1:
                os.rmdir(path)

    staged = str(tmp_path / ".tfpreempt-staging" / "one")
    claim = claims.take(Emptied(), staged)
    assert claim is not None
    claim.release()
