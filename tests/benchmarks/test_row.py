"""A row has both sides' median and p95, the bar, and the circumstances."""

from __future__ import annotations

import json

import pytest

from benchmarks.row import FEW, alone, circumstances, compare


def test_two_sides_are_compared_by_their_medians() -> None:
    row = compare(
        "b", [1, 2, 9], [4, 4, 6], unit="s", bar=0.5, raw=[1, 1, 1], place="x"
    )
    assert (row["ours"], row["theirs"], row["raw"]) == (2, 4, 1)
    assert (row["ours_p95"], row["theirs_p95"]) == (8.3, 5.8)
    assert (row["ratio"], row["ratio_of_pairs"]) == (0.5, 0.5)
    assert (row["bar"], row["bar_of"], row["ok"]) == (0.5, "ratio", True)
    assert row["ours_all"] == [1, 2, 9]
    assert row["place"] == "x"
    assert not compare("b", [3], [4], unit="s", bar=0.5)["ok"]


def test_a_row_that_is_there_to_compare_has_no_bar() -> None:
    row = compare("b", [1], [4], unit="s", bar=None)
    assert not {"bar", "bar_of", "ok", "raw"} & set(row)


@pytest.mark.parametrize(("bar_of", "is_met"), [("ours", True), ("ours_p95", False)])
def test_a_bar_is_for_the_field_that_it_names(bar_of: str, is_met: bool) -> None:
    row = alone("b", [0.01] * 9 + [0.9], unit="s", bar=0.1, bar_of=bar_of)
    assert (row["bar_of"], row["ok"]) == (bar_of, is_met)


def test_many_samples_are_counted_and_not_listed() -> None:
    row = alone("b", [1.0] * (FEW + 1), unit="s", bar=1)
    assert row["ours_samples"] == FEW + 1
    assert "ours_all" not in row


def test_circumstances_name_the_command_and_the_machine() -> None:
    found = circumstances("python -m benchmarks b")
    assert found["command"] == "python -m benchmarks b"
    assert {"cores", "memory_gib", "memory", "disk", "python"} <= set(found["machine"])
    json.dumps(found)
