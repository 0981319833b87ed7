"""Possible and required remains of a recorded run after a power loss."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest

from campaigns.power import CHIEF, ROOT, Crash, Step

pytestmark = pytest.mark.slow  # searches long

DISK, FILE, OTHER = 1, 2, 3
TIMES = 200


def holds(number: int, data: bytes, worker: int = CHIEF) -> Step:
    return ["data", number, base64.b64encode(data).decode(), 0, worker]


def synced(number: int, worker: int = CHIEF) -> Step:
    return ["sync", number, worker]


def left(tmp_path: Path, *steps: Step) -> set[tuple[tuple[str, bytes], ...]]:
    """Returns all possible remains after these steps, by name and content."""
    begin: list[Step] = [["entry", ROOT, "ckpt", DISK, True], synced(ROOT)]
    found = set()
    for seed in range(TIMES):
        Crash(steps=[*begin, *steps], rng=random.Random(seed)).rebuild(tmp_path)
        files = sorted((tmp_path / "ckpt").rglob("*"))
        found.add(
            tuple((path.name, path.read_bytes()) for path in files if path.is_file())
        )
    return found


NEW: list[Step] = [["entry", DISK, "new", FILE, False], holds(FILE, b"12")]
MOVE: Step = ["moved", DISK, "new", DISK, "name", FILE, False]


def test_unsynced_data_are_lost_or_partly_present(tmp_path: Path) -> None:
    contents = (b"", b"1", b"12", b"1\0", b"\0\0")
    assert left(tmp_path, *NEW) == {(), *((("new", each),) for each in contents)}


def test_a_synced_file_without_a_synced_name_is_whole_or_lost(tmp_path: Path) -> None:
    assert left(tmp_path, *NEW, synced(FILE)) == {(), (("new", b"12"),)}


def test_synced_data_are_present(tmp_path: Path) -> None:
    steps = [*NEW, synced(FILE), synced(DISK)]
    assert left(tmp_path, *steps) == {(("new", b"12"),)}


def test_a_move_is_done_or_not(tmp_path: Path) -> None:
    steps = [*NEW, synced(FILE), synced(DISK), MOVE]
    assert left(tmp_path, *steps) == {(("new", b"12"),), (("name", b"12"),)}


def test_a_move_may_be_durable_before_the_moved_data(tmp_path: Path) -> None:
    """The well-known file of no bytes, where one is moved over another too soon."""
    old: list[Step] = [["entry", DISK, "name", OTHER, False], holds(OTHER, b"old")]
    old += [synced(OTHER), synced(DISK)]
    found = left(tmp_path, *old, *NEW, MOVE, synced(DISK))
    assert {name for files in found for name, _ in files} == {"name"}
    assert (("name", b""),) in found


def test_a_file_moved_twice_has_one_path(tmp_path: Path) -> None:
    steps = [*NEW, synced(FILE), synced(DISK), MOVE]
    again: Step = ["moved", DISK, "name", DISK, "last", FILE, False]
    names = [[name for name, _ in files] for files in left(tmp_path, *steps, again)]
    assert sorted(names) == [["last"], ["name"], ["new"]]


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_moved_folder_includes_its_files(tmp_path: Path, is_synced: bool) -> None:
    steps: list[Step] = [
        ["entry", DISK, "folder", OTHER, True],
        ["entry", OTHER, "file", FILE, False],
        holds(FILE, b"12"),
        synced(FILE),
        synced(OTHER),
    ]
    found = left(tmp_path, *steps, *([synced(DISK)] if is_synced else []))
    assert found == {(("file", b"12"),)} | (set() if is_synced else {()})


def test_only_the_writer_of_a_file_syncs_its_data(tmp_path: Path) -> None:
    for steps, is_whole in (
        ([synced(FILE, 1)], True),
        ([synced(FILE, 0)], False),
        ([holds(FILE, b"123", 0), synced(FILE, 1)], False),
        ([holds(FILE, b"123", 0), synced(FILE, 0)], True),
    ):
        new: Step = ["entry", DISK, "new", FILE, False]
        found = left(tmp_path, new, holds(FILE, b"12", 1), *steps, synced(DISK))
        assert (len(found) == 1) == is_whole, (steps, found)


def test_a_sync_of_a_directory_syncs_every_name(tmp_path: Path) -> None:
    new: Step = ["entry", DISK, "new", FILE, False]
    steps = [new, holds(FILE, b"12", 1), synced(FILE, 1), synced(DISK, 0)]
    assert left(tmp_path, *steps) == {(("new", b"12"),)}
