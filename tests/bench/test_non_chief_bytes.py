"""The bench of what other workers write tells a second copy from parts of the first."""

from __future__ import annotations

import pytest

from tests.bench.non_chief_bytes import payload_files, row
from tests.bench.preemption import Strike


def strike(*files: str, written: int = 1500) -> Strike:
    """A preemption that left these files; worker 1 wrote a shard of 1,000 bytes."""
    return Strike(
        codes=(143, 143),
        seconds=1.0,
        gone=(1.0, 1.0),
        written=(10**9, written),
        journal=(),
        files={**dict.fromkeys(files, 10**9), "7/worker-0001/rng.state": 1000},
        journal_grown=(900, 400),
    )


PARTS = [f"7/ckpt.data-{part:05d}-of-00003" for part in range(3)]


def test_the_parts_that_the_chiefs_threads_wrote_are_one_copy() -> None:
    assert payload_files([strike(*PARTS)]) == []


@pytest.mark.parametrize(
    "copy",
    ["workertemp_1/ckpt-7.data-00000-of-00001", "8/ckpt.data-00000-of-00001"],
)
def test_a_second_copy_is_named(copy: str) -> None:
    assert payload_files([strike(*PARTS, copy)]) == [copy]


def test_a_row_meets_its_bar_only_without_a_second_copy() -> None:
    theirs = [strike(written=10**9)]
    good = row([strike(*PARTS)], theirs, mebibytes=512)
    assert (good["ours"], good["theirs"], good["ok"]) == (500, 10**9, True)
    assert (good["journal_and_log"], good["unexplained"]) == (400, 100)
    assert not row([strike(*PARTS, "8/ckpt.data-0")], theirs, mebibytes=512)["ok"]
    assert not row([strike(*PARTS, written=9000)], theirs, mebibytes=512)["ok"]
