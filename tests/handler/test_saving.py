"""Saves without agreement: two workers on one store, in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tfpreempt.coordination.memory import MemoryStore
from tfpreempt.coordination.runtime import Runtime
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit
from tfpreempt.errors import SaveError
from tfpreempt.handler.saving import CollectiveSaves

SECONDS = 5.0


class Member:
    """One that only remembers what it was asked."""

    token = "token"
    step = 1

    def __init__(self) -> None:
        self.commits = self
        self.staged: list[str] = []
        self.present: list[Sequence[int]] = []
        self.discarded = 0

    def stage(self, name: str) -> str:
        self.staged.append(name)
        return name

    def commit(self, staged: Any, because: str, workers: Sequence[int]) -> Commit:
        self.present.append(tuple(workers))
        return Commit(
            step=1,
            path=staged,
            sequence=1,
            world_size=2,
            save_seconds=0.0,
            bytes=0,
            because=because,
        )

    def discard(self, staged: Any) -> None:
        self.discarded += 1


@pytest.fixture
def pair() -> list[CollectiveSaves]:
    store = MemoryStore()
    return [
        CollectiveSaves(
            Cluster(worker=worker, jobs=(("worker", 2),)),
            "test",
            Runtime(store, SystemClock(), lambda error: None, deaths_every=60.0),
        )
        for worker in range(2)
    ]


def save_both(pair: list[CollectiveSaves], name: str) -> Member:
    return save_these(pair, name, Member(), Member())


def save_these(
    pair: list[CollectiveSaves], name: str, chief: Member, other: Member
) -> Member:
    thread = threading.Thread(
        target=lambda: pair[1].save(other, name, "save", SECONDS, other.stage)  # type: ignore[arg-type]
    )
    thread.start()
    pair[0].save(chief, name, "save", SECONDS, chief.stage)  # type: ignore[arg-type]
    thread.join(SECONDS)
    assert other.staged[-1] == name
    return chief


def test_both_parts_make_the_commit(pair: list[CollectiveSaves]) -> None:
    assert save_both(pair, "save-1").present == [(0, 1)]


def test_a_worker_that_is_through_is_not_waited_for(
    pair: list[CollectiveSaves],
) -> None:
    pair[1].finishing()
    chief = Member()
    commit = pair[0].save(chief, "periodic-3", "periodic", 60.0, chief.stage)  # type: ignore[arg-type]
    assert commit is not None
    assert chief.present == [(0,)]


def test_the_next_fit_needs_it_again(pair: list[CollectiveSaves]) -> None:
    for saves in pair:
        saves.finishing()
    assert save_both(pair, "save-1").present == [(0, 1)]


def test_a_part_of_another_save_does_not_pass_for_this_one(
    pair: list[CollectiveSaves],
) -> None:
    other = Member()
    pair[1].save(other, "periodic-20", "periodic", SECONDS, other.stage)  # type: ignore[arg-type]
    chief = Member()
    with pytest.raises(SaveError, match=r"worker\(s\) \[1\]"):
        pair[0].save(chief, "periodic-30", "periodic", 0.1, chief.stage)  # type: ignore[arg-type]
    assert chief.discarded == 1
    assert chief.present == []


def test_the_last_state_is_committed_with_whoever_is_there(
    pair: list[CollectiveSaves],
) -> None:
    chief = Member()
    pair[0].save(chief, "finished-1", "finished", 0.1, chief.stage)  # type: ignore[arg-type]
    assert chief.present == [(0,)]


def test_all_know_whether_the_newest_save_stands(pair: list[CollectiveSaves]) -> None:
    """A notice at its step is served by it; at another step it is not."""
    chief, other = Member(), Member()

    def stands() -> list[bool]:
        return [
            saves.stands(member, SECONDS)  # type: ignore[arg-type]
            for saves, member in zip(pair, (chief, other), strict=True)
        ]

    assert stands() == [False, False]
    save_these(pair, "save-1", chief, other)
    assert stands() == [True, True]
    chief.step = other.step = 2
    assert stands() == [False, False]


def test_a_save_that_failed_on_the_chief_stands_nowhere(
    pair: list[CollectiveSaves],
) -> None:
    chief, other = Member(), Member()

    def fail(*args: Any) -> None:
        raise SaveError("no room")

    chief.commit = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(SaveError):
        save_these(pair, "save-1", chief, other)
    assert not pair[0].stands(chief, SECONDS)  # type: ignore[arg-type]
    assert not pair[1].stands(other, SECONDS)  # type: ignore[arg-type]
