"""The files of Dataset.cache(path) are checked before a state that needs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.state import unfinished_caches  # noqa: E402
from tfpreempt.checkpoint.state.unfinished_caches import (  # noqa: E402
    clear_abandoned,
    clear_interrupted,
    expect_caches,
    written_caches,
)
from tfpreempt.checkpoint.tensors.iterator_state import (  # noqa: E402
    keep_seeds,
    prepare_cache_files,
)

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
    """Returns the state of a run that was killed in its first epoch, with its files."""
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
def test_cache_files_written_after_the_state_are_written_again(
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


def make_old(path: Path) -> None:
    for file in path.parent.iterdir():
        os.utime(file, (1e9, 1e9))


def test_a_cache_that_a_process_writes_is_kept_and_named(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clear_abandoned([str(path)])
    assert caplog.text == ""
    iterator = cached(path)
    read(iterator, 2)
    make_old(path)
    clear_abandoned([str(path)])
    assert f"{path}_0.lockfile" in caplog.text
    assert read(iterator, COUNT - 2) == NUMBERS[2:]
    assert list(iterator) == []
    del iterator
    assert read(cached(path), COUNT) == NUMBERS


@pytest.mark.parametrize("left", ["*", "*.lockfile"])
def test_an_unfinished_cache_of_a_killed_process_is_deleted(
    path: Path, left: str
) -> None:
    """No journal has a record of the cache."""
    killed(path, before=0, after=2)
    for file in set(path.parent.iterdir()) - set(path.parent.glob(left)):
        file.unlink()
    (path.parent / "numbers-1.txt").write_text("of the user")
    make_old(path)
    clear_abandoned([str(path)])
    assert [file.name for file in path.parent.iterdir()] == ["numbers-1.txt"]
    assert read(cached(path), COUNT) == NUMBERS


@contextlib.contextmanager
def other_process(path: Path) -> Iterator[None]:
    """Has a file open to write."""
    with path.open("ab") as file:
        process = subprocess.Popen(["sleep", "60"], stdout=file)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "why", ["open", "a finished shard", "just closed", "another machine", "a link"]
)
def test_an_unfinished_cache_that_may_have_a_writer_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    lock, data = path.parent / "numbers_0.lockfile", path.parent / "numbers_0.data"
    data = data.with_suffix(".data-00000-of-00001.tempstate7")
    for file in (lock, data):
        file.write_bytes(b"x")
    if why == "a finished shard":  # the writer opens the next shard at the next read
        (path.parent / "numbers_0.index").touch()
    if why == "a link":
        lock.rename(path.parent / "elsewhere")
        lock.symlink_to("elsewhere")
    if why == "another machine":
        monkeypatch.setattr(unfinished_caches, "_LOCAL_FILE_SYSTEMS", {0x6969: "NFS"})
    make_old(path)
    if why == "just closed":
        os.utime(data)
    before = sorted(path.parent.iterdir())
    with other_process(data) if why == "open" else contextlib.nullcontext():
        clear_abandoned([str(path)])
    assert sorted(path.parent.iterdir()) == before


@pytest.fixture
def record(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The journal's record of an earlier process, which was killed."""
    iterator = cached(path)
    read(iterator, 2)
    [(written, lock)] = written_caches()
    assert written_caches() == []  # each cache is recorded once
    del iterator
    (path.parent / "numbers_0.data-00000-of-00001.tempstate7").touch()
    (path.parent / "numbers_0.lockfile").touch()
    os.utime(path.parent / "numbers_0.lockfile", ns=(lock, lock))
    monkeypatch.setattr(unfinished_caches, "_written", set())
    return {"path": written, "lock": lock}


def test_files_of_a_killed_run_are_deleted(
    path: Path, record: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expect_caches([str(path)])
    clear_interrupted([{**record, "lock": 1}, record, {"path": None}])
    assert list(path.parent.iterdir()) == []
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "numbers_0.lockfile" in caplog.text
    assert read(cached(path), COUNT) == NUMBERS


@pytest.mark.parametrize(
    "why", ["no record", "another lock", "restored", "written", "older than the commit"]
)
def test_files_of_others_and_files_that_are_needed_are_kept(
    path: Path, record: dict[str, Any], caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "another lock":
        record["lock"] -= 1
    if why == "restored":
        unfinished_caches._restored.add(record["path"])
    if why == "written":  # by an iterator of this process
        unfinished_caches._written.add((record["path"], record["lock"]))
    if why == "older than the commit":  # which may need the shard
        (path.parent / "numbers_0.index").touch()
    before = sorted(path.parent.iterdir())
    expect_caches([str(path)])
    since = record["lock"] / 1e9 + 1 if why == "older than the commit" else 0.0
    with (path.parent / "numbers_0.data-00000-of-00001.tempstate7").open("ab"):
        clear_interrupted([] if why == "no record" else [record], since=since)
    assert sorted(path.parent.iterdir()) == before
    assert ("is incomplete" in caplog.text) == (why != "restored")


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_state_of_an_unread_iterator_needs_and_deletes_nothing(
    path: Path, is_shuffled: bool
) -> None:
    data = tf.data.Dataset.range(COUNT).cache(str(path))
    iterator = iter(data.shuffle(4, seed=3).repeat() if is_shuffled else data)
    state = iterator._serialize_to_tensors()["_STATE"]
    (path.parent / "numbers_0.lockfile").touch()  # another program's
    assert prepare_cache_files(state, [str(path)]) == []
    assert (path.parent / "numbers_0.lockfile").exists()
