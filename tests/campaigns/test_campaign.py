"""Basics of every campaign: repeatable trials, and records that continue."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns import __main__ as command
from campaigns.campaign import Campaign, Facts, Trial

pytestmark = pytest.mark.slow  # imports all campaigns


def trial(rng: random.Random) -> Facts:
    drawn = rng.randrange(100)
    assert drawn >= 50, f"drew {drawn}"
    return {"drawn": drawn, "kind": "even" if drawn % 2 == 0 else "odd"}


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    yield trial


COINS = Campaign(
    name="coins",
    promise="It is 50 or more.",
    trials=20,
    short=1,
    mark="slow",
    prepare=prepare,
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The command, where this is the only campaign; its exit code."""
    monkeypatch.setitem(command.CAMPAIGNS, "coins", COINS)
    monkeypatch.setattr(sys, "argv", ["campaigns", "coins", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def record(directory: Path) -> list[dict[str, object]]:
    lines = (directory / "coins.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


def test_an_interrupted_campaign_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "--seed", 5, "--trials", 20, "--record", tmp_path / "whole")
    parts = tmp_path / "parts"
    assert run(monkeypatch, "--seed", 5, "--trials", 3, "--record", parts) == 1
    run(monkeypatch, "--record", parts, "--jobs", 3)
    assert record(parts) == record(tmp_path / "whole")
    summary = json.loads((parts / "coins.json").read_text())
    lines = record(parts)
    faults = sum(line["fault"] is not None for line in lines)
    assert (summary["seed"], summary["trials"], summary["faults"]) == (5, 20, faults)
    assert sum(summary["kind"].values()) == 20 - faults


def test_one_trial_is_repeated_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--seed", 5, "--trials", 9)
    before = [json.loads(line) for line in capsys.readouterr().out.splitlines()][8]
    run(monkeypatch, "--seed", 5, "--only", 8)
    again = json.loads(capsys.readouterr().out.splitlines()[0])
    assert {**again, "seconds": 0} == {**before, "seconds": 0}


def test_a_fault_is_reported_with_its_trial() -> None:
    lines = list(dataclasses.replace(COINS).run((5, number) for number in range(20)))
    faults = [line["fault"] for line in lines if line["fault"]]
    assert faults
    assert all("in trial" in fault and "drew" in fault for fault in faults)
