"""Downloads are verified, resumed, and bounded in time."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from tests.checkpoint.remote_commits import FILES, put_commit
from tests.fakes.storage import FaultyFiles, FaultyObjectStore, SimulatedCrash
from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.mirror import download, download_target
from tfpreempt.storage import checksum
from tfpreempt.storage.local import LocalStore

LARGE = {"big": bytes(range(251)) * 500, "small": b"s" * 99}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(download_target, "_SMALLEST", 10_000)
    monkeypatch.setattr(download_target, "_LARGEST", 10_000)


@pytest.fixture
def store():
    return FaultyObjectStore()


def read_tree(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(pathlib.Path(root).rglob("*"))
        if path.is_file()
    }


def gets(store):
    return [name for operation, name in store.operations if operation == "get"]


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("contents", [FILES, LARGE, {}])
def test_every_byte_and_the_manifest_arrive(store, tmp_path, contents, threads):
    commit = put_commit(store, contents)
    target = tmp_path / "a" / "b"
    download.download(commit, str(target), threads=threads)
    assert read_tree(target) == {**contents, layout.MANIFEST: commit.data}


def test_a_local_store_and_a_commit_at_its_root(tmp_path):
    store = LocalStore(str(tmp_path / "root"))
    commit = put_commit(store, at="")
    download.download(commit, str(tmp_path / "out"))
    assert read_tree(tmp_path / "out").keys() == {*FILES, layout.MANIFEST}


def test_a_second_download_fetches_nothing(store, tmp_path):
    commit = put_commit(store, LARGE)
    download.download(commit, str(tmp_path))
    before = gets(store)
    download.download(commit, str(tmp_path))
    assert gets(store) == before


def test_a_corrupt_local_file_is_downloaded_again(store, tmp_path):
    commit = put_commit(store, LARGE)
    download.download(commit, str(tmp_path))
    (tmp_path / "small").write_bytes(b"t" * 99)
    (tmp_path / "big").write_bytes(LARGE["big"] + b"too long")
    download.download(commit, str(tmp_path))
    assert (tmp_path / "small").read_bytes() == LARGE["small"]
    assert (tmp_path / "big").read_bytes() == LARGE["big"]


class Lying(FaultyObjectStore):
    """A store that answers some reads of a name with other bytes."""

    def __init__(self, name, times, lie):
        super().__init__()
        self.name, self.times, self.lie = name, times, lie

    def get(self, name, target, **kwargs):
        if name.endswith(self.name) and self.times:
            self.times -= 1
            buffer = io.BytesIO()
            super().get(name, buffer, **kwargs)
            return target.write(self.lie(buffer.getvalue()))
        return super().get(name, target, **kwargs)


LIES = {
    "other bytes": lambda data: b"?" + data[1:],
    "fewer bytes": lambda data: data[:-1],
    "more bytes": lambda data: data + b"!",
    "none": lambda data: b"",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("name", ["big", "small"])
def test_a_bad_answer_is_requested_once_more(tmp_path, name, lie):
    store = Lying(f"/{name}", 1, lie)
    download.download(put_commit(store, LARGE), str(tmp_path))
    assert (tmp_path / name).read_bytes() == LARGE[name]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("name", ["big", "small"])
def test_a_corrupt_object_is_named(tmp_path, name, lie):
    store = Lying(f"/{name}", 1000, lie)
    with pytest.raises(
        errors.CheckpointCorruptedError, match=f"{name} .* the manifest"
    ):
        download.download(put_commit(store, LARGE), str(tmp_path))
    assert not (tmp_path / layout.MANIFEST).exists()


@pytest.mark.parametrize("name", ["big", "small"])
def test_a_missing_object_is_named(store, tmp_path, name):
    commit = put_commit(store, LARGE)
    store.delete(f"{commit.name}/{name}")
    with pytest.raises(errors.CheckpointCorruptedError, match=f"{name} is missing"):
        download.download(commit, str(tmp_path))


def test_an_object_of_another_size_is_refused_before_it_is_fetched(store, tmp_path):
    commit = put_commit(store, LARGE)
    store.replace(f"{commit.name}/big", b"x" * 50_000)
    with pytest.raises(errors.CheckpointCorruptedError, match="big has 50000 bytes"):
        download.download(commit, str(tmp_path), threads=1)
    assert f"{commit.name}/big" not in gets(store)


def test_files_of_a_large_commit_come_in_few_requests(store, tmp_path, monkeypatch):
    """One request for each file, without a stat, if all threads are busy."""
    monkeypatch.setattr(download_target, "_LARGEST", 20_000)
    contents = {f"data-{number}": bytes(20_000) for number in range(8)}
    commit = put_commit(store, contents)
    before = len(store.operations)
    download.download(commit, str(tmp_path))
    asked = [
        (what, name.rpartition("/")[2]) for what, name in store.operations[before:]
    ]
    assert sorted(asked) == [("get", name) for name in sorted(contents)]


def test_a_file_is_durable_before_the_next_one_is_fetched(tmp_path):
    """A machine that is taken away keeps the files that it has downloaded."""
    files = FaultyFiles()
    synced = {}

    class Watched(FaultyObjectStore):
        def get(self, name, target, **kwargs):
            synced[name.rpartition("/")[2]] = [
                os.path.basename(each.path)
                for each in files.operations
                if each.name == "sync_file"
            ]
            return super().get(name, target, **kwargs)

    commit = put_commit(Watched(), LARGE)
    download.download(commit, str(tmp_path), files=files, threads=1)
    assert synced["small"] == ["big"]


def test_the_first_error_is_raised_and_the_next_call_resumes(store, tmp_path):
    commit = put_commit(store, LARGE)
    count = -(-len(LARGE["big"]) // 10_000)
    # after the look at its size and four ranges of the large file
    at = len(store.operations) + 5
    faulty = FaultyObjectStore({at: errors.CheckpointError("the store is down")})
    faulty._objects, faulty.operations = store._objects, list(store.operations)
    there = dataclasses.replace(commit, store=faulty)
    with pytest.raises(errors.CheckpointError, match="is down"):
        download.download(there, str(tmp_path), threads=1)
    before = len(gets(store))
    download.download(commit, str(tmp_path))
    assert len(gets(store)) - before == count - 4 + 1
    assert (tmp_path / "big").read_bytes() == LARGE["big"]
    assert not (tmp_path / download_target.PROGRESS).exists()


def test_an_incomplete_or_wrong_record_costs_only_a_range(store, tmp_path):
    commit = put_commit(store, LARGE)
    lines = [
        b'["big", 0, 10000, 5]',
        b'[["big"], 0, 1, 5]',
        b'["big", [], 1, 5]',
        b"{}",
        b"\xff\x00",
        b"[" * 100_000,
        b'["big", 100',
    ]
    (tmp_path / download_target.PROGRESS).write_bytes(b"\n".join(lines))
    (tmp_path / "big").write_bytes(b"x" * 30_000)
    download.download(commit, str(tmp_path))
    assert read_tree(tmp_path) == {**LARGE, layout.MANIFEST: commit.data}


@pytest.mark.slow  # waits in real time
def test_a_hung_thread_delays_neither_the_deadline_nor_the_end(tmp_path):
    release = threading.Event()

    class Hanging(FaultyObjectStore):
        def get(self, name, target, **kwargs):
            if name.endswith("big"):
                release.wait(60)
            return super().get(name, target, **kwargs)

    store = Hanging()
    commit = put_commit(store, LARGE)
    timer = threading.Timer(0.5, release.set)
    timer.start()
    try:
        with pytest.raises(errors.CheckpointError, match=r"more than 0.2 s.*continue"):
            download.download(commit, str(tmp_path), timeout=0.2)
    finally:
        timer.join()
    download.download(commit, str(tmp_path))


def test_a_store_that_sends_nothing_is_given_up(tmp_path, monkeypatch):
    release = threading.Event()

    class Silent(FaultyObjectStore):
        def get(self, name, target, **kwargs):
            if name.endswith("big"):
                release.wait(60)
            return super().get(name, target, **kwargs)

    monkeypatch.setattr(download, "_STALL_SECONDS", 0.1)
    monkeypatch.setattr(download, "_STOP_TIMEOUT_SECONDS", 0.1)
    store = Silent()
    commit = put_commit(store, LARGE)
    with pytest.raises(errors.CheckpointError, match="no byte arrived for"):
        download.download(commit, str(tmp_path))
    release.set()


STUCK = """
import sys, threading
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.mirror import download
from tfpreempt.storage.local import LocalStore

