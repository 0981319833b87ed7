"""`tfpreempt verify --replay` where another user may have put anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.cli.inspect import replay

BAD = {"wall": 1.0, "event": "badstep", "worker": 0}


def lines(*records: object) -> str:
    return "".join(f"{json.dumps(each)}\n" for each in records)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 << 40)


@pytest.mark.slow  # starts a program
@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", [os.mkfifo, sparse])
def test_only_the_files_of_the_commit_and_of_its_user_are_copied(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    run, copied = tmp_path / "run", tmp_path / "copied"
    saver = open_directory(run, OwnContents(), max_to_keep=None)
    for step in (10, 20):
        save(saver, step)
    files = {path.name for path in (run / "10").rglob("*") if path.is_file()}

    # Files that no manifest names.
    for commit in ("10", "20"):
        (run / commit / "states").mkdir(exist_ok=True)
        plant(run / commit / "states" / "tfpreempt.keras.state")
    (run / "10" / "thesis").symlink_to("/etc/passwd")
    sparse(run / "10" / "sparse")

    # Files that are no journals of this user.
    journal = run / "journal"
    journal.mkdir()
    names = [journal / f"worker-0.{number}.jsonl" for number in range(1, 6)]
    os.mkfifo(names[1])
    (tmp_path / "elsewhere").write_text(lines(BAD | {"at": "elsewhere"}))
    names[2].symlink_to(tmp_path / "elsewhere")
    sparse(names[3])
    names[4].write_text(lines(BAD | {"at": "writable for all users"}))
    names[4].chmod(0o666)
    other = {"wall": 1.0, "event": "cachewrite", "path": "/x", "detail": "badstep"}
    (journal / "worker-0.jsonl").write_text(lines(other, BAD))

    command = ["sh", "-c", 'cp -r "$TFPREEMPT_CHECKPOINT_DIR" "$0"', str(copied)]
    with pytest.raises(replay.ReplayError, match="ended with exit code 0"):
        replay.replay(catalog.scan(str(run)), command)
    assert {path.name for path in (copied / "10").rglob("*") if path.is_file()} == files
    assert (copied / "journal" / "worker-0.jsonl").read_text() == lines(BAD)
    assert os.listdir(copied / "journal") == ["worker-0.jsonl"]


def test_a_state_that_becomes_a_link_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = tmp_path / "run", tmp_path / "run" / "states" / "word.state"
    save(open_directory(run, OwnContents()), 10)
    [commit] = catalog.scan(str(run))
    path.parent.mkdir()
    path.touch()

    def read(file: str) -> tuple[int, None]:
        os.remove(file)
        os.symlink("/etc/passwd", file)
        return 0, None

    monkeypatch.setattr(replay.state_file, "read", read)
    (tmp_path / "copy").mkdir()
    with pytest.raises(OSError, match="Links are not followed"):
        replay._copy_states(str(run), str(tmp_path / "copy"), commit)


@pytest.mark.parametrize("header", [5, {"record": 5}, {"record": {"progress": [5, 0]}}])
def test_the_record_of_a_fit_that_makes_no_sense_has_no_phase(
    tmp_path: Path, header: object
) -> None:
    save(open_directory(tmp_path, OwnContents()), 10)
    (tmp_path / "10" / "states").mkdir()
    with open(tmp_path / "10" / "states" / "tfpreempt.keras.state", "wb") as file:
        write_parts(file, header, [])
    [commit] = catalog.scan(str(tmp_path))
    assert replay._phase(commit) == ""
