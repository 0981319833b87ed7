"""Saves of earlier owners of the lease are over, also if those processes live."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.fakes import (
    FlatContents,
    Later,
    OwnContents,
    Words,
    names,
    open_directory,
    put,
    save,
    write_part,
)
from tests.checkpoint.test_lease import acquired
from tests.checkpoint.test_saver import worker
from tfpreempt.checkpoint.directory import layout, retention
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.core.clock import SystemClock
from tfpreempt.storage.files import LocalFiles

pytestmark = pytest.mark.slow  # starts interpreters

BEGIN = """
import sys
from tests.checkpoint.fakes import *
from tfpreempt import errors
from tfpreempt.checkpoint.lease.lease import Lease
def pause(*name):
    print("stands still", flush=True)
    sys.stdin.readline()
lease = Lease()
lease.acquire(sys.argv[1])
def commit(saver):
    try:
        save(saver, 2)
    except errors.CheckpointError as error:
        print(type(error).__name__, flush=True)
    else:
        print("saved", flush=True)
"""

PROGRAMS = {
    "own": """
class Staged(OwnContents):
    def capture(self, *args, **kwargs):
        super().capture(*args, **kwargs)
        pause()
commit(open_directory(sys.argv[1], Staged(), lease=lease))
""",
    "flat": """
class Staged(FlatContents):
    def capture(self, *args, **kwargs):
        super().capture(*args, **kwargs)
        pause()
commit(open_directory(sys.argv[1], Staged(sys.argv[1]), lease=lease))
""",
    "before the first file of a flat one": """
class Once(FlatContents):
    def capture(self, *args, **kwargs):
        stops = iter([pause])
        self.before_file = lambda name: next(stops, print)()
        super().capture(*args, **kwargs)
commit(open_directory(sys.argv[1], Once(sys.argv[1]), lease=lease))
""",
    "before the marker": """
from tfpreempt.storage.files import LocalFiles
class Slow(LocalFiles):
    def sync_dir(self, path):
        super().sync_dir(path)
        if path == sys.argv[1]:
            pause()
commit(open_directory(sys.argv[1], OwnContents(), files=Slow(), lease=lease))
""",
}
QUICK = "own"  # each starts an interpreter
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS if n != QUICK]


class Program:
    """Another process, which has the lease and is suspended in a save."""

    def __init__(self, directory, name):
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + PROGRAMS[name], str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline(), "it failed"

    def go_on(self):
        """Resumes the process; returns the last line of its output."""
        said, _ = self._process.communicate("\n", timeout=30)
        assert self._process.returncode == 0
        return said.splitlines()[-1]

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=30)


@pytest.fixture
def start_program(tmp_path):
    made = []

    def start(name):
        made.append(Program(tmp_path, name))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def started(directory):
    """The next owner of the lease."""
    saver = open_directory(directory, OwnContents(), lease=acquired(directory))
    saver.start()
    return saver


def leftovers(directory):
    return {layout.STAGING, "2", "ckpt-2_temp"} & set(os.listdir(directory))


@pytest.mark.parametrize("name", [QUICK, *SLOW])
def test_a_frozen_owner_that_was_taken_over_commits_nothing(
    tmp_path, start_program, name, monkeypatch
):
    frozen = start_program(name)
    monkeypatch.setattr(
        "tfpreempt.checkpoint.lease.lease_record.LeaseOwner.is_dead", lambda *_: True
    )
    saver = started(tmp_path)
    assert leftovers(tmp_path) == set()
    assert frozen.go_on() == "LeaseLostError"
    assert saver.newest() is None
    assert save(saver, 2).path == str(tmp_path / "2")
    assert saver.newest().step == 2


@pytest.mark.parametrize("name", [QUICK, *SLOW])
def test_the_next_start_removes_the_save_of_a_killed_owner(
    tmp_path, start_program, name
):
    if "flat" in name:
        (tmp_path / "ckpt-2_temp").mkdir()  # TensorFlow makes it
    start_program(name).kill()
    saver = started(tmp_path)
    assert leftovers(tmp_path) == set()
    assert saver.newest() is None


def test_a_worker_that_outlives_its_chief_gets_nothing_into_a_commit(tmp_path):
    registry = StateRegistry()
    word = Words("mine", "old", per_worker=True, registry=registry)
    assert word
    late = open_directory(
        tmp_path, OwnContents(False), worker=1, world=2, registry=registry
    )
    write_part(late, 2, "old-2")
    chief = started(tmp_path)
    assert leftovers(tmp_path) == set()
    write_part(late, 3, "old-3")  # it was not told yet
    commit = save(chief, 3, attempt="new-3")
    assert not [n for n in os.listdir(commit.path) if n.startswith(layout.WORKER)]
    started(tmp_path)
    assert leftovers(tmp_path) == set()


def test_files_of_other_programs_in_the_staging_directory_stay(tmp_path):
    staging = tmp_path / layout.STAGING
    for name in ("dead-1", "not ours", "fetch-1-00000000"):
        (staging / name).mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (staging / "link").symlink_to(outside)
    started(tmp_path)
    assert sorted(os.listdir(staging)) == ["fetch-1-00000000", "link", "not ours"]
    assert os.listdir(outside) == ["file"]


def test_a_directory_of_the_user_with_the_name_of_the_staging_directory_stays(tmp_path):
    """Another user cannot delete the files in it, but can give it another name."""
    thesis = tmp_path / "books" / "thesis" / "one.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    (tmp_path / "books").rename(tmp_path / layout.STAGING)
    write_part(open_directory(tmp_path, OwnContents()), 2, "killed-2")
    started(tmp_path)
    assert os.listdir(tmp_path / layout.STAGING) == ["thesis"]
    assert (tmp_path / layout.STAGING / "thesis" / "one.tex").exists()


def test_the_directory_of_another_run_with_the_name_of_the_staging_directory_stays(
    tmp_path,
):
    other = open_directory(tmp_path / "other", FlatContents(str(tmp_path / "other")))
    save(other, 1)
    save(open_directory(tmp_path / "other", OwnContents()), 2)
    (tmp_path / "other").rename(tmp_path / layout.STAGING)
    before = sorted((tmp_path / layout.STAGING).rglob("*"))
    assert layout.MARKER in {each.name for each in before}
    started(tmp_path)
    assert sorted((tmp_path / layout.STAGING).rglob("*")) == before


def test_a_save_that_is_renamed_while_it_is_deleted_is_removed_by_the_next_start(
    tmp_path,
):
    """Its owner was frozen before the rename, and wakes during the next start."""
    staged = write_part(open_directory(tmp_path, OwnContents()), 2, "old-2")
    commit = save(open_directory(tmp_path / "other", OwnContents()), 2)
    shutil.copy(Path(commit.path, layout.MANIFEST), staged.staging)

    class Wakes(LocalFiles):
        def remove(self, path):
            super().remove(path)
            if os.path.exists(staged.staging):
                os.rename(staged.staging, tmp_path / "2")

    retention.delete_staging(Wakes(), staged.staging)
    assert (tmp_path / "2").exists()
    started(tmp_path)
    assert leftovers(tmp_path) == set()


# --- flat checkpoints, whose files no fence stops ------------------------------------


class Frozen(FlatContents):
    """A process that is frozen before TensorFlow's first file, and wakes later."""

    def __init__(self, directory, meanwhile):
        super().__init__(directory, self._freeze)
        self.meanwhile = [meanwhile]

    def _freeze(self, name):
        if self.meanwhile:
            self.meanwhile.pop()()