class Stuck(LocalStore):
    def get(self, name, target, **kwargs):
        if name.endswith("big"):
            threading.Event().wait(3600)
        return super().get(name, target, **kwargs)

download._STOP_TIMEOUT_SECONDS = 0.1
store = Stuck(sys.argv[1])
try:
    entry = catalog.read(catalog.unread_entry(store))
    download.download(entry, sys.argv[2], timeout=0.2)
except errors.CheckpointError as error:
    sys.exit("more than 0.2 s" not in str(error))
"""


@pytest.mark.slow
def test_a_stuck_thread_does_not_hold_up_the_end_of_its_process(tmp_path):
    root, target = str(tmp_path / "root"), str(tmp_path / "out")
    put_commit(LocalStore(root), LARGE, at="")
    done = subprocess.run([sys.executable, "-c", STUCK, root, target], timeout=60)
    assert done.returncode == 0


def test_a_crash_at_any_file_operation_is_repaired_by_the_next_call(store, tmp_path):
    commit = put_commit(store, FILES)
    files = FaultyFiles()
    download.download(commit, str(tmp_path / "x"), files=files, threads=1)
    for at, _ in enumerate(files.operations):
        target = tmp_path / str(at)
        faulty = FaultyFiles(fail_at=at)
        with pytest.raises(SimulatedCrash):
            download.download(commit, str(target), files=faulty, threads=1)
        assert not (target / layout.MANIFEST).exists() or at > len(FILES)
        download.download(commit, str(target))
        assert read_tree(target) == {**FILES, layout.MANIFEST: commit.data}


def test_all_is_synced_before_the_manifest_is_there(store, tmp_path):
    files = FaultyFiles()
    download.download(put_commit(store), str(tmp_path), files=files)
    done = [
        (each.name, os.path.relpath(each.path, tmp_path)) for each in files.operations
    ]
    manifest = done.index(("rename", layout.MANIFEST))
    synced = {path for name, path in done[:manifest] if name.startswith("sync")}
    assert synced >= {*FILES, "states", "worker-0000", "."}


KILLED = """
import os, signal, sys
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.mirror import download, download_target
from tfpreempt.storage.local import LocalStore

