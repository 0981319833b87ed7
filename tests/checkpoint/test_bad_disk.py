"""A disk with transient read errors, with errors anywhere, and a real full disk."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns.disks import Run
from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    Words,
    open_directory,
    save,
)
from tests.fakes.storage import FaultyFiles
from tests.storage import faulty_disk
from tests.storage.faulty_disk import Fault
from tfpreempt import errors
from tfpreempt.checkpoint.directory import flat_commit
from tfpreempt.checkpoint.lease.directory_lease import LocalLeaseFileSystem
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.checkpoint.state.state import StateRegistry, read_state
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.local import LocalStore

Failing = Callable[..., None]
forms = pytest.mark.parametrize("form", ["own", "flat"])
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Makes functions of `os` fail for a path; those `calls` only, or all."""

    def fail(path: Path, *names: str, calls: set[int] | None = None) -> None:
        count = itertools.count()
        for name in names:
            real = getattr(os, name)

            def asked(given: Any, *args: Any, real: Any = real, **more: Any) -> Any:
                is_meant = os.fspath(given) == str(path)
                if is_meant and (calls is None or next(count) in calls):
                    raise EIO
                return real(given, *args, **more)

            monkeypatch.setattr(os, name, asked)

    return fail


def test_an_unreadable_directory_is_not_reported_as_unmounted(
    tmp_path: Path, failing: Failing
) -> None:
    saver = open_directory(tmp_path, OwnContents())
    failing(tmp_path, "stat")
    with pytest.raises(errors.SaveError, match="use another disk"):
        save(saver, 1)


def test_an_unreadable_directory_is_not_reported_as_a_file(
    tmp_path: Path, failing: Failing
) -> None:
    """The error was one of the configuration, in the middle of a save."""
    failing(tmp_path, "stat", calls={1})
    assert LocalStore(str(tmp_path)).uri
    assert LocalStore(str(tmp_path)).uri


def test_an_unresolvable_link_does_not_break_a_listing(
    tmp_path: Path, failing: Failing
) -> None:
    """Such as a link to a missing mount; links are not followed anyway."""
    (tmp_path / "elsewhere").symlink_to("/somewhere")
    (tmp_path / "object").touch()
    failing(tmp_path / "elsewhere", "stat")
    assert file_reading.tree(str(tmp_path)) == ["elsewhere", "object"]


def test_an_index_that_cannot_be_read_hides_no_commit(
    tmp_path: Path, failing: Failing
) -> None:
    save(open_directory(tmp_path, OwnContents()), 1)
    strange = tmp_path / "theirs.index"
    strange.touch()
    failing(strange, "lstat", "stat")
    newest = open_directory(tmp_path, OwnContents()).newest()
    assert newest is not None
    assert newest.step == 1


def test_a_commit_that_cannot_be_read_is_not_skipped_silently(
    tmp_path: Path, failing: Failing
) -> None:
    """Training restarted from scratch, or from an older commit, without a message."""
    saver = open_directory(tmp_path, OwnContents())
    for step in (1, 2):
        save(saver, step)
    failing(tmp_path / "2", "stat", "lstat")
    said: list[str] = []
    found = saver.newest(said.append, said.append)
    assert (found is not None and found.step == 2) or "2" in said[0]


def test_an_unreadable_commit_is_not_reported_as_deleted(
    tmp_path: Path, failing: Failing
) -> None:
    """Its mirrored copy was then deleted, while the local commit remained."""
    saver = open_directory(tmp_path, OwnContents())
    save(saver, 1)
    (tmp_path / "1" / "COMMITTED").write_bytes(b"what nobody can read")
    with pytest.raises(errors.CheckpointCorruptedError, match="nothing was deleted"):
        saver.delete(Checkpoint(str(tmp_path / "1")))
    failing(tmp_path, "listdir")
    with pytest.raises(errors.SaveError, match="use another disk"):
        saver.delete(Checkpoint(str(tmp_path / "1")))


def test_a_temporarily_unreadable_commit_ranks_below_a_new_save(
    tmp_path: Path, broken: Any
) -> None:
    """The old commit became the newest again, before all later commits."""
    for step in range(1, 5):
        save(open_directory(tmp_path, OwnContents(), max_to_keep=2), step)
    saver = open_directory(tmp_path, OwnContents(), max_to_keep=2)
    assert saver.newest().step == 4
    for step in (3, 4):
        broken(tmp_path / f"{step}" / "MANIFEST.json")
    save(saver, 5)
    broken.mend()
    assert open_directory(tmp_path).newest().step == 5


@pytest.mark.parametrize(
    ("of", "names"),
    [(".", ["listdir", "scandir"]), ("ckpt-1.data-00001-of-00002", ["stat"])],
)
def test_no_data_file_is_left_out_of_a_flat_commit(
    tmp_path: Path, failing: Failing, of: str, names: list[str]
) -> None:
    save(open_directory(tmp_path, FlatContents(str(tmp_path))), 1)
    failing(tmp_path / of, *names)
    with pytest.raises(OSError, match="Input/output"):
        flat_commit.payload_files(str(tmp_path / "ckpt-1"))


