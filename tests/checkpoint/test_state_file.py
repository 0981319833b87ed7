"""A State in a separate file: after a failure the old or the new file exists."""

from __future__ import annotations

import errno
import os

import pytest

from tests.checkpoint.fakes import Words, open_directory, save
from tests.fakes.storage import FaultyFiles, SimulatedCrash
from tfpreempt import errors
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.storage.files import LocalFiles

FULL = OSError(errno.ENOSPC, "No space left on device")


def operations(directory):
    files = FaultyFiles()
    state_file.write(files, directory, 0, Words("words", "x", registry=None))
    return files.operations


@pytest.mark.parametrize("when", ["before", "after", "torn"])
@pytest.mark.parametrize("error", [SimulatedCrash(), FULL], ids=["crash", "full"])
def test_a_failure_at_every_operation(tmp_path, when, error):
    count = len(operations(str(tmp_path / "count")))
    assert count >= 5
    for index in range(count):
        directory = str(tmp_path / str(index))
        os.makedirs(directory)
        words = Words("words", "old", registry=None)
        path = state_file.write(LocalFiles(), directory, 0, words)
        words.text = "new"
        files = FaultyFiles(fail_at=index, error=error, when=when)
        with pytest.raises(type(error)):
            state_file.write(files, directory, 0, words)
        assert state_file.read(path)[1].read() in (b"old", b"new")
        state_file.write(LocalFiles(), directory, 0, words)  # leftovers do no harm
        assert state_file.read(path)[1].read() == b"new"


def test_everything_is_synced_before_it_is_seen(tmp_path):
    names = [op.name for op in operations(str(tmp_path))]
    assert names.index("sync_file") < names.index("rename")
    assert names[names.index("rename") + 1 :].count("sync_dir") == 2


def test_the_rank_is_that_of_the_newest_commit(tmp_path):
    words = Words("words", "x", registry=None)
    saver = open_directory(tmp_path, registry=StateRegistry())
    for sequence in range(3):
        path = state_file.write(LocalFiles(), str(tmp_path), 0, words)
        assert state_file.read(path)[0] == sequence
        save(saver, 10 * sequence)


@pytest.mark.parametrize("index", range(21))
def test_every_byte_counts(tmp_path, index):
    words = Words("words", "x", registry=None)
    path = state_file.write(LocalFiles(), str(tmp_path), 0, words)
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        assert len(data) == 21
        data[index] ^= 16
        file.seek(0)
        file.write(data)
    with pytest.raises(errors.CheckpointCorruptedError, match=r"words\.state"):
        state_file.read(path)


def test_no_byte_of_a_file_behind_a_link_is_quoted(tmp_path):
    (tmp_path / "password").write_text("hunter2-hunter2")
    (tmp_path / "word.state").symlink_to(tmp_path / "password")
    with pytest.raises(
        errors.CheckpointCorruptedError, match="Links are not"
    ) as caught:
        state_file.read(str(tmp_path / "word.state"))
    assert "hunter" not in str(caught.value)


def test_a_name_that_was_changed_is_checked_again(tmp_path):
    words = Words("words", "x", registry=None)
    words.name = "../words"
    with pytest.raises(errors.ConfigurationError, match="State name"):
        state_file.write(LocalFiles(), str(tmp_path), 0, words)
    assert list(tmp_path.iterdir()) == []
