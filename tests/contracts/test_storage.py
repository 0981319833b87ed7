"""One contract for all object stores: real stores on real servers, and fakes."""

from __future__ import annotations

import io
import threading

import pytest

from tests.contracts.storage_places import PLACES
from tests.fakes.storage import FaultyObjectStore
from tfpreempt import errors
from tfpreempt.storage import checksum
from tfpreempt.storage.object_store import (
    MAX_PARTS,
    ComposingStore,
    ObjectNotFoundError,
    summed,
)

MIB = 1 << 20
LARGE = bytes(range(251)) * (20 * MIB // 251)  # more than any store's piece
ODD = ["a b/ü+%2F&=.bin", "x/%41", "#1?x=y", "c:d", "~", "a'b\"c", "x" * 200]


def rows(places):
    return [
        pytest.param(
            each,
            id=each.name,
            marks=[
                *[pytest.mark.slow] * each.has_server,
                *[pytest.mark.skip(each.missing)] * bool(each.missing),
            ],
        )
        for each in places
    ]


@pytest.fixture(params=rows(PLACES))
def place(request, storage_servers):
    expect(request.param.known.get(request.node.originalname), request)
    return request.param


@pytest.fixture
def store(place, tmp_path, monkeypatch):
    return place.opens(tmp_path, monkeypatch)


def put(store, name, data, **kwargs):
    return store.put_if_absent(name, io.BytesIO(data), **kwargs)


def get(store, name, **kwargs):
    target = io.BytesIO()
    assert store.get(name, target, **kwargs) == len(target.getvalue())
    return target.getvalue()


def expect(why, request):
    """Expects a known failure of a store; fails if the store passes."""
    if why:
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))


@pytest.mark.parametrize(
    "data",
    [b"", b"x", bytes(range(256)) * 5000, LARGE],
    ids=["nothing", "a byte", "1 MiB", "20 MiB"],
)
def test_a_stored_object_is_read_back(store, data):
    assert put(store, "a/b/c.bin", data)
    assert get(store, "a/b/c.bin") == data
    found = summed(store, "a/b/c.bin")
    assert (found.size, found.crc32c) == (len(data), checksum.of_bytes(data))


def test_the_first_put_wins(store, place, request):
    expect(place.not_first, request)
    assert put(store, "marker", b"first")
    assert not put(store, "marker", b"second")
    assert get(store, "marker") == b"first"


def test_the_first_of_large_puts_wins(store, place, request):
    expect(place.not_first, request)
    assert put(store, "large", LARGE)
    assert not put(store, "large", LARGE[::-1])
    assert summed(store, "large").crc32c == checksum.of_bytes(LARGE)


def test_of_racing_puts_exactly_one_wins(store, place):
    if place.not_exclusive:
        pytest.skip(place.not_exclusive)
    barrier, won = threading.Barrier(8), []

    def race(number):
        barrier.wait()
        if put(store, "marker", b"%d" % number):
            won.append(number)

    in_threads(race, 8)
    assert len(won) == 1
    assert get(store, "marker") == b"%d" % won[0]


def test_eight_threads_put_and_get_at_once(store):
    failures = []

    def work(number):
        try:
            data = bytes([number]) * (MIB + number)
            assert put(store, f"part/{number}", data)
            assert get(store, f"part/{number}") == data
        except BaseException as error:
            failures.append(error)

    in_threads(work, 8)
    assert failures == []
    assert len(list(store.list("part/"))) == 8


def in_threads(work, count):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 3), (2, 3), (2, None), (5, 100), (10, None), (10, 1), (25, 5), (0, 0)],
)
def test_ranges(store, offset, length):
    data = b"0123456789"
    put(store, "x", data)
    end = None if length is None else offset + length
    assert get(store, "x", offset=offset, length=length) == data[offset:end]


def test_a_range_across_pieces(store):
    put(store, "x", LARGE)
    start, length = 3 * MIB - 7, 10 * MIB + 13
    got = get(store, "x", offset=start, length=length)
    assert got == LARGE[start : start + length]


def test_bytes_are_written_at_the_position_of_the_target(store):
    put(store, "x", b"hello")
    target = io.BytesIO(b"0123456789")
    target.seek(2)
    store.get("x", target)
    assert target.getvalue() == b"01hello789"


def test_a_target_is_only_written_to(store):
    """A download writes bytes at their offset, and no store reads them back."""

    class Target:
        def write(self, data):
            found.append(data)
            return len(data)

    found = []
    put(store, "x", LARGE)
    assert store.get("x", Target(), offset=5) == len(LARGE) - 5
    assert b"".join(found) == LARGE[5:]


def test_stat_has_size_and_checksum(store):
    put(store, "x", b"hello")
    found = store.stat("x")
    assert found.size == 5
    assert found.crc32c in (None, checksum.of_bytes(b"hello"))
    assert summed(store, "x").crc32c == checksum.of_bytes(b"hello")
    assert summed(store, "y") is None


