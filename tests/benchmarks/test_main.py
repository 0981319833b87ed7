"""`python -m benchmarks` passes options to each bench, and records the rows."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench

pytestmark = pytest.mark.slow  # imports all benches


def small(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    yield {"bench": "small", "rounds": rounds, "mebibytes": mebibytes}
    yield {"bench": "small_too"}


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("small", "other"):
        monkeypatch.setitem(bench.ALL, name, small)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    bench.main()


def test_every_bench_runs_without_options_and_every_option_is_for_one() -> None:
    parameters = [inspect.signature(rows).parameters for rows in bench.ALL.values()]
    every = [each for of_bench in parameters for each in of_bench.values()]
    assert [each for each in every if each.default is each.empty] == []
    options = vars(bench.make_parser().parse_args([])).keys() - set(bench.NOT_OPTIONS)
    assert options <= {each.name for each in every}


def test_only_given_options_are_passed_and_are_in_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "small", "--mebibytes", "8", "--save-steps", "3")
    row, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["rounds"], row["mebibytes"]) == (5, 8)
    assert row["command"] == "python -m benchmarks small --mebibytes 8"


def test_each_of_several_sizes_is_measured_and_the_command_has_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "small", "--mebibytes", "8,64")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("mebibytes") for row in found] == [8, None, 64, None]
    assert {row["command"] for row in found} == {
        "python -m benchmarks small --mebibytes 8,64"
    }


def test_nothing_is_kept_unless_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "small")
    assert list(tmp_path.iterdir()) == []


def test_rows_are_kept_by_name_and_replace_the_ones_before(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept"
    for rounds in ("1", "2"):
        run(monkeypatch, "small", "--rounds", rounds, "--record", str(kept))
    (line,) = (kept / "small.jsonl").read_text().splitlines()
    assert line == capsys.readouterr().out.splitlines()[2]
    assert json.loads(line)["rounds"] == 2
    assert {each.name for each in kept.iterdir()} == {"small.jsonl", "small_too.jsonl"}


def test_a_name_that_is_no_bench_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "smaller")
    assert "no bench ['smaller']" in capsys.readouterr().err
