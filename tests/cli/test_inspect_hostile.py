"""`tfpreempt inspect` where anybody may have put anything: shown, never followed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.cli.test_inspect import inspect, summary
from tests.fakes.storage import FaultyObjectStore
from tfpreempt.checkpoint.directory.catalog import unread_entry
from tfpreempt.cli.inspect.rows import Row
from tfpreempt.cli.inspect.view import to_json


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saver = open_directory(tmp_path / "run", OwnContents(), max_to_keep=None)
    for step in (20, 30, 10):
        save(saver, step)
    return tmp_path / "run"


def test_hostile_directories(run: Path) -> None:
    manifest = json.loads((run / "10" / "MANIFEST.json").read_text())
    manifest["files"][0]["name"] = "../../etc/passwd"
    (run / "10" / "MANIFEST.json").write_text(json.dumps(manifest))
    (run / "30" / "MANIFEST.json").unlink()
    os.symlink("/etc/passwd", run / "30" / "MANIFEST.json")
    (run / "20" / "COMMITTED").unlink()
    os.mkfifo(run / "20" / "COMMITTED")
    os.symlink(run / "20", run / "99")
    (run / "a\x1b[2Jb.tfpreempt").mkdir()
    os.symlink("/etc/passwd", run / "x.index")
    assert {state for _, state, _ in summary(run)} == {"corrupt"}
    result = inspect(run)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for part in ("'..'", "links are not followed", "not a regular file", r"a\x1b[2Jb"):
        assert part in result.stdout


def test_hostile_text_moves_no_cursor(run: Path) -> None:
    for path in (run / "10" / "MANIFEST.json", run / "30" / "MANIFEST.json"):
        record = json.loads(path.read_text())
        record["metadata"]["saved_at"] = 1e308
        record["because"] = "\x1b]0;title\x07[red]"
        path.write_text(json.dumps(record))
    (run / "10" / "COMMITTED").unlink()
    (run / "30" / "COMMITTED").unlink()
    assert "\x1b" not in inspect(run, "--states").stdout


@pytest.mark.parametrize("seconds", [1 << 45, 1 << 60, -(1 << 45)])
def test_a_file_of_an_impossible_year_has_no_time(run: Path, seconds: int) -> None:
    """Some file systems limit the time of a file to fewer years."""
    (run / "ckpt-9.index").touch()
    os.utime(run / "ckpt-9.index", (seconds, seconds))
    assert inspect(run).exit_code == 0
    assert inspect(run, "--json").exit_code == 0
    assert {name for name, _, _ in summary(run)} == {"10", "20", "30", "ckpt-9"}


@pytest.mark.parametrize("seconds", [1 << 45, 1 << 60, -(1 << 45)])
def test_a_checkpoint_of_an_impossible_year_has_no_time(seconds: int) -> None:
    store = FaultyObjectStore()
    entry = dataclasses.replace(unread_entry(store, "9"), time=float(seconds))
    row = Row(entry=entry, where="local", path="run/9", uri=None)
    assert to_json(row)["saved_at"] is None


@pytest.mark.parametrize("place", ["missing", "", "file://elsewhere/run", "x://y", "f"])
def test_a_place_that_cannot_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a file")
    result = inspect(place)
    assert result.exit_code == 2
    assert "Error:" in result.stderr
    assert os.listdir(tmp_path) == ["f"]  # nothing was made
