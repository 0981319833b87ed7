"""`tfpreempt verify`: every byte, and the exit status that a script goes by."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    open_directory,
    save,
    write_part,
)
from tests.cli.conftest import wait_until
from tests.cli.test_inspect import KEYS, filled
from tests.fakes.storage import FaultyObjectStore, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, flat_commit
from tfpreempt.checkpoint.restore import inspection
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.cli import main
from tfpreempt.cli.inspect import rows
from tfpreempt.core.progress_bar import ByteBar
from tfpreempt.storage import open_store


def verify(*arguments: object) -> Result:
    command = ["verify", *map(str, arguments)]
    return CliRunner().invoke(main, command, env={"COLUMNS": "400"})


def told(*arguments: object) -> tuple[int, list[dict[str, Any]]]:
    result = verify(*arguments, "--json")
    value: list[dict[str, Any]] = json.loads(result.stdout)
    assert all(each.keys() == KEYS for each in value)
    return result.exit_code, value


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    saver = open_directory(directory, OwnContents(), max_to_keep=None)
    for step in (1, 2):
        save(saver, step)
    return directory


def test_all_commits_are_intact(run: Path) -> None:
    code, found = told(run)
    assert code == 0
    assert [each["checked"] for each in found] == ["every byte"] * 2
    result = verify(run)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("2 intact (12 KiB in ")


def test_one_bar_shows_all_bytes_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short reads can take long together."""
    totals: list[int] = []
    shown: list[int] = []

    class Bar(ByteBar):
        def __init__(self, title: str, total: int) -> None:
            totals.append(total)
            super().__init__(title, total)

        def show(self, done: int) -> None:
            shown.append(done)

    monkeypatch.setattr(rows, "ByteBar", Bar)
    assert verify(run).exit_code == 0
    assert len(totals) == 1
    assert shown == sorted(shown)
    assert shown[-1] == totals[0] > 0


@pytest.mark.parametrize("name", ["ckpt.index", "ckpt.data-00001-of-00002"])
def test_one_bit(run: Path, name: str) -> None:
    damage(str(run / "1" / name), offset=1500)
    code, found = told(run)
    assert code == 1
    assert [each["state"] for each in found] == ["committed", "corrupt"]
    assert f"'1/{name}' has crc32c" in found[1]["problems"][0]
    assert verify(run / "2").exit_code == 0
    result = verify(run / "1")
    assert result.exit_code == 1
    assert "1 corrupt" in result.stdout


@pytest.mark.parametrize("name", ["MANIFEST.json", "COMMITTED"])
def test_marker_and_manifest_vouch_for_each_other(run: Path, name: str) -> None:
    damage(str(run / "2" / name), offset=3)
    code, found = told(run)
    assert code == 1
    assert {each["name"]: each["state"] for each in found} == {
        "1": "committed",
        "2": "corrupt",
    }


def test_extra_files_are_a_remark(run: Path) -> None:
    Checkpoint(run / "1").set_metadata({"a": "note"})  # is none
    (run / "2" / "notes\x1b.txt").write_text("mine")
    code, found = told(run)
    assert code == 0
    assert found[0]["remarks"] == [r"not in the manifest: '2/notes\x1b.txt'"]


def test_nothing_committed(tmp_path: Path, run: Path) -> None:
    assert verify(tmp_path).exit_code == 1
    assert "no commit found" in verify(tmp_path).stdout
    (run / "1" / "COMMITTED").unlink()
    assert verify(run / "1").exit_code == 1
    assert verify(run).exit_code == 1  # TensorFlow's state file says that it was one
    (run / "checkpoint").unlink()
    assert verify(run).exit_code == 0
    assert verify(tmp_path / "missing").exit_code == 2


def test_flat_and_foreign(tmp_path: Path) -> None:
    save(open_directory(tmp_path, FlatContents(str(tmp_path))), 1)
    assert verify(tmp_path).exit_code == 0
    damage(str(tmp_path / "ckpt-1.data-00000-of-00002"))
    assert verify(tmp_path / "ckpt-1").exit_code == 1
    (tmp_path / "other.index").write_bytes(b"no table")
    code, found = told(tmp_path / "other")
    assert (code, found[0]["state"]) == (1, "corrupt")


def test_a_commit_deleted_by_retention_is_not_corrupt(run: Path) -> None:
    found = inspection.at(str(run)) + inspection.at(str(run / "1"))
    shutil.rmtree(run / "1")
    states = [inspection.check(each, every_byte=True).condition.value for each in found]
    assert states == ["committed", "not committed", "not committed"]


def test_a_commit_deleted_during_the_listing_is_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {str(run / "gone")}
    monkeypatch.setattr(flat_commit, "intents", lambda directory, names: gone)
    code, found = told(run)
    assert code == 0
    assert [each["name"] for each in found] == ["2", "1"]


def test_a_save_that_is_over_while_the_directory_is_listed_is_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(open_directory(run, OwnContents()), 40, "attempt-7")
    read = catalog.read

    def discard_first(entry: catalog.Entry) -> catalog.Entry:
        if entry.kind is catalog.Kind.STAGING:
            shutil.rmtree(run / ".tfpreempt-staging")
        return read(entry)

    monkeypatch.setattr(catalog, "read", discard_first)
    code, found = told(run)
    assert code == 0
    assert [each["name"] for each in found] == ["2", "1"]


# --- a bucket ------------------------------------------------------------------------


def test_a_bucket_is_streamed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(run)
    monkeypatch.setattr(open_store, "open_store", lambda place: store)
    assert verify("gs://bucket/run", "--threads", 3).exit_code == 0
    name = next(name for name in store.list() if name.endswith("ckpt.index"))
    store.replace(name, b"x" * 3000)
    code, found = told("s3://bucket/run")
    assert code == 1
    assert name in found[-1]["problems"][0]
    store.delete(name)
    assert "is missing" in told("s3://bucket/run")[1][-1]["problems"][0]


def test_a_bucket_that_is_not_reached(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault_at in range(2):
        unreachable = errors.CheckpointError("no answer for 60 s")
        store = FaultyObjectStore({fault_at: unreachable})
        monkeypatch.setattr(open_store, "open_store", lambda place, s=store: s)
        result = verify("gs://bucket/run")
        assert result.exit_code == 2
        assert "no answer" in result.stderr


# --- how it ends, and how it looks meanwhile -----------------------------------------

_INTERRUPTED = """
import pathlib, sys, threading
from tfpreempt.storage.local import LocalStore
from tfpreempt.cli import main
from tfpreempt.cli.inspect import rows
from tfpreempt.core.progress_bar import ByteBar
get = LocalStore.get
def stuck(self, name, *args, **kwargs):
    if name.endswith(".index"):
        pathlib.Path(sys.argv[2]).write_text("reading")
        threading.Event().wait(60)
    return get(self, name, *args, **kwargs)
LocalStore.get = stuck
main(["verify", sys.argv[1]])
"""


@pytest.mark.slow  # starts an interpreter
def test_ctrl_c_ends_it_at_once(run: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(run), str(told)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        text=True,
    )
    try:
        wait_until(told.exists, "a file that is read")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out == ""
