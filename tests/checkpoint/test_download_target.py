"""Requests of hostile manifests and planted directories are refused unwritten."""

from __future__ import annotations

import os

import pytest

from tests.checkpoint.remote_commits import manifest_of, put_commit, put_hostile
from tests.fakes.storage import FaultyFiles, FaultyObjectStore
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.mirror import download, download_target


@pytest.fixture
def store():
    return FaultyObjectStore()


HOSTILE = {
    "10 TB": ([{"size": 10 << 40}], "according to its manifest"),
    "a file in a file": ([{"name": "a"}, {"name": "a/b"}], "below another file"),
    "the manifest": ([{"name": "MANIFEST.json"}], "beside the manifest"),
    "the marker": ([{"name": "COMMITTED"}], "beside the manifest"),
    "below the marker": ([{"name": "COMMITTED/x"}], "beside the manifest"),
    "the record": ([{"name": download_target.PROGRESS}], "beside the manifest"),
    "a long part": ([{"name": "x" * 300}], "more than 255 bytes"),
    "no UTF-8": ([{"name": "a\udc80"}], "not valid Unicode"),
}


@pytest.mark.parametrize(("entries", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused_before_anything_is_written(
    store, tmp_path, entries, says
):
    put_hostile(store, entries)
    with pytest.raises(errors.CheckpointError, match=says):
        download.download(
            catalog.read(catalog.unread_entry(store)), str(tmp_path / "out")
        )
    assert os.listdir(tmp_path) == []


UNREADABLE = {
    "absolute": [{"name": "/etc/passwd"}],
    "upwards": [{"name": "../x"}],
    "NUL": [{"name": "a\0b"}],
    "no Unicode": [{"name": "a\ud800"}],
    "twice": [{"name": "a"}, {"name": "a"}],
    "too many": ({"name": str(n)} for n in range(100_001)),
    "an impossible size": [{"size": 1 << 60}],
}


@pytest.mark.parametrize("entries", UNREADABLE.values(), ids=UNREADABLE)
def test_hostile_manifests_are_damage(store, entries):
    put_hostile(store, entries)
    found = catalog.read(catalog.unread_entry(store))
    assert found.condition is catalog.CommitStatus.CORRUPT
    assert found.manifest is None


PLANTED = [
    "ckpt.index",
    "states",
    layout.MANIFEST,
    "MANIFEST.json.tmp",
    download_target.PROGRESS,
]


@pytest.mark.parametrize("name", PLANTED)
def test_planted_links_lead_nowhere(store, tmp_path, name):
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / name).symlink_to(outside if name == "states" else outside / "file")
    with pytest.raises(errors.CheckpointError, match="is a symbolic link"):
        download.download(put_commit(store), str(target))
    assert os.listdir(outside) == []
    assert os.listdir(target) == [name]


def test_a_linked_target_and_a_pipe_are_refused(store, tmp_path):
    commit = put_commit(store)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(errors.CheckpointError, match="symbolic link"):
        download.download(commit, str(tmp_path / "link"))
    os.mkfifo(tmp_path / "ckpt.index")
    with pytest.raises(errors.CheckpointError, match="expected a file"):
        download.download(commit, str(tmp_path))


@pytest.mark.parametrize("name", ["ckpt.index", download_target.PROGRESS])
def test_a_file_with_another_name_is_not_written_into(store, tmp_path, name):
    """`cp -al` of a download that was cut off gives each file a second name."""
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "out").mkdir()
    os.link(tmp_path / "mine", tmp_path / "out" / name)
    (tmp_path / "out" / download_target.PROGRESS).touch()  # else it is refused
    download.download(put_commit(store), str(tmp_path / "out"))
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_another_commit_is_not_written_over(store, tmp_path):
    (tmp_path / layout.MARKER).write_bytes(b"another")
    with pytest.raises(errors.CheckpointError, match="a commit of another save"):
        download.download(put_commit(store), str(tmp_path))
    assert os.listdir(tmp_path) == [layout.MARKER]


@pytest.mark.parametrize("name", ["ckpt.index", layout.MANIFEST, layout.METADATA])
def test_a_file_of_others_is_not_written_over(store, tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(errors.CheckpointError, match=f"already has a file '{name}'"):
        download.download(put_commit(store), str(tmp_path))
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"mine"


def test_another_user_cannot_make_a_download_write_over_files(
    store, tmp_path, monkeypatch
):
    """In a directory with the sticky bit, another user can create files only."""
    (tmp_path / "ckpt.index").write_bytes(b"mine")
    (tmp_path / download_target.PROGRESS).touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(errors.CheckpointError, match="already has a file"):
        download.download(put_commit(store), str(tmp_path))
    assert (tmp_path / "ckpt.index").read_bytes() == b"mine"


def test_a_file_of_the_same_size_is_not_written_over_either(store, tmp_path):
    (tmp_path / "a").write_bytes(b"hers")
    commit = put_commit(store, {"a": b"mine"})
    with pytest.raises(errors.CheckpointError, match="already has a file 'a'"):
        download.download(commit, str(tmp_path))
    (tmp_path / "a").write_bytes(b"mine")
    download.download(commit, str(tmp_path))


def test_the_error_for_a_full_disk_has_advice(store, tmp_path):
    error = OSError(28, "No space left on device")
    faulty = FaultyFiles(fail_at=3, error=error)
    with pytest.raises(errors.CheckpointError, match="disk is full"):
        download.download(put_commit(store), str(tmp_path), files=faulty)


def test_needed_space_excludes_downloaded_bytes(store, tmp_path, monkeypatch):
    contents = {"big": b"x" * 100_000}
    commit = put_commit(store, contents)
    download.download(commit, str(tmp_path))
    room = os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    download.download(commit, str(tmp_path))
    with pytest.raises(errors.CheckpointError, match="only 4,096 bytes free"):
        download.download(commit, str(tmp_path / "elsewhere"))
    assert manifest_of(contents).bytes == 100_000
