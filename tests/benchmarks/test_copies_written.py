"""The bench of written bytes distinguishes a second copy from parts of the first."""

from __future__ import annotations

import pytest

from benchmarks.copies_written import row, second_copies
from benchmarks.preemption import Strike

MIB = 1 << 20


def strike(*files: str, written: tuple[int, int] = (2 * MIB, 2 * MIB)) -> Strike:
    """Returns a preemption with these files, and with shards and records."""
    return Strike(
        codes=(143, 143),
        seconds=1.0,
        gone=(1.0, 1.0),
        written=(written[0] + 2900, written[1] + 1400),
        journal=(),
        files={
            **dict.fromkeys(files, MIB),
            "7/worker-0000/rng.state": 2000,
            "7/worker-0001/rng.state": 1000,
        },
        journal_grown=(900, 400),
        trained=0.1,
    )


PARTS = [f"7/ckpt.data-{part:05d}-of-00003" for part in range(3)]


def test_the_parts_that_many_threads_wrote_are_one_copy() -> None:
    assert second_copies([strike(*PARTS)]) == []


@pytest.mark.parametrize(
    "copy",
    ["workertemp_1/ckpt-7.data-00000-of-00001", "8/ckpt.data-00000-of-00001"],
)
def test_a_second_copy_is_named(copy: str) -> None:
    assert second_copies([strike(*PARTS, copy)]) == [copy]


def test_a_row_meets_its_bar_by_one_copy_in_even_shares() -> None:
    theirs = [strike(written=(4 * MIB, 4 * MIB))]
    good = row([strike(*PARTS)], theirs, mebibytes=4)
    assert (good["ours"], good["theirs"], good["ok"]) == (1.0, 2.0, True)
    assert good["uneven"] == 1.0
    assert not row([strike(*PARTS, "8/ckpt.data-0")], theirs, mebibytes=4)["ok"]
    too_much = strike(*PARTS, written=(2 * MIB, 3 * MIB))
    assert not row([too_much], theirs, mebibytes=4)["ok"]
    by_the_chief = strike(*PARTS, written=(3 * MIB, MIB))
    assert not row([by_the_chief], theirs, mebibytes=4)["ok"]