class Forgetful(LocalLeaseFileSystem):
    """An NFS client that reports a file as missing once."""

    def __init__(self) -> None:
        super().__init__()
        self.forgets = False

    def read(self, path: str) -> bytes:
        if self.forgets:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return super().read(path)


def test_a_lease_is_not_lost_where_a_network_forgets_it_for_a_moment(
    tmp_path: Path,
) -> None:
    lost: list[str] = []
    disk = Forgetful()
    lease = Lease(disk=disk)
    lease.acquire(str(tmp_path))
    lease.on_loss(lost.append)
    disk.forgets = True
    lease.check()
    disk.forgets = False
    lease.check()
    assert lost == []
    lease.release()


def test_a_deletion_that_fails_at_a_folder_is_finished_by_the_next_start(
    tmp_path: Path,
) -> None:
    """Before, empty folders stayed in a folder without a trace of tfpreempt."""

    class Stubborn(LocalFiles):
        def remove_dir(self, path: str) -> None:
            if path.endswith("states"):
                raise EIO
            super().remove_dir(path)

    def saver(files: LocalFiles) -> Any:
        return open_directory(
            tmp_path, OwnContents(), files=files, max_to_keep=1, registry=registry
        )

    registry = StateRegistry()
    word = Words("word", registry=registry)
    for step in (1, 2):
        save(saver(Stubborn()), step)
    assert (tmp_path / "1").exists()
    saver(LocalFiles()).start()
    assert not (tmp_path / "1").exists()
    assert word


def test_an_intent_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    payload = FlatContents(str(tmp_path))
    operations = FaultyFiles()
    save(open_directory(tmp_path, payload, files=operations), 1)
    at = [each.path.endswith("intent.tmp") for each in operations.operations]
    torn = FaultyFiles(fail_at=at.index(True), error=EIO, when="torn")
    with pytest.raises(errors.SaveError):
        save(open_directory(tmp_path, payload, files=torn), 2)
    assert not list(tmp_path.glob("*.tmp"))


def test_the_state_that_cannot_be_read_is_named(tmp_path: Path, broken: Any) -> None:
    (tmp_path / "word.state").write_bytes(b"1")
    broken(tmp_path / "word.state")
    with pytest.raises(OSError, match="Input/output") as caught:
        read_state(str(tmp_path), Words("word", registry=StateRegistry()))
    assert "'word'" in str(vars(caught.value))


@pytest.mark.campaign
@forms
@pytest.mark.parametrize("doing", ["save", "start"])
def test_one_operation_that_fails_anywhere(
    tmp_path: Path, form: str, doing: str
) -> None:
    """The newest commit is found, or a newer one; the next start and save mend all."""
    with faulty_disk.watching():
        for first in itertools.count():
            (root := tmp_path / f"{first}").mkdir()
            with faulty_disk.disk(str(root)) as disk:
                run = Run(disk, form=form, max_to_keep=2, has_lease=True)
                for act in (run.start, run.save, run.save):
                    act()
                fault = Fault(number=errno.EIO, first=first, count=1, is_late=False)
                disk.begin(fault)
                run.save() if doing == "save" else run.start()
                has_failed = disk.failed
                run.check()
                disk.mend()
                run.finish()
                run.check()
            if not has_failed:
                break
    assert first > 20


REAL = """
import contextlib, itertools, os, subprocess, sys
from campaigns.disks import Run

class Mounted:
    def __init__(self, root):
        self.root, self.failed = root, 0
    sound = contextlib.nullcontext
    def unsynced(self, path, below):
        return ""  # a remount shows what is in memory

def sh(command):
    subprocess.run(command.split(), check=True)

def full(root, left):
    size = os.statvfs(root).f_bavail - left
    with open(f"{root}/ballast", "wb") as file:
        file.write(bytes(size * os.statvfs(root).f_bsize))

def without_inodes(root, left):
    for number in range(os.statvfs(root).f_ffree - left):
        open(f"{root}/ballast-{number}", "wb").close()

def read_only(root, left):
    sh(f"mount -o remount,ro {root}")

def mend(root):
    sh(f"mount -o remount,rw {root}")
    for name in os.listdir(root):
        if name.startswith("ballast"):
            os.remove(f"{root}/{name}")

place, form = sys.argv[1:]
for ail in (full, without_inodes, read_only):
    for left in range(1 if ail is read_only else 16):
        sh(f"mount -t tmpfs -o size=256k,nr_inodes=64 none {place}")
        disk = Mounted(place)
        run = Run(disk, form=form, max_to_keep=1, has_lease=True)
        for act in (run.start, run.save, run.check):
            act()
        ail(place, left)
        disk.failed = 1
        for act in (run.save, run.check, run.save, run.check):
            act()
        assert left or run.facts["commits"] == 1, run.facts
        mend(place)
        disk.failed = 0
        run.finish()
        run.check()
        sh(f"umount {place}")
print("all hold")
"""


@pytest.mark.slow  # starts an interpreter
@forms
def test_a_real_disk_that_is_full_or_read_only(tmp_path: Path, form: str) -> None:
    """One more free page and inode in each attempt; then a read-only remount."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    ended = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", REAL, str(tmp_path), form],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "all hold\n"
