"""Downloads are made once, shared by readers, and deleted afterwards."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.remote_commits import put_commit
from tfpreempt import errors
from tfpreempt.checkpoint.directory import cache
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.storage.local import LocalStore

CONTENTS = {"ckpt.index": b"i", "big": bytes(range(250)) * 400}
DEADLINE = 60


@pytest.fixture
def root(tmp_path):
    return cache.private_directory(str(tmp_path / "cache"))


def filling(log=None, text="x"):
    def make(path):
        if log is not None:
            log.append(path)
        os.makedirs(path, exist_ok=True)
        pathlib.Path(path, "file").write_text(text)

    return make


def copies(root):
    return sorted(name for name in os.listdir(root) if not name.endswith(".making"))


def test_a_copy_is_there_while_it_is_read(root):
    with cache.reading("key", filling(), root=root) as path:
        assert pathlib.Path(path, "file").read_text() == "x"
        assert copies(root) == ["key", "key.claim"]
    assert copies(root) == []


def test_the_last_reader_deletes_the_copy(root):
    made = []
    with cache.reading("key", filling(made), root=root) as first:
        with cache.reading("key", filling(made), root=root) as second:
            assert first == second
        assert os.path.isdir(first)
    assert len(made) == 1
    assert copies(root) == []


def test_concurrent_threads_make_one_copy(root):
    made, inside = [], threading.Barrier(4, timeout=DEADLINE)

    def read():
        with cache.reading("key", filling(made), root=root):
            inside.wait()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(made) == 1
    assert not inside.broken
    assert copies(root) == []


def test_the_next_process_makes_the_copy_after_a_failure(root):
    def failing(path):
        os.makedirs(path)
        pathlib.Path(path, "half").write_text("")
        raise errors.CheckpointError("no network")

    reading = cache.reading("key", failing, root=root)
    with pytest.raises(errors.CheckpointError, match="no network"), reading:
        pass
    assert copies(root) == ["key.claim", "key.part"]
    with cache.reading("key", filling(), root=root) as path:
        assert sorted(os.listdir(path)) == ["file", "half"]
    assert copies(root) == []


def test_an_unused_incomplete_copy_is_deleted_after_a_day(root):
    part = pathlib.Path(root, "old.part")
    part.mkdir()
    pathlib.Path(root, "old.claim").touch()
    with cache.reading("key", filling(), root=root):
        assert part.exists()
    os.utime(part, (0, 0))
    with cache.reading("key", filling(), root=root):
        assert not part.exists()
    assert copies(root) == []


def test_a_directory_that_others_can_write_is_not_trusted(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(errors.ConfigurationError, match="cannot be trusted"):
            cache.private_directory(str(tmp_path / name))
    (tmp_path / "readable").mkdir(mode=0o755)
    assert cache.private_directory(str(tmp_path / "readable"))
    assert (tmp_path / "readable").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_swapped_during_the_check(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch(mode=0o644)

    def swap(path, mode):
        os.rmdir(path)
        os.symlink(elsewhere, path)
        return True

    monkeypatch.setattr(os, "access", swap)
    cache.private_directory(str(tmp_path / "own"))
    assert elsewhere.stat().st_mode & 0o777 == 0o644


def test_the_directory_of_copies(tmp_path, monkeypatch):
    own = f"tfpreempt-{os.getuid()}"
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "chosen"))
    assert cache.default_root() == str(tmp_path / "chosen" / own)
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_root() == str(tmp_path / ".cache" / "tfpreempt")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache.default_root() == str(tmp_path / own)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(errors.ConfigurationError, match="TFPREEMPT_CACHE_DIR"):
        cache.default_root()


def test_the_wait_for_a_copy_of_another_process_is_limited(root):
    begun, release = threading.Event(), threading.Event()

    def slow(path):
        begun.set()
        release.wait(DEADLINE)
        filling()(path)

    def read():
        with cache.reading("key", slow, root=root):
            pass

    maker = threading.Thread(target=read)
    maker.start()
    begun.wait(DEADLINE)
    reading = cache.reading("key", filling(), timeout=0.01, root=root)
    with pytest.raises(errors.CheckpointError, match="Another process"), reading:
        pass
    release.set()
    maker.join(DEADLINE)
    assert copies(root) == []


def test_concurrent_readers_find_their_copies(root, rng):
    plans = [[rng.choice("abc") for _ in range(6)] for _ in range(4)]
    wrong = []

    def read(plan):
        for key in plan:
            with cache.reading(key, filling(text=key), root=root) as path:
                if pathlib.Path(path, "file").read_text() != key:
                    wrong.append((key, path))

    threads = [threading.Thread(target=read, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert wrong == []
    assert copies(root) == []


# --- processes -----------------------------------------------------------------------

READER = """
import os, signal, sys
from tfpreempt.checkpoint.mirror import download, download_target
from tfpreempt.checkpoint.restore.handle import Checkpoint
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from tfpreempt.storage.fsspec_store import FsspecStore

left, read = int(sys.argv[3]), FsspecStore.get
def get(self, name, target, **kwargs):
    global left
    if name.endswith("big"):
        with open(sys.argv[2], "a") as log:
            log.write(f"{kwargs['offset']}\\n")
        left -= 1
        if not left:
            target.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    return read(self, name, target, **kwargs)

