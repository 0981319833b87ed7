"""Unusable directories, and directories that workers do not share."""

from __future__ import annotations

import errno
import os
import pathlib
import re

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, write_part
from tests.checkpoint.test_lease import acquired
from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import is_leased_by
from tfpreempt.checkpoint.mirror.store_selection import choose_storage
from tfpreempt.storage import os_errors
from tfpreempt.storage.files import LocalFiles


@pytest.mark.parametrize("given_directory", [None, ""])
def test_no_directory(given_directory):
    with pytest.raises(
        errors.ConfigurationError, match="expected the path of the directory"
    ) as caught:
        os_errors.check_directory(given_directory)
    # The caller may have passed no Checkpoint.
    assert "with a tf.train.Checkpoint" not in str(caught.value)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigurationError, match="is a file"):
        os_errors.check_directory(tmp_path / "file")
    with pytest.raises(errors.ConfigurationError, match="part of the path is a file"):
        os_errors.check_directory(tmp_path / "file" / "below")
    with pytest.raises(errors.ConfigurationError, match="must be a path"):
        os_errors.check_directory(3)


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    # Root may write anywhere, so the answer of access(2) is put in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(errors.ConfigurationError, match="not writable"):
        os_errors.check_directory(tmp_path)


def test_a_directory_is_made(tmp_path):
    path = os_errors.check_directory(tmp_path / "a" / "b")
    assert os.path.isdir(path)
    assert os.path.isabs(path)


@pytest.mark.parametrize("made_before", [0, 1, 2])
def test_the_name_of_a_directory_lasts(tmp_path, synced, made_before):
    """A new directory is synced: a loss of power once removed it with all commits.

    `tfpreempt run`, another worker or the program may have created it and its parents.
    """
    names = [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    names[made_before].mkdir(parents=True, exist_ok=True)
    os_errors.check_directory(tmp_path / "a" / "b")
    assert set(synced) >= set(names[:2])
    assert {each.stat().st_dev for each in synced} == {tmp_path.stat().st_dev}


def test_saving_below_a_file_is_a_save_error(tmp_path):
    saver = open_directory(tmp_path / "d", OwnContents())
    os.rmdir(tmp_path / "d")
    (tmp_path / "d").write_text("")
    with pytest.raises(
        errors.SaveError, match="now leads to another directory or file"
    ):
        write_part(saver, 1, "a")


def test_the_lease_distinguishes_shared_from_separate_storage(tmp_path):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    lease, another = acquired(shared), acquired(other)
    token = lease.token
    assert is_leased_by(str(shared), token)
    assert not is_leased_by(str(other), token)
    assert not is_leased_by(str(shared), another.token)
    assert not is_leased_by(str(tmp_path / "missing"), token)
    assert not is_leased_by(str(shared), f"../{layout.LEASE}/{token}")
    assert not is_leased_by(str(shared), "")
    lease.release()
    assert not is_leased_by(str(shared), token)


@pytest.mark.parametrize("name", ["0", "17", "17.3"])
def test_step_names(name):
    assert layout.COMMIT.fullmatch(name)


@pytest.mark.parametrize("name", ["007", "-1", "1.", "1.0", "x", "", "1e3", "1\n"])
def test_other_names(name):
    assert not layout.COMMIT.fullmatch(name)


DAMAGED = [pathlib.Path("gs://bucket/run"), "gs:/bucket/run", "/work/gs://bucket"]


@pytest.mark.parametrize("url", DAMAGED)
def test_a_malformed_url_is_no_local_directory(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigurationError, match="pathlib") as got:
        os_errors.check_directory(url)
    assert repr(str(url)) in str(got.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///tmp/x", "Pass '/tmp/x'"),
        ("gs://", "names the bucket ''"),
        ("gs://bucket", "is a bucket without a folder"),
        ("gs://bucket//run", "empty part"),
        ("gs://bucket/../run", "'..'"),
    ],
)
def test_a_url_that_cannot_be_a_directory(url, says):
    with pytest.raises(errors.ConfigurationError, match=re.escape(says)):
        choose_storage(None, url, RetentionPolicy())
    with pytest.raises(errors.ConfigurationError, match="is a URL"):
        os_errors.check_directory(url)


def test_bytes_are_no_path():
    with pytest.raises(errors.ConfigurationError, match=r"str or os\.PathLike"):
        os_errors.check_directory(b"/tmp/run")


@pytest.mark.parametrize("name", ["x\udcffy", "x\0y"])
def test_a_path_that_is_no_valid_text(tmp_path, name):
    with pytest.raises(errors.ConfigurationError, match="not valid text"):
        os_errors.check_directory(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("character", ["[", "*", "?", "\\"])
def test_a_path_that_tensorflow_cannot_restore_is_refused(tmp_path, character):
    directory = str(tmp_path / f"a{character}b")
    with pytest.raises(
        errors.ConfigurationError, match="treats as a pattern"
    ) as caught:
        os_errors.check_directory(directory, name=layout.PAYLOAD)
    assert repr(character) in str(caught.value)
    assert os.listdir(tmp_path) == []
    assert os_errors.check_directory(directory) == directory  # for States alone
    with pytest.raises(errors.ConfigurationError, match="treats as a pattern"):
        os_errors.check_directory(tmp_path, name=f"ckpt{character}")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the quota is used up"),
    ],
)
def test_used_up_resources_are_distinguished(number, says):
    """TensorFlow calls all of these RESOURCE_EXHAUSTED; the text is the system's."""
    said = os.strerror(number)
    assert says in os_errors.advice_on(f"/run/5/ckpt; {said} [Op:SaveV2]")
    with (
        pytest.raises(errors.SaveError, match=says),
        os_errors.translated("save", "/run"),
    ):
        raise OSError(number, said)
    assert os_errors.advice_on("OOM when allocating tensor") is None


def test_a_home_directory_that_no_shell_has_written_out_is_refused(
    tmp_path, monkeypatch
):
    """A local directory of the name ~ invites `rm -rf ~`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigurationError, match="expanduser"):
        os_errors.check_directory("~/run")
    assert list(tmp_path.iterdir()) == []
    assert os_errors.check_directory("./~") == str(tmp_path / "~")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_system_that_cannot_sync_directories_above_is_no_matter(
    tmp_path, monkeypatch, is_there
):
    """Autofs and squashfs cannot."""
    directory = tmp_path / "run"
    if is_there:
        directory.mkdir()

    def refuse(self, path):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    monkeypatch.setattr(LocalFiles, "sync_dir", refuse)
    assert os_errors.check_directory(str(directory)) == str(directory)


def test_a_disk_error_above_an_existing_directory_is_ignored(tmp_path, monkeypatch):
    def fail(self, path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(LocalFiles, "sync_dir", fail)
    assert os_errors.check_directory(str(tmp_path)) == str(tmp_path)
    with pytest.raises(errors.ConfigurationError, match="use another disk"):
        os_errors.check_directory(str(tmp_path / "new"))