def test_replace(store):
    store.replace("checkpoint", b"first")
    assert get(store, "checkpoint") == b"first"
    store.replace("checkpoint", b"the second")
    assert get(store, "checkpoint") == b"the second"
    assert store.stat("checkpoint").size == len(b"the second")
    store.replace("below/a/folder", b"")
    assert get(store, "below/a/folder") == b""


def test_list_is_sorted_and_filtered(store):
    for name in ("b/2", "a", "b/1", "c/b/3", "b-1"):
        put(store, name, b"")
    assert list(store.list()) == ["a", "b-1", "b/1", "b/2", "c/b/3"]
    assert list(store.list("b/")) == ["b/1", "b/2"]
    assert list(store.list("b")) == ["b-1", "b/1", "b/2"]
    assert list(store.list("nothing")) == []


def test_folders(store):
    for name in ("5/x", "10/a/b", "5/y", "file", "5-/x", "10/z"):
        put(store, name, b"")
    assert sorted(store.folders()) == ["10", "5", "5-"]
    assert sorted(store.folders(timeout=60.0)) == ["10", "5", "5-"]


def test_more_objects_and_folders_than_a_page_has(store):
    names = [f"{i:02}/x" for i in range(10)] + [f"f{i}" for i in range(10)]
    for name in reversed(names):
        put(store, name, b"")
    assert list(store.list()) == names
    assert sorted(store.folders()) == [f"{i:02}" for i in range(10)]


def test_an_empty_store(store):
    assert list(store.list()) == []
    assert list(store.folders()) == []


def test_what_is_missing(store):
    assert store.stat("nothing") is None
    store.delete("nothing")
    put(store, "there/x", b"")
    for name in ("nothing", "there", "there/x/below"):
        assert store.stat(name) is None
        with pytest.raises(ObjectNotFoundError, match=name):
            get(store, name)


def test_a_folder_disappears_with_its_last_object(store):
    put(store, "a/b/1", b"x")
    put(store, "a/2", b"x")
    store.delete("a/b/1")
    assert list(store.folders()) == ["a"]
    store.delete("a/2")
    assert list(store.folders()) == []
    assert put(store, "a/b/1", b"x")


def test_delete(store):
    put(store, "x", b"1")
    put(store, "y/z", b"1")
    store.delete("x")
    assert store.stat("x") is None
    assert list(store.list()) == ["y/z"]
    store.delete("x")
    assert list(store.list()) == ["y/z"]


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a//b", "a/./b", "a\0b", "a\\b", "a/", "x\n"]
)
def test_hostile_names_are_refused(store, name):
    for act in (
        lambda: put(store, name, b""),
        lambda: store.replace(name, b""),
        lambda: get(store, name),
        lambda: store.stat(name),
        lambda: store.delete(name),
    ):
        with pytest.raises(errors.ConfigurationError, match="Object name"):
            act()


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_kept(store, name):
    assert put(store, name, b"1")
    assert get(store, name) == b"1"
    assert list(store.list()) == [name]
    assert store.stat(name).size == 1
    store.delete(name)
    assert list(store.list()) == []


class Failing(io.BytesIO):
    """A file whose reading fails at some byte."""

    def __init__(self, data, at, error):
        super().__init__(data)
        self.at, self.error = at, error

    def read(self, size=-1):
        if self.tell() >= self.at:
            raise self.error
        return super().read(size)


@pytest.mark.parametrize(
    "error", [KeyError("mine"), OSError(5, "mine"), ConnectionError("mine")], ids=repr
)
@pytest.mark.parametrize("at", [0, 12 * MIB])
def test_an_error_of_the_source_ends_the_put(store, error, at):
    with pytest.raises(type(error)) as caught:
        store.put_if_absent("x", Failing(LARGE, at, error))
    assert caught.value is error
    assert store.stat("x") is None
    assert list(store.list()) == []
    assert put(store, "x", b"again")


class Dripping(io.BytesIO):
    """A file that returns fewer bytes than requested."""

    def read(self, size=-1):
        return super().read(min(size, 300_000) if size > 0 else size)


def test_a_source_that_reads_short(store):
    assert store.put_if_absent("x", Dripping(LARGE))
    assert get(store, "x") == LARGE


