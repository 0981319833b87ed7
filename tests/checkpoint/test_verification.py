"""Every byte of a commit is read, by many threads, and nothing that isn't there."""

from __future__ import annotations

import io
import os
import random
import threading

import pytest

from tests.fakes.storage import FaultyObjectStore, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.directory.manifest import FileEntry, Manifest
from tfpreempt.checkpoint.restore import verification
from tfpreempt.storage import checksum
from tfpreempt.storage.local import LocalStore

DATA = {"a/x.bin": b"x" * 3000, "a/empty": b"", "b.bin": bytes(range(256)) * 40}


def entry(name, data):
    return FileEntry(name=name, size=len(data), crc32c=checksum.of_bytes(data))


ENTRIES = [entry(name, data) for name, data in DATA.items()]


def commit(store, name, files):
    """Returns the catalog's entry of files below a name."""
    manifest = Manifest(
        step=1, sequence=1, world_size=1, workers=(), files=tuple(files)
    )
    return Entry(store=store, name=name, kind=Kind.OWN, manifest=manifest)


def faults(store, name, files, every_byte=True, **kwargs):
    found = commit(store, name, files)
    wrong = verification.faults(found, every_byte=every_byte, **kwargs)
    return list(wrong.values())


@pytest.fixture(params=["directory", "store"])
def filled(request, tmp_path):
    """A store with the data below `5/`, by the reader of directories and of stores."""
    is_directory = request.param == "directory"
    store = LocalStore(str(tmp_path)) if is_directory else FaultyObjectStore()
    for name, data in DATA.items():
        store.put_if_absent(f"5/{name}", io.BytesIO(data))
    return LocalStore(str(tmp_path)) if is_directory else store


def test_ranges_are_combined():
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(200):
        data = chance.randbytes(chance.randrange(300))
        cut = chance.randint(0, len(data))
        first, second = data[:cut], data[cut:]
        assert checksum.joined(
            checksum.of_bytes(first), checksum.of_bytes(second), len(second)
        ) == checksum.of_bytes(data)
    zeros = checksum.of_bytes(bytes(1 << 20))
    assert checksum.extended(7, bytes(1 << 20)) == checksum.joined(7, zeros, 1 << 20)


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 30])
@pytest.mark.parametrize("threads", [1, 5])
def test_whole_files_have_no_faults(filled, monkeypatch, size, threads):
    monkeypatch.setattr(verification, "_RANGE", size * 10)
    seen = []
    watched = {"threads": threads, "watch": seen.append}
    assert faults(filled, "5", ENTRIES, **watched) == []
    assert seen[-1] == sum(map(len, DATA.values()))
    assert faults(filled, "5", ENTRIES, every_byte=False) == []


def test_missing_short_and_corrupt_files_are_named(filled):
    wrong = [
        entry("a/x.bin", b"y" * 3000),
        entry("b.bin", b"short"),
        entry("gone.bin", b""),
    ]
    other, short, missing = faults(filled, "5", wrong)
    assert f"'5/a/x.bin' has crc32c {ENTRIES[0].crc32c:08x}" in other
    assert "'5/b.bin' has 10240 bytes; expected 5" in short
    assert "'5/gone.bin' is missing" in missing


def test_a_clouds_own_checksum_is_believed_when_it_disagrees():
    store = FaultyObjectStore()
    store.put_if_absent("b.bin", io.BytesIO(b"four"))
    (fault,) = faults(store, "", [entry("b.bin", b"more")], every_byte=False)
    assert "crc32c" in fault
    assert [operation for operation, _ in store.operations[1:]] == ["stat"]


def test_a_manifest_that_claims_terabytes_costs_nothing(filled):
    huge = FileEntry(name="b.bin", size=10 << 40, crc32c=0)
    seen = []
    (fault,) = faults(filled, "5", [huge], watch=seen.append)
    assert "10995116277760" in fault
    assert max(seen) == 0


def test_one_flipped_bit_in_any_range(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_RANGE", 64)
    data = random.Random(3).randbytes(500)
    (tmp_path / "f").write_bytes(data)
    for offset in (0, 63, 64, 300, 499):
        damage(str(tmp_path / "f"), offset=offset)
        (fault,) = faults(LocalStore(str(tmp_path)), "", [entry("f", data)])
        assert fault.startswith("'f' has crc32c")
        damage(str(tmp_path / "f"), offset=offset)


def test_a_store_that_cannot_be_reached_is_no_damage():
    store = FaultyObjectStore({1: errors.CheckpointError("503, tried for 60 s")})
    store.put_if_absent("f", io.BytesIO(b"x"))
    with pytest.raises(errors.CheckpointError, match="503"):
        faults(store, "", [entry("f", b"x")])


def test_an_error_of_watch_ends_the_work_despite_a_stuck_thread():
    release = threading.Event()

    class Stuck(FaultyObjectStore):
        def get(self, name, target, **kwargs):
            release.wait(60)
            return super().get(name, target, **kwargs)

    def interrupt(done):
        if stuck:
            raise KeyboardInterrupt

    store, stuck = Stuck(), []
    store.put_if_absent("f", io.BytesIO(b"x"))
    files = [entry("f", b"x")]
    assert faults(store, "", files, every_byte=False, watch=interrupt) == []
    stuck.append(True)
    with pytest.raises(KeyboardInterrupt):
        faults(store, "", files, watch=interrupt)
    release.set()


# --- a directory that anybody may have written to ------------------------------------


def make_odd(path, kind):
    if kind == "link":
        os.symlink("/etc/hostname", path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_path_that_is_no_regular_file_is_a_fault(tmp_path, kind):
    make_odd(tmp_path / "f", kind)
    (fault,) = faults(LocalStore(str(tmp_path)), "", [entry("f", b"")])
    said = {
        "link": "a symbolic link",
        "pipe": "not a regular file",
        "folder": "is missing",
    }
    assert said[kind] in fault


def test_a_folder_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "f").write_bytes(b"x")
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "outside", tmp_path / "root" / "states")
    store = LocalStore(str(tmp_path / "root"))
    (fault,) = faults(store, "", [entry("states/f", b"x")])
    assert "links are not followed" in fault
    assert list(store.folders()) == []
    assert list(store.list("states/")) == []
    assert list(store.list()) == ["states"]
