"""After a restart the file of a CSVLogger equals that of an uninterrupted run."""

from __future__ import annotations

import shutil

import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES, callbacks_of, travelled  # noqa: E402
from tests.keras.small_fit import machine  # noqa: E402
from tfpreempt.core import contained  # noqa: E402
from tfpreempt.keras.callbacks import callback_files, callback_state  # noqa: E402

APPEND = pytest.mark.parametrize("append", [True, False])


def logger(line, path, append=False, separator=","):
    return callbacks_of(line).CSVLogger(path, append=append, separator=separator)


def begun(*args, **kwargs):
    made = logger(*args, **kwargs)
    made.on_train_begin()
    return made


def train(one, *epochs):
    for epoch in epochs:
        one.on_epoch_end(epoch, {"loss": 0.1 * epoch, "text": f"é{epoch}"})


def captured(one):
    return travelled(callback_state.capture_files([one]))


def read(path):
    with tf.io.gfile.GFile(str(path), "rb") as file:
        return file.read()


def expected(line, path, epochs, append, before):
    """The file of a fit without interruption."""
    path.write_bytes(before)
    one = begun(line, str(path), append, ";")
    train(one, *range(epochs))
    one.on_train_end()
    return path.read_bytes()


@LINES
@APPEND
@pytest.mark.parametrize("before", [b"", b"epoch;loss\r\n9;1\r\n"])
@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("left", ["more rows", "gone", "the same"])
def test_no_row_is_lost_or_doubled(line, append, before, done, left, tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(before)
    old = begun(line, str(path), append, ";")
    train(old, *range(done))
    states = captured(old)
    if left == "more rows":
        train(old, done, done + 1)
    old.csv_file.close()
    if left == "gone":
        path.unlink()
    fresh = begun(line, str(path), append, ";")
    callback_state.restore_files([fresh], states)
    assert (fresh.writer is None) == (done == 0)
    train(fresh, *range(done, 4))
    assert "é3".encode() in read(path)  # at once, as Keras does
    fresh.on_train_end()
    whole = expected(line, tmp_path / "whole.csv", 4, append, before)
    assert path.read_bytes() == whole


@LINES
def test_the_log_of_a_complete_fit_is_written_back_and_closed(line, tmp_path):
    path = tmp_path / "log.csv"
    old = begun(line, str(path))
    train(old, 0, 1)
    old.on_train_end()
    states, text = captured(old), path.read_bytes()
    fresh = begun(line, str(path))
    fresh.on_train_end()
    callback_state.restore_files([fresh], states)
    assert path.read_bytes() == text
    assert fresh.writer is None
    assert getattr(fresh.csv_file, "closed", True)  # a GFile does not tell
    assert fresh.keys == ["loss", "text", "val_loss", "val_text"]
    fresh.on_train_begin()  # and it can be used again
    train(fresh, 0)
    fresh.on_train_end()
    assert path.read_bytes().count(b"epoch") == 1


@LINES
def test_a_log_keeps_its_owner_and_its_mode(line, tmp_path):
    """The user may have made the file private, in a directory that is not the user's.

    The other name of a copy by `cp -al` keeps its text.
    """
    path = tmp_path / "log.csv"
    path.touch(mode=0o600)
    old = begun(line, str(path))
    train(old, 0, 1)
    states, text = captured(old), path.read_bytes()
    train(old, 2)
    old.csv_file.close()
    inode = path.stat().st_ino
    callback_state.restore_files([begun(line, str(path), append=True)], states)
    assert (path.read_bytes(), path.stat().st_ino) == (text, inode)
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "copy.csv").hardlink_to(path)
    callback_state.restore_files([begun(line, str(path), append=True)], states)
    assert (tmp_path / "copy.csv").read_bytes() == text
    assert path.stat().st_mode & 0o777 == 0o600


@LINES
@APPEND
def test_the_log_of_an_extended_fit_has_one_header(line, append, tmp_path):
    path = tmp_path / "log.csv"
    old = begun(line, str(path), append)
    train(old, 0, 1)
    old.on_train_end()
    states = captured(old)
    fresh = begun(line, str(path), append)
    callback_state.restore_files([fresh], states, extends=True)
    train(fresh, 2)
    fresh.on_train_end()
    rows = path.read_text().split()
    assert [row[0] for row in rows] == ["e", "0", "1", "2"]