def test_memory_is_bounded(store):
    """However large the object, no more than a piece of it is asked for at a time."""
    sizes = []

    class Counting(io.BytesIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

        def write(self, data):
            sizes.append(len(data))
            return super().write(data)

    assert store.put_if_absent("x", Counting(LARGE))
    target = Counting()
    store.get("x", target)
    assert target.getvalue() == LARGE
    assert min(sizes) >= 0
    assert max(sizes) <= 8 * MIB


def test_an_error_of_the_target_is_raised(store):
    class Full(io.BytesIO):
        def write(self, data):
            raise error

    error = OSError(28, "No space left on device")
    put(store, "x", b"hello")
    with pytest.raises(OSError, match="No space") as caught:
        store.get("x", Full())
    assert caught.value is error


def test_a_time_that_suffices_changes_nothing(store):
    assert put(store, "x", LARGE, timeout=60)
    assert get(store, "x", timeout=60) == LARGE
    store.replace("y", b"1", timeout=60)
    assert store.stat("y", timeout=60).size == 1
    store.delete("y", timeout=60)
    assert store.stat("y") is None


# --- stores that make one object of others -------------------------------------------


@pytest.fixture
def composer(store):
    assert isinstance(store, ComposingStore)
    return store


on_those_that_compose = pytest.mark.parametrize(
    "place", rows(each for each in PLACES if each.composes), indirect=True
)


def put_parts(store, *contents):
    names = [f"parts/{number:03}" for number in range(len(contents))]
    for name, data in zip(names, contents, strict=True):
        assert put(store, name, data)
    return names


def test_which_places_compose(place, store):
    assert isinstance(store, ComposingStore) == place.composes


@on_those_that_compose
@pytest.mark.parametrize(
    "contents",
    [(b"one",), (b"one, ", b"", b"two"), (LARGE, b"x", LARGE[::-1]), (b"", b"")],
    ids=["of one", "of three", "of large ones", "of nothing"],
)
def test_an_object_of_others(composer, contents):
    names = put_parts(composer, *contents)
    whole = b"".join(contents)
    assert composer.compose("a/whole", names)
    assert get(composer, "a/whole") == whole
    found = summed(composer, "a/whole")
    assert (found.size, found.crc32c) == (len(whole), checksum.of_bytes(whole))
    assert list(composer.list()) == ["a/whole", *names]  # they stay
    assert get(composer, names[0]) == contents[0]


@on_those_that_compose
def test_a_range_across_the_objects_of_which_one_is_made(composer):
    names = put_parts(composer, b"012", b"345", b"678")
    composer.compose("x", names)
    assert get(composer, "x", offset=2, length=5) == b"23456"
    assert get(composer, "x", offset=4) == b"45678"


@on_those_that_compose
def test_as_many_as_there_may_be_in_the_order_that_is_asked_for(composer):
    contents = [b"%d," % number for number in range(MAX_PARTS)]
    names = put_parts(composer, *contents)
    assert composer.compose("x", names[::-1])
    assert get(composer, "x") == b"".join(contents[::-1])


@on_those_that_compose
def test_one_object_twice_and_one_that_was_composed(composer):
    (name,) = put_parts(composer, b"ab")
    assert composer.compose("x", [name, name])
    assert composer.compose("y", ["x", name])
    assert get(composer, "y") == b"ababab"


@on_those_that_compose
def test_the_second_composer_does_not_replace_the_object(composer, place, request):
    expect(place.not_first, request)
    first, second = put_parts(composer, b"first", b"second")
    assert composer.compose("x", [first])
    assert not composer.compose("x", [second])
    assert not put(composer, "x", b"third")
    assert get(composer, "x") == b"first"


@on_those_that_compose
def test_of_racing_composers_exactly_one_wins(composer, place):
    if place.not_exclusive:
        pytest.skip(place.not_exclusive)
    names = put_parts(composer, *(b"%d" % number for number in range(8)))
    barrier, won = threading.Barrier(8), []

    def race(number):
        barrier.wait()
        if composer.compose("x", [names[number]]):
            won.append(number)

    in_threads(race, 8)
    assert len(won) == 1
    assert get(composer, "x") == b"%d" % won[0]


@on_those_that_compose
def test_an_object_of_one_that_is_missing(composer):
    (name,) = put_parts(composer, b"there")
    with pytest.raises(ObjectNotFoundError):
        composer.compose("x", [name, "parts/nothing"])
    assert composer.stat("x") is None


@on_those_that_compose
@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_composed(composer, name):
    assert put(composer, name, b"1")
    assert composer.compose(f"{name}.whole", [name, name])
    assert get(composer, f"{name}.whole") == b"11"


@on_those_that_compose
def test_hostile_names_are_not_composed(composer):
    (name,) = put_parts(composer, b"x")
    for whole, part in (("../x", name), ("x", "a//b")):
        with pytest.raises(errors.ConfigurationError, match="Object name"):
            composer.compose(whole, [part])


@on_those_that_compose
def test_a_time_that_suffices_to_compose(composer):
    names = put_parts(composer, b"a", b"b")
    assert composer.compose("x", names, timeout=60)
    assert get(composer, "x") == b"ab"


def test_the_fake_fails_as_requested():
    store = FaultyObjectStore({1: OSError("cut")})
    put(store, "a", b"1")
    with pytest.raises(OSError, match="cut"):
        put(store, "b", b"2")
    assert put(store, "b", b"2")
    assert store.operations[1] == ("put_if_absent", "b")
