"""The files of Dataset.cache(path) are checked before a state that needs them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.cache_files import warn_of_unfinished  # noqa: E402
from tfpreempt.checkpoint.iterator_state import keep_seeds  # noqa: E402

COUNT = 40
NUMBERS = list(range(COUNT))


def cached(path: Path) -> Any:
    options = tf.data.Options()
    # A prefetch writes to the cache at any time, before or after a state is saved.
    options.experimental_optimization.inject_prefetch = False
    dataset = tf.data.Dataset.range(COUNT).cache(str(path)).with_options(options)
    iterator = iter(dataset)
    keep_seeds(iterator)
    return iterator


def read(iterator: Any, count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


def killed(path: Path, *, after: int, before: int = 4) -> Any:
    """The state of a run that was killed in its first epoch; its files lie there."""
    iterator = cached(path)
    read(iterator, before)
    state = iterator._serialize_to_tensors()
    read(iterator, after)
    kept = path.parent.with_name("kept")
    shutil.copytree(path.parent, kept)
    del iterator  # deletes files, which a killed process cannot
    shutil.rmtree(path.parent)
    kept.rename(path.parent)
    return state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "numbers"


@pytest.mark.parametrize("lost", ["*", "*.index", "*.data-*"])
def test_a_state_whose_cache_is_lost_is_refused(path: Path, lost: str) -> None:
    """TensorFlow ends the process."""
    read(cached(path), COUNT)
    list(cached(path))  # the end of the data completes the cache
    iterator = cached(path)
    assert read(iterator, 5) == NUMBERS[:5]
    state = iterator._serialize_to_tensors()
    for file in path.parent.glob(lost):
        file.unlink()
    with pytest.raises(errors.CheckpointMismatchError, match=r"numbers\.index"):
        cached(path)._restore_from_tensors(state)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_was_written_after_the_state_is_written_again(
    path: Path, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow refuses to: the lock file of the interrupted run is there."""
    state = killed(path, after=after)
    (path.parent / "numbers-1.txt").write_text("of the user")
    resumed = cached(path)
    resumed._restore_from_tensors(state)
    assert read(resumed, COUNT - 4) == NUMBERS[4:]
    assert list(resumed) == []
    del resumed
    assert read(cached(path), COUNT) == NUMBERS
    assert ("were deleted" in caplog.text) == (after > 0)
    assert (path.parent / "numbers-1.txt").exists()


def test_an_unfinished_cache_that_lost_files_is_refused_and_cleared(path: Path) -> None:
    state = killed(path, after=2)
    (path.parent / "numbers_0.index").unlink()
    with pytest.raises(errors.CheckpointMismatchError, match=r"numbers_0\.index"):
        cached(path)._restore_from_tensors(state)
    assert list(path.parent.iterdir()) == []
    assert read(cached(path), COUNT) == NUMBERS


def test_a_lock_file_is_named_before_training(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_unfinished([str(path)])
        assert caplog.text == ""
        killed(path, before=0, after=2)
        warn_of_unfinished([str(path)])
    assert f"{path}_0.lockfile" in caplog.text
    assert (path.parent / "numbers_0.lockfile").exists()