class Dying(LocalStore):
    left = 5
    def get(self, name, target, **kwargs):
        if name.endswith("big"):
            self.left -= 1
            if not self.left:
                target.write(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
        return super().get(name, target, **kwargs)

download_target._SMALLEST = download_target._LARGEST = 10_000
store = Dying(sys.argv[1])
download.download(catalog.read(catalog.unread_entry(store)), sys.argv[2], threads=1)
"""


@pytest.mark.slow
def test_a_download_of_a_killed_process_is_kept(tmp_path):
    root, target = str(tmp_path / "root"), str(tmp_path / "out")
    commit = put_commit(LocalStore(root), LARGE, at="")
    done = subprocess.run([sys.executable, "-c", KILLED, root, target], timeout=60)
    assert done.returncode == -signal.SIGKILL
    asked = []

    class Watched(LocalStore):
        def get(self, name, out, **kwargs):
            asked.append((name, kwargs["offset"]))
            return super().get(name, out, **kwargs)

    download.download(
        dataclasses.replace(commit, store=Watched(root)), target, threads=1
    )
    assert not {("big", offset * 10_000) for offset in range(4)} & set(asked)
    assert read_tree(target) == {**LARGE, layout.MANIFEST: commit.data}


def test_checksums_of_parts_are_joined(rng):
    data = rng.randbytes(1000)
    for cut in (0, 1, 500, 1000):
        parts = data[:cut], data[cut:]
        first, second = map(checksum.of_bytes, parts)
        assert checksum.joined(first, second, 1000 - cut) == checksum.of_bytes(data)