FsspecStore.get = get
download_target._SMALLEST = download_target._LARGEST = 10_000
download.download.__kwdefaults__["threads"] = 1
handle = Checkpoint(sys.argv[4], DirFileSystem(sys.argv[1], LocalFileSystem()))
if len(sys.argv) > 5:
    print(handle.to_directory(sys.argv[5] or None))
    sys.exit()
with handle.as_directory() as path:
    print(path, flush=True)
    sys.stdin.read()
"""
RANGES = 10


class Readers:
    """Processes that read one checkpoint until the test ends them."""

    def __init__(self, tmp_path):
        self.root = str(tmp_path / "root")
        self.log = tmp_path / "log"
        self.cache = str(tmp_path / "cache" / f"tfpreempt-{os.getuid()}")
        self.environ = {**os.environ, cache.CACHE_VARIABLE: str(tmp_path / "cache")}
        self.environ["TMPDIR"] = str(tmp_path)
        self.name = put_commit(LocalStore(self.root), CONTENTS).name
        self.started = []

    def start(self, die_at=-1, to=None):
        """Starts a reader, or with `to` a copy to a directory ("": temporary)."""
        argv = [self.root, str(self.log), str(die_at), self.name]
        argv += [] if to is None else [str(to)]
        process = subprocess.Popen(
            [sys.executable, "-c", READER, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environ,
        )
        self.started.append(process)
        return process

    def fetched(self):
        return sorted(map(int, self.log.read_text().split()))

    def copies(self):
        return copies(self.cache)


@pytest.fixture
def readers(tmp_path):
    readers = Readers(tmp_path)
    yield readers
    for process in readers.started:
        process.kill()
        process.communicate(timeout=DEADLINE)


@pytest.mark.slow
def test_concurrent_processes_download_once(readers):
    processes = [readers.start() for _ in range(4)]
    paths = {process.stdout.readline().strip() for process in processes}
    assert len(paths) == 1
    assert pathlib.Path(*paths, "big").read_bytes() == CONTENTS["big"]
    assert readers.fetched() == [number * 10_000 for number in range(RANGES)]
    for left, process in enumerate(processes):
        assert os.path.isdir(*paths), left
        process.communicate("", timeout=DEADLINE)
    assert readers.copies() == []


@pytest.mark.slow
def test_the_copy_of_a_killed_reader_is_deleted_by_the_next(
    readers, tmp_path, monkeypatch
):
    killed = readers.start()
    path = killed.stdout.readline().strip()
    killed.kill()
    killed.communicate(timeout=DEADLINE)
    assert os.path.isdir(path)
    other = put_commit(LocalStore(str(tmp_path / "other")), {"other": b"1"})
    monkeypatch.setenv(cache.CACHE_VARIABLE, readers.environ[cache.CACHE_VARIABLE])
    files = DirFileSystem(str(tmp_path / "other"), LocalFileSystem())
    handle = Checkpoint(other.name, files)
    with handle.as_directory():
        assert not os.path.exists(path)
    assert readers.copies() == []


@pytest.mark.slow
def test_a_killed_download_is_resumed(readers):
    killed = readers.start(die_at=7)
    killed.communicate(timeout=DEADLINE)
    assert killed.returncode == -signal.SIGKILL
    assert [name.split(".")[1] for name in readers.copies()] == ["claim", "part"]
    assert readers.fetched() == [number * 10_000 for number in range(7)]
    process = readers.start()
    path = process.stdout.readline().strip()
    assert pathlib.Path(path, "big").read_bytes() == CONTENTS["big"]
    asked = sorted([*range(7), *range(6, RANGES)])
    assert readers.fetched() == [number * 10_000 for number in asked]
    process.communicate("", timeout=DEADLINE)
    assert readers.copies() == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "copy"])
def test_processes_that_copy_to_one_directory_download_once(readers, tmp_path, where):
    processes = [readers.start(to=where and tmp_path / where) for _ in range(4)]
    said = [process.communicate(timeout=DEADLINE)[0].strip() for process in processes]
    assert len(set(said)) == 1
    assert os.path.dirname(said[0]) == str(tmp_path)
    assert Checkpoint(said[0]).step == 7
    assert pathlib.Path(said[0], "big").read_bytes() == CONTENTS["big"]
    assert readers.fetched() == [number * 10_000 for number in range(RANGES)]


@pytest.mark.slow
def test_a_copy_of_a_killed_process_is_finished_by_one_that_waits(readers, tmp_path):
    killed = readers.start(die_at=7, to=tmp_path / "copy")
    killed.communicate(timeout=DEADLINE)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(errors.CheckpointError, match="no marker"):
        Checkpoint(tmp_path / "copy").get_metadata()
    others = [readers.start(to=tmp_path / "copy") for _ in range(3)]
    for process in others:
        process.communicate(timeout=DEADLINE)
    assert [process.returncode for process in others] == [0, 0, 0]
    assert Checkpoint(tmp_path / "copy").step == 7
    asked = sorted([*range(7), *range(6, RANGES)])
    assert readers.fetched() == [number * 10_000 for number in asked]
