"""TensorFlow's state file without TensorFlow."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfpreempt.checkpoint.directory import checkpoint_state
from tfpreempt.checkpoint.directory.checkpoint_state import CheckpointStateFile
from tfpreempt.storage.files import LocalFiles


def test_a_file_of_tensorflow_is_read(tmp_path):
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-3"\n'
        'all_model_checkpoint_paths: "a \\"b\\" \\303\\244"\n'
        'all_model_checkpoint_paths: "ckpt-3"\n'
        "all_model_checkpoint_timestamps: 1763706000.25\n"
        "all_model_checkpoint_timestamps: 1763706001\n"
        "last_preserved_timestamp: 1763705999.5\n"
    )
    assert checkpoint_state.read(str(tmp_path)) == CheckpointStateFile(
        latest="ckpt-3",
        paths=('a "b" ä', "ckpt-3"),
        timestamps=(1763706000.25, 1763706001.0),
        last_preserved=1763705999.5,
    )


def test_nothing_and_rubbish(tmp_path):
    assert checkpoint_state.read(str(tmp_path)) is None
    assert checkpoint_state.read(str(tmp_path / "nowhere")) is None
    for text in ("", "rubbish", 'model_checkpoint_path: ""'):
        (tmp_path / "checkpoint").write_text(text)
        assert checkpoint_state.read(str(tmp_path)) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_path_is_read_back(tmp_path, path):
    written = CheckpointStateFile(latest=path, paths=("x", path), timestamps=(1.0, 2.5))
    (tmp_path / "checkpoint").write_bytes(checkpoint_state.to_bytes(written))
    assert checkpoint_state.read(str(tmp_path)) == written


def test_a_deleted_checkpoint_is_removed_from_the_file(tmp_path):
    def write(*names):
        times = tuple(map(float, range(len(names))))
        given = CheckpointStateFile(latest=names[-1], paths=names, timestamps=times)
        (tmp_path / "checkpoint").write_bytes(checkpoint_state.to_bytes(given))

    files = LocalFiles()
    write("1/ckpt", "theirs", str(tmp_path / "2" / "ckpt"))
    checkpoint_state.unlist(files, str(tmp_path), "2/ckpt")
    assert checkpoint_state.named(str(tmp_path)) == ["theirs", "1/ckpt", "theirs"]
    checkpoint_state.unlist(files, str(tmp_path), "1/ckpt")
    left = CheckpointStateFile(latest="theirs", paths=("theirs",), timestamps=(1.0,))
    assert checkpoint_state.read(str(tmp_path)) == left
    checkpoint_state.unlist(files, str(tmp_path), "theirs")
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_removed_meanwhile_is_read_once(tmp_path, monkeypatch):
    """A second read found no file, and a save failed with an AssertionError."""
    path, read = tmp_path / "checkpoint", checkpoint_state.file_reading.read
    path.write_text('model_checkpoint_path: "1/ckpt"\n')

    def read_and_remove(*arguments):
        data = read(*arguments)
        path.unlink()
        return data

    monkeypatch.setattr(checkpoint_state.file_reading, "read", read_and_remove)
    checkpoint_state.unlist(LocalFiles(str(tmp_path)), str(tmp_path), "1/ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(10)
@pytest.mark.parametrize("escape", ["q", "?", "x", "x4", "8", "400", "777", "\n"])
@pytest.mark.filterwarnings("error")
def test_a_line_with_an_unknown_escape_is_ignored(tmp_path, escape):
    text = f'model_checkpoint_path: "c"\nall_model_checkpoint_paths: "c\\{escape}"\n'
    (tmp_path / "checkpoint").write_text(text)
    assert checkpoint_state.read(str(tmp_path)) == CheckpointStateFile(latest="c")


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "checkpoint")
    with pytest.raises(OSError, match="Not a regular file"):
        checkpoint_state.read(str(tmp_path))


def test_a_line_longer_than_any_path_is_ignored(tmp_path):
    """A file of 16 MiB with a single line took 3 GB of memory."""
    paths = (f"{'x' * 4000}/ckpt", "c")
    given = CheckpointStateFile(latest="c", paths=paths)
    text = checkpoint_state.to_bytes(given)
    long = f'all_model_checkpoint_paths: "{"x" * (1 << 17)}"\n'.encode()
    (tmp_path / "checkpoint").write_bytes(text + long)
    assert checkpoint_state.read(str(tmp_path)) == given
