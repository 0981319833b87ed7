"""One contract, all object stores: the real ones and the fake."""

from __future__ import annotations

import io
import threading

import pytest

from tfpreempt import errors
from tfpreempt.checkpoint import checksum
from tfpreempt.checkpoint.storage.interface import ObjectMissingError
from tfpreempt.checkpoint.storage.local import LocalStore
from tfpreempt.testing.storage import FaultyStore


@pytest.fixture(params=["local", "faulty"])
def store(request, tmp_path):
    if request.param == "local":
        return LocalStore(str(tmp_path / "root"))
    return FaultyStore()


def put(store, name, data):
    return store.put_if_absent(name, io.BytesIO(data))


def get(store, name):
    target = io.BytesIO()
    store.get(name, target)
    return target.getvalue()


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_what_was_put_comes_back(store, data):
    assert put(store, "a/b/c.bin", data)
    assert get(store, "a/b/c.bin") == data


def test_the_first_put_wins(store):
    assert put(store, "marker", b"first")
    assert not put(store, "marker", b"second")
    assert get(store, "marker") == b"first"


def test_of_racing_puts_exactly_one_wins(store):
    barrier, won = threading.Barrier(8), []

    def race(number):
        barrier.wait()
        if put(store, "marker", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert get(store, "marker") == b"%d" % won[0]


def test_stat_has_size_and_checksum(store):
    put(store, "x", b"hello")
    found = store.stat("x")
    assert (found.name, found.size) == ("x", 5)
    assert found.crc32c == checksum.of_bytes(b"hello")


def test_an_object_put_anew_has_another_generation(store):
    put(store, "x", b"hello")
    before = store.stat("x").generation
    assert store.stat("x").generation == before
    store.delete("x")
    put(store, "y", b"takes the old inode")
    put(store, "x", b"hello")
    assert store.stat("x").generation != before


def test_list_is_sorted_and_filtered(store):
    for name in ("b/2", "a", "b/1", "c/b/3"):
        put(store, name, b"")
    assert list(store.list()) == ["a", "b/1", "b/2", "c/b/3"]
    assert list(store.list("b/")) == ["b/1", "b/2"]


def test_what_is_missing(store):
    assert store.stat("nothing") is None
    assert store.delete("nothing") is False
    with pytest.raises(ObjectMissingError, match="nothing"):
        get(store, "nothing")


def test_delete(store):
    put(store, "x", b"1")
    assert store.delete("x") is True
    assert store.stat("x") is None
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a//b", "a\0b", "a\\b"])
def test_hostile_names_are_refused(store, name):
    with pytest.raises(errors.ConfigurationError, match="Object name"):
        put(store, name, b"")


def test_the_fake_fails_where_it_is_told():
    store = FaultyStore({1: OSError("cut")})
    put(store, "a", b"1")
    with pytest.raises(OSError, match="cut"):
        put(store, "b", b"2")
    assert put(store, "b", b"2")
    assert store.operations[1] == ("put_if_absent", "b")
