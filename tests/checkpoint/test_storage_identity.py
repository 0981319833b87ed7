"""Nothing is saved if the checkpoint directory is not the directory of the start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    open_directory,
    save,
    write_part,
)
from tests.checkpoint.test_saver import worker
from tfpreempt import errors


def started(directory, payload=None, **more):
    saver = open_directory(directory, payload or OwnContents(), **more)
    saver.start()
    return saver


def content(directory):
    return {path.relative_to(directory) for path in directory.rglob("*")}


@pytest.fixture
def run(tmp_path):
    return tmp_path / "mount" / "run"


def replace(directory, how):
    """Unmounts the file system; another disk is at its path, with or without files."""
    directory.parent.rename(directory.parent.with_name("away"))
    if how == "empty":
        directory.mkdir(parents=True)
    elif how == "another run's":
        save(started(directory), 1)


def put_back(directory):
    if directory.parent.exists():
        shutil.rmtree(directory.parent)
    directory.parent.with_name("away").rename(directory.parent)


WAYS = ["gone", "empty", "another run's"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("form", ["own", "flat"])
def test_a_directory_that_is_another_one_is_a_save_error(run, form, how):
    payload = OwnContents() if form == "own" else FlatContents(str(run))
    saver = started(run, payload)
    save(saver, 1)
    replace(run, how)
    before = content(run.parent.parent)
    with pytest.raises(errors.SaveError, match="now leads to") as caught:
        save(saver, 2)
    assert repr(str(run)) in str(caught.value)
    assert "Mount the file system" in str(caught.value)
    assert content(run.parent.parent) == before  # nothing was made in its place
    put_back(run)
    save(saver, 3)
    assert started(run).newest().step == 3


@pytest.mark.parametrize("how", WAYS)
def test_one_that_is_replaced_during_a_save(run, how):
    class Slow(OwnContents):
        def write(self, *args):
            written = super().write(*args)
            replace(run, how)
            return written

    saver = started(run, Slow())
    with pytest.raises(errors.SaveError, match="now leads to"):
        save(saver, 1)
    left = {path.name for path in run.parent.parent.glob("mount/**/*")}
    assert ".tfpreempt-staging" not in left
    assert "1" not in left or how == "another run's"


@pytest.mark.parametrize("how", WAYS)
def test_one_that_is_replaced_between_the_two_phases(run, how):
    saver = started(run)
    staged = write_part(saver, 1, "a-1")
    replace(run, how)
    before = content(run.parent.parent)
    with pytest.raises(errors.SaveError, match="now leads to"):
        staged.publish("preemption", [0])
    assert content(run.parent.parent) == before


def test_a_workers_shard_is_not_written_to_other_storage(run):
    chief, _ = worker(run, 0, 2)
    chief.start()
    other, _ = worker(run, 1, 2)
    replace(run, "empty")
    with pytest.raises(errors.SaveError, match="now leads to"):
        write_part(other, 1, "a-1")
    assert os.listdir(run) == []


def test_a_file_system_that_was_mounted_again_has_the_token(run):
    """A network file system may have another device and other inodes after a mount."""
    saver = started(run)
    save(saver, 1)
    shutil.copytree(run, run.parent.with_name("copy"))
    shutil.rmtree(run)
    run.parent.with_name("copy").rename(run)
    save(saver, 2)
    assert started(run).newest().step == 2


MOUNTED = """
import os, sys
from tests.checkpoint.fakes import *
from tfpreempt import errors
from tfpreempt.core.journal import Journal
from tfpreempt.core import events
place = sys.argv[1]
def sh(command):
    assert os.system(command) == 0, command
sh(f"mount -t tmpfs none {place}")
saver = open_directory(place, OwnContents())
saver.start()
journal = Journal(place + "/journal", 0)
save(saver, 1)
sh(f"mkdir {place}2 && mount --bind {place} {place}2")
sh(f"umount -l {place}")
try:
    save(saver, 2)
except errors.SaveError as error:
    print(error)
journal.record(events.Fault(where="save", error="gone"))
print(os.listdir(place))
sh(f"mount --bind {place}2 {place}")
save(saver, 3)
print(open_directory(place).newest().step)
"""


@pytest.mark.slow  # starts an interpreter
def test_a_mount_that_disappears_and_returns(tmp_path):
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    (tmp_path / "mount").mkdir()
    ended = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", MOUNTED, str(tmp_path / "mount")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    error, below, step = ended.stdout.splitlines()
    assert "now leads to another directory" in error
    assert below == "[]"
    assert step == "3"