@LINES
def test_a_fit_that_is_passed_over_keeps_its_log(line, tmp_path):
    path = tmp_path / "log.csv"
    old = begun(line, str(path))
    train(old, 0, 1)
    old.on_train_end()
    text = path.read_bytes()
    fresh = logger(line, str(path))
    states = captured(fresh)  # before `on_train_begin`, which empties the file
    fresh.on_train_begin()
    callback_state.restore_files([fresh], states)
    fresh.on_train_end()
    assert path.read_bytes() == text


@LINES
def test_a_log_that_was_deleted_while_training_begins_anew(line, tmp_path):
    path = tmp_path / "log.csv"
    old = begun(line, str(path))
    train(old, 0)
    path.unlink()
    states = captured(old)
    fresh = begun(line, str(path))
    callback_state.restore_files([fresh], states)
    train(fresh, 1)
    fresh.on_train_end()
    assert [row[0] for row in path.read_text().split()] == ["e", "1"]


@LINES
def test_a_log_on_a_disk_of_its_own_comes_back_in_a_new_place(line, tmp_path):
    old = begun(line, str(tmp_path / "log.csv"))
    train(old, 0)
    moved = tmp_path / "moved"
    moved.mkdir()
    fresh = begun(line, str(moved / "log.csv"))
    shutil.rmtree(moved)
    callback_state.restore_files([fresh], captured(old))
    assert read(moved / "log.csv") == read(tmp_path / "log.csv")


@pytest.mark.parametrize("done", [0, 1])
def test_a_log_that_only_tensorflow_can_open(done, tmp_path):
    """tf_keras only: the CSVLogger of Keras 3 fails at the end of any such fit."""
    path = f"file://{tmp_path}/log.csv"
    old = begun("tf_keras", path)
    train(old, *range(done))
    states = captured(old)
    train(old, 5)
    fresh = begun("tf_keras", path)
    callback_state.restore_files([fresh], states)
    train(fresh, done)
    fresh.on_train_end()
    rows = read(path).decode().split()
    assert [row[0] for row in rows] == ["e", "0", "1"][: done + 2]


def test_two_loggers_and_one_that_is_new(tmp_path, caplog):
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    old = [begun("keras", path) for path in paths[:2]]
    for epoch, one in enumerate(old):
        train(one, epoch)
    states = callback_state.capture_files(old)
    fresh = [begun("keras", path) for path in paths]
    callback_state.restore_files(fresh, states)
    assert [read(path)[-4:-2].decode() for path in paths[:2]] == ["NA", "NA"]
    assert [b"\xc3\xa90" in read(paths[0]), b"\xc3\xa91" in read(paths[1])] == [1, 1]
    (record,) = caplog.records
    assert "keras.CSVLogger#3" in record.getMessage()


@LINES
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("name", ["ckpt", "alias"])
def test_no_link_in_the_checkpoint_directory_leads_to_a_log(
    line, above, name, tmp_path
):
    """Another user would get the content of a file, or choose its content."""
    root, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    for folder in (root / "logs", elsewhere):
        folder.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(root)
    path = root / "logs" / "log.csv"
    old = begun(line, str(tmp_path / name / "logs" / "log.csv"))
    train(old, 0)
    states = captured(old)
    old.csv_file.close()
    (elsewhere / "log.csv").write_text("years of work")
    path.unlink()
    if above:
        path.parent.rmdir()
        path.parent.symlink_to(elsewhere)
    else:
        path.symlink_to(elsewhere / "log.csv")
    with callback_files.resolved([old], str(root)):
        with pytest.raises(contained.LinkError):
            callback_state.capture_files([old])
        with pytest.raises(contained.LinkError):
            callback_state.restore_files([old], states)
    assert (elsewhere / "log.csv").read_text() == "years of work"


@LINES
def test_a_fit_does_not_write_through_a_link_in_the_checkpoint_directory(line):
    with machine(line) as on:
        elsewhere = on.directory / "thesis"
        elsewhere.write_text("years of work")
        on.checkpoints.mkdir(exist_ok=True)
        path = on.checkpoints / "log.csv"
        path.symlink_to(elsewhere)
        on.start()
        with pytest.raises(contained.LinkError):
            on.fit(None, logger(line, str(path)))
        assert elsewhere.read_text() == "years of work"
