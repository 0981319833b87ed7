"""Cases of a store in a directory: links, leftovers, missing directories."""

from __future__ import annotations

import errno
import io
import os
import socket

import pytest

from tests.fakes.storage import FaultyFiles, SimulatedCrash
from tests.storage import faulty_disk
from tests.storage.faulty_disk import Fault
from tfpreempt import errors
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectNotFoundError

SECRET = b"root:x:0:0"


def put(store, name, data=b"1"):
    return store.put_if_absent(name, io.BytesIO(data))


def test_reading_makes_no_directory(tmp_path):
    store = LocalStore(str(tmp_path / "a" / "b"))
    assert list(store.list()) == []
    assert list(store.folders()) == []
    assert store.stat("x") is None
    store.delete("x")
    with pytest.raises(ObjectNotFoundError, match="'x' does not exist"):
        store.get("x", io.BytesIO())
    assert os.listdir(tmp_path) == []
    assert put(store, "x")
    assert list(store.list()) == ["x"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_only_be_read(tmp_path):
    put(LocalStore(str(tmp_path)), "x", b"data")
    tmp_path.chmod(0o500)
    try:
        store = LocalStore(str(tmp_path))
        assert store.stat("x").size == 4
        with pytest.raises(errors.SaveError, match="writable"):
            put(store, "y")
    finally:
        tmp_path.chmod(0o700)


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.ConfigurationError, match="is a file"):
        LocalStore(str(tmp_path / "file"))


@pytest.fixture
def hostile(tmp_path):
    """A store with a link to a file outside of it, and one to a directory."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_bytes(SECRET)
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(outside / "passwd")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "honest").write_bytes(b"1")
    return LocalStore(str(root)), outside


@pytest.mark.parametrize("name", ["file", "folder/passwd", "loop/honest", "loop/file"])
def test_links_are_seen_and_not_followed(hostile, name):
    store, outside = hostile
    assert list(store.list()) == ["file", "folder", "honest", "loop"]
    assert list(store.list("folder/")) == []
    assert list(store.folders()) == []
    store.delete(name)
    target = io.BytesIO()
    for read in (lambda: store.get(name, target), lambda: store.stat(name)):
        with pytest.raises(errors.CheckpointCorruptedError, match="links are not"):
            read()
    assert target.getvalue() == b""
    for write in (lambda: put(store, name), lambda: store.replace(name, b"2")):
        with pytest.raises(errors.SaveError, match="symbolic link"):
            write()
    assert (outside / "passwd").read_bytes() == SECRET
    assert os.listdir(outside) == ["passwd"]


def test_a_link_in_place_of_what_was_written_gives_no_file_a_second_name(tmp_path):
    """Another user creates the link between two operations of one put."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)

    class Swapped(LocalFiles):
        def sync_file(self, path):
            super().sync_file(path)
            os.remove(path)
            os.symlink(secret, path)

    root = str(tmp_path / "root")
    put(LocalStore(root, files=Swapped(root)), "x")
    assert secret.stat().st_nlink == 1


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    store = LocalStore(str(tmp_path))
    assert list(store.list()) == ["pipe"]
    with pytest.raises(errors.CheckpointCorruptedError, match="not a regular file"):
        store.get("pipe", io.BytesIO())


def test_nor_is_a_socket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    with pytest.raises(errors.CheckpointCorruptedError, match="not a regular file"):
        LocalStore(str(tmp_path)).stat("socket")


UNREADABLE = [errno.EIO, errno.ESTALE, errno.EACCES]


@pytest.mark.parametrize("call", ["open", "pread"])
@pytest.mark.parametrize("number", [*UNREADABLE, errno.EMFILE, errno.ENOMEM])
def test_what_the_disk_does_not_give_back_may_be_whole(
    tmp_path, monkeypatch, call, number
):
    """Before, a mirror's only commit counted as corrupt while its server was down."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    put(LocalStore(str(tmp_path)), "x")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(errors.CheckpointError, match=os.strerror(number)) as caught:
        LocalStore(str(tmp_path)).get("x", io.BytesIO())
    assert type(caught.value) is errors.CheckpointError
    passed_over = LocalStore(str(tmp_path), unreadable=errors.CheckpointCorruptedError)
    with pytest.raises(errors.CheckpointError) as caught:
        passed_over.get("x", io.BytesIO())
    is_damage = isinstance(caught.value, errors.CheckpointCorruptedError)
    assert is_damage == (number in UNREADABLE)


@pytest.mark.parametrize("number", UNREADABLE)
def test_a_folder_that_may_not_be_looked_at_is_still_one(tmp_path, monkeypatch, number):
    """Before, a mirror without permission to enter its folders counted as empty."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    store = LocalStore(str(tmp_path))
    put(store, "a/x")
    monkeypatch.setattr(os, "stat", fail)
    assert list(store.folders()) == ["a"]
    assert list(store.list()) == ["a/x"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_listed_does_not_pass_for_empty(tmp_path):
    store = LocalStore(str(tmp_path))
    put(store, "a/x")
    (tmp_path / "a").chmod(0)
    try:
        with pytest.raises(errors.CheckpointError, match="cannot be listed"):
            list(store.list())
    finally:
        (tmp_path / "a").chmod(0o700)


def test_the_directory_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = LocalStore(str(tmp_path / "link"))
    put(store, "a/x")
    assert list(store.list()) == ["a/x"]


def test_a_killed_put_leaves_no_object_and_is_swept_up(tmp_path):
    root = str(tmp_path)
    files = FaultyFiles(fail_at=1, error=SimulatedCrash("killed"))
    with pytest.raises(SimulatedCrash):
        put(LocalStore(root, files), "x")
    (left,) = os.listdir(root)
    assert list(LocalStore(root).list()) == []
    put(LocalStore(root), "young")
    assert left in os.listdir(root)  # its writer may still be at work
    os.utime(tmp_path / left, (1, 1))
    put(LocalStore(root), "old")
    assert sorted(os.listdir(root)) == ["old", "young"]


def test_a_part_of_the_path_is_an_object(tmp_path):
    store = LocalStore(str(tmp_path))
    put(store, "a")
    with pytest.raises(errors.SaveError, match="a part of the path is a file"):
        put(store, "a/b")


def test_bytes_are_durable_before_the_name_is_there(tmp_path):
    files = FaultyFiles()
    put(LocalStore(str(tmp_path), files), "a/x")
    names = [each.name for each in files.operations]
    assert names == ["make_dirs", "sync_dir", "sync_file", "sync_dir", "remove"]
    assert files.operations[1].path == str(tmp_path)  # the folder is new


def replace(store, name):
    store.replace(name, b"1")


@pytest.mark.parametrize("act", [put, replace])
def test_what_cannot_be_synced_is_not_said_to_be_put(tmp_path, act):
    store = LocalStore(str(tmp_path))
    with faulty_disk.watching(), faulty_disk.disk(str(tmp_path)) as disk:
        for at in range(3):  # the folder's name, the bytes, their name
            disk.begin(
                Fault(number=errno.EIO, first=at, count=1, is_late=False, only="fsync")
            )
            with pytest.raises(errors.SaveError, match="Input/output"):
                act(store, f"{at}/x")
        disk.mend()
        act(store, "3/x")
        assert disk.unsynced(f"{disk.root}/3/x", disk.root) == ""
