"""Pipes, sockets, devices and directories instead of files cause no wait."""

from __future__ import annotations

import errno
import os
import shutil
import socket

import pytest

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    Words,
    open_directory,
    save,
)
from tfpreempt import errors
from tfpreempt.checkpoint.state.state import StateRegistry

pytestmark = pytest.mark.timeout(20)


def put_socket(path):
    there = os.open(os.path.dirname(path), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{there}/{os.path.basename(path)}")
    finally:
        os.close(there)


KINDS = {
    "pipe": os.mkfifo,
    "socket": put_socket,
    "device": lambda path: os.symlink("/dev/zero", path),
    "directory": os.mkdir,
    "loop": lambda path: os.symlink(path, path),
}


@pytest.fixture(params=KINDS)
def put(request):
    def put(path):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[request.param](str(path))

    return put


def job(directory, form="own"):
    registry = StateRegistry()
    word = Words("word", registry=registry)
    payload = OwnContents() if form == "own" else FlatContents(str(directory))
    saver = open_directory(directory, payload, registry=registry)
    saver.start()
    return saver, word


def commit(directory, step, form="own"):
    saver, word = job(directory, form)
    word.text = str(step)
    save(saver, step)


def restored(directory, form="own"):
    saver, word = job(directory, form)
    candidate = saver.newest()
    saver.restore(candidate)
    assert word.text == str(candidate.step)
    return candidate.step


POINTLESS = [
    "checkpoint",
    ".tfpreempt-directory",
    ".tfpreempt-staging",
    ".tfpreempt-staging/dead",
    "faiss.index",
    "7",
    "9/MANIFEST.json",
    "9/COMMITTED",
    "ckpt-9.tfpreempt",
    "ckpt-9.tfpreempt-intent",
    "states/word.state",
]


@pytest.mark.parametrize("name", POINTLESS)
def test_special_files_beside_intact_commits_stop_no_start(tmp_path, put, name):
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    put(tmp_path / name)
    assert restored(tmp_path) == 2


NEEDED = ["MANIFEST.json", "COMMITTED", "ckpt.index", "states/word.state"]


@pytest.mark.parametrize("name", NEEDED)
def test_in_a_commit_they_are_damage(tmp_path, put, name):
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    put(tmp_path / "2" / name)
    assert restored(tmp_path) == 1
    commit(tmp_path, 3)
    assert restored(tmp_path) == 3


@pytest.mark.parametrize("name", ["ckpt-2.index", "ckpt-2.tfpreempt/COMMITTED"])
def test_in_a_flat_commit_too(tmp_path, put, name):
    for step in (1, 2):
        commit(tmp_path, step, "flat")
    put(tmp_path / name)
    assert restored(tmp_path, "flat") == 1


def test_an_unreadable_state_file_is_logged_and_written_again(tmp_path, caplog):
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    (tmp_path / "checkpoint").unlink()
    os.mkfifo(tmp_path / "checkpoint")
    commit(tmp_path, 3)
    assert (tmp_path / "checkpoint").read_text().startswith("model_checkpoint_path")
    assert not (tmp_path / "1").exists()  # retention continues
    (tmp_path / "checkpoint").unlink()
    os.mkfifo(tmp_path / "checkpoint")
    caplog.clear()
    assert restored(tmp_path) == 3
    (said,) = caplog.messages
    assert "cannot read TensorFlow's state file" in said
    assert "finds the commits without this file" in said


def test_a_strangers_index_that_cannot_be_read_is_skipped(tmp_path, caplog, broken):
    commit(tmp_path, 1)
    (tmp_path / "ckpt-9.index").write_bytes(b"index")
    broken(tmp_path / "ckpt-9.index")
    assert restored(tmp_path) == 1
    assert "ckpt-9.index' cannot be read: [Errno 5]" in caplog.text


@pytest.mark.parametrize("name", [*NEEDED, "ckpt.data-00001-of-00002"])
def test_a_file_that_the_disk_cannot_read_is_corrupt(tmp_path, caplog, broken, name):
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    broken(tmp_path / "2" / name)
    assert restored(tmp_path) == 1
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize("name", [*NEEDED, "ckpt.data-00001-of-00002"])
def test_too_many_open_files_are_no_damage(tmp_path, broken, name):
    """Otherwise an older commit were restored, and the newest deleted."""
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    broken(tmp_path / "2" / name, errno.EMFILE)
    with pytest.raises(errors.CheckpointError, match="Too many open files") as caught:
        restored(tmp_path)
    assert not isinstance(caught.value, errors.CheckpointCorruptedError)
