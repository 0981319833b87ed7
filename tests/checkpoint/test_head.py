"""The head of a directory: which commits a run may publish on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.head import NONE, Head, this_process
from tfpreempt.checkpoint.directory.manifest import Parent, from_json, to_json


def commit(token: str, sequence: int, *, mine: bool = False) -> Any:
    process = this_process() if mine else "another"
    manifest = SimpleNamespace(metadata={"process": process})
    return SimpleNamespace(
        token=token, sequence=sequence, saved_at=0.0, manifest=manifest
    )


BEFORE = [commit("a", 1)]
LATER = {
    "nothing came": (BEFORE, False),
    "the commit was deleted": ([], False),
    "a commit of this process": ([*BEFORE, commit("b", 2, mine=True)], False),
    "a commit of another run": ([*BEFORE, commit("b", 2)], True),
    "above a commit of this process": (
        [commit("b", 2, mine=True), commit("c", 3)],
        True,
    ),
    "another commit of the same sequence": ([commit("b", 1)], True),
    "an older commit that could not be read before": ([commit("z", 0)], False),
}


class Lease:
    """A lease that is acquired again with another token."""

    def __init__(self, token: str | None = "lease 1") -> None:
        self.token = token

    def lose_to_another_run(self) -> NoReturn:
        raise errors.LeaseLostError("another run")

    check: Any = None
    moving: Any = None


@pytest.mark.parametrize("name", LATER)
def test_a_run_publishes_on_no_commit_that_another_run_made_since(name: str) -> None:
    found, has_moved = LATER[name]
    head, lease = Head(), Lease()
    head.follow(BEFORE, lease)
    assert head.has_moved(found) == has_moved
    lease.token = None  # released, so the lease does not count
    head.follow(found, lease)
    assert head.has_moved(found) == has_moved
    lease.token = "lease 2"
    if has_moved:
        with pytest.raises(errors.LeaseLostError):
            head.follow(found, lease)
    else:
        head.follow(found, lease)


def test_commits_under_the_lease_belong_to_this_run() -> None:
    head, lease = Head(), Lease()
    head.follow([], lease)
    head.follow([commit("fetched", 7)], lease)
    lease.token = "lease 2"
    head.follow([commit("fetched", 7)], lease)


def test_before_the_first_look_nothing_has_moved() -> None:
    head = Head()
    assert not head.has_moved([commit("a", 1)])
    head.follow([commit("a", 1)], Lease())  # to load a State takes no lease
    assert not head.has_moved([commit("a", 1)])
    assert head.has_moved([commit("b", 2)])


def test_each_manifest_names_its_parent(tmp_path: Any) -> None:
    for step in (1, 2, 3):
        save(open_directory(tmp_path, OwnContents(), max_to_keep=None), step)
    third, second, first = catalog.scan(str(tmp_path))
    parents = [entry.manifest.parent for entry in (first, second, third)]
    assert parents == [
        NONE,
        Parent(token=first.token, sequence=1),
        Parent(token=second.token, sequence=2),
    ]


@pytest.mark.parametrize(
    "parent", [3, [], {}, {"token": 1, "sequence": 1}, {"token": "a", "sequence": -1}]
)
def test_a_parent_that_is_none_is_corrupt(tmp_path: Any, parent: object) -> None:
    save(open_directory(tmp_path, OwnContents()), 1)
    [entry] = catalog.scan(str(tmp_path))
    record = json.loads(to_json(entry.manifest))
    assert from_json(json.dumps(record).encode(), "x") == entry.manifest
    del record["parent"]  # as an earlier version wrote it
    assert from_json(json.dumps(record).encode(), "x").parent is None
    record["parent"] = parent
    with pytest.raises(errors.CheckpointCorruptedError, match="parent"):
        from_json(json.dumps(record).encode(), "x")
