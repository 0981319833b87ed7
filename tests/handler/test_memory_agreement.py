"""All workers restore the same snapshot, or none: two workers in threads."""

from __future__ import annotations

import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.fakes import cluster
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.handler.restore_agreement import Agreed, agree_on_snapshot

SECONDS = 10.0


class Memory:
    """The snapshots of a worker, newest first; `damaged` ones fail the verification."""

    def __init__(self, *attempts: str, damaged: Collection[str] = ()) -> None:
        self.attempts = attempts
        self.damaged = damaged

    def missing(self, attempts: Collection[str]) -> list[str]:
        whole = set(self.attempts) - set(self.damaged)
        return [each for each in attempts if each not in whole]

    def find(self) -> list[Any]:
        return [
            SimpleNamespace(manifest=SimpleNamespace(metadata={"attempt": each}))
            for each in self.attempts
        ]


def agree(chief: Memory, other: Memory | None) -> list[Agreed]:
    """Returns the agreed snapshot of both workers, each in a thread."""
    store = InMemoryStore()
    agreed: dict[int, Agreed] = {}

    def choose(worker: int, memory: Any) -> None:
        directory: Any = SimpleNamespace(path="/ckpt")
        before = Agreed(
            directory=directory, candidate=None, token="token", snapshots=memory
        )
        agreed[worker] = agree_on_snapshot(
            before, chief.attempts, store, "memory", cluster(worker, 2), SECONDS
        )

    threads = [
        threading.Thread(target=choose, args=each) for each in enumerate((chief, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return [agreed[0], agreed[1]]


def restored(agreed: Agreed) -> str | None:
    found: Any = agreed.candidate
    assert (found is not None) == (agreed.tier == "memory")
    return None if found is None else str(found.manifest.metadata["attempt"])


@pytest.mark.parametrize(
    ("chief", "other", "expected"),
    [
        (Memory("b", "a"), Memory("b", "a"), "b"),
        (Memory("b", "a"), Memory("a"), "a"),
        (Memory("a"), Memory("b", "a"), "a"),
        (Memory("b", "a"), Memory("b", "a", damaged="b"), "a"),
        (Memory("b", "a", damaged="b"), Memory("b", "a"), "a"),
        (Memory("b", "a", damaged="a"), Memory("b", "a", damaged="b"), None),
        (Memory("b"), Memory("a"), None),
        (Memory("b", "a"), Memory(), None),  # another machine, say
        (Memory(), Memory("b", "a"), None),
    ],
)
def test_the_newest_snapshot_intact_on_all_workers(
    chief: Memory, other: Memory, expected: str | None
) -> None:
    starts = agree(chief, other)
    assert [restored(each) for each in starts] == [expected] * 2
    assert all(each.snapshots is not None for each in starts)


def test_without_memory_of_one_worker_there_are_no_snapshots() -> None:
    starts = agree(Memory("b", "a"), None)
    assert [restored(each) for each in starts] == [None, None]
    assert [each.snapshots for each in starts] == [None, None]


def test_no_worker_restores_snapshots_that_one_cannot_verify(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The check of a State may raise any error, and the others wait for an answer."""

    class Failing(Memory):
        def missing(self, attempts: Collection[str]) -> list[str]:
            raise ValueError("of a State")

    starts = agree(Memory("b", "a"), Failing("b", "a"))
    assert [restored(each) for each in starts] == [None, None]
    assert "ValueError: of a State" in caplog.text