@pytest.mark.parametrize("has_older", [False, True])
def test_flat_files_of_a_save_that_failed_are_not_restored(tmp_path, has_older):
    """The next owner closed the intent before the files were there."""
    if has_older:
        for name in names(str(tmp_path / "ckpt-2")):
            put(name, b"saved by the user")

    def take_over():
        open_directory(tmp_path, OwnContents()).start()
        assert not (tmp_path / f"ckpt-2{layout.INTENT_SUFFIX}").exists()

    saver = open_directory(tmp_path, Frozen(str(tmp_path), take_over))
    write_part(saver, 2, "old-2").discard()
    assert open_directory(tmp_path).newest() is None


def test_an_intent_of_the_next_owner_stays(tmp_path):
    directory = str(tmp_path)
    mine = open_directory(tmp_path, FlatContents(directory))
    staged = write_part(mine, 2, "old-2")
    theirs = open_directory(tmp_path, FlatContents(directory))
    other = write_part(theirs, 2, "new-2")
    staged.discard()
    assert (tmp_path / f"ckpt-2{layout.INTENT_SUFFIX}").exists()
    assert open_directory(tmp_path).newest() is None
    assert other.publish("save", [0]).step == 2
    assert open_directory(tmp_path).newest().step == 2


def test_workers_of_one_run_share_a_staging_directory(tmp_path):
    chief, _ = worker(tmp_path, 0, 2)
    other, _ = worker(tmp_path, 1, 2)
    chief.start()
    write_part(other, 1, "a-1")  # before the chief begins
    staged = write_part(chief, 1, "a-1")
    assert staged.publish("save", [0, 1]).step == 1
    assert (tmp_path / "1" / layout.worker_name(1)).exists()


def test_without_a_lease_a_save_is_over_when_nothing_of_it_changes(
    tmp_path: Path,
) -> None:
    """Workers with separate storage may share the disk of their machine."""
    write_part(open_directory(str(tmp_path)), 1, "run-1")
    clean = retention.clean
    files, directory = LocalFiles(), str(tmp_path)
    assert clean(files, directory, SystemClock(), is_sole=False) == []
    assert names(layout.staging_directory(directory, "run-1"))

    staged = layout.staging_directory(directory, "run-1")
    assert clean(files, directory, Later(), is_sole=False) == [staged]
