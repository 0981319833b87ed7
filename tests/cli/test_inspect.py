"""`tfpreempt inspect`: lists any contents without a traceback."""

from __future__ import annotations

import datetime
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    Words,
    open_directory,
    save,
    write_part,
)
from tests.fakes.storage import FaultyObjectStore, damage
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.cli import main
from tfpreempt.storage import open_store
from tfpreempt.storage.local import LocalStore

KEYS = {
    "name", "state", "checked", "where", "path", "uri", "form", "step", "sequence",
    "token", "saved_at", "bytes", "world_size", "workers", "because", "kept_because",
    "states",
    "problems", "remarks",
}  # fmt: skip


def inspect(*arguments: object, **variables: str) -> Result:
    command = ["inspect", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": "400", **variables}.items():
            patch.setenv(name, value)
        time.tzset()
        result = CliRunner().invoke(main, command)
    time.tzset()
    return result


def told(*arguments: object) -> list[dict[str, Any]]:
    result = inspect(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: list[dict[str, Any]] = json.loads(result.stdout)
    assert all(each.keys() == KEYS for each in value)
    return value


def summary(*arguments: object) -> list[tuple[str, str, str]]:
    return [(e["name"], e["state"], e["where"]) for e in told(*arguments)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three commits of two workers with States, the last one of the smallest step."""
    registry = StateRegistry()
    kept = [
        Words("progress", "epoch 3", registry=registry),
        Words("rng", "1234", per_worker=True, registry=registry),
    ]
    directory = tmp_path / "run"
    saver = open_directory(
        directory, OwnContents(), registry=registry, max_to_keep=None, world=2
    )
    for step in (20, 30, 10):
        save(saver, step)
    del kept
    return directory


def mirrored(run: Path, name: str, mirror: Path) -> str:
    """Lays a commit out as the mirror has it; its folder's name."""
    commit = catalog.read_at(str(run / name))
    folder = catalog.folder_name(commit.step, commit.token)
    shutil.copytree(run / name, mirror / folder)
    return folder


# --- what lies there -----------------------------------------------------------------


def test_commits_newest_first_with_all_that_they_say(run: Path) -> None:
    found = told(run)
    assert [(each["step"], each["sequence"]) for each in found] == [
        (10, 3),
        (30, 2),
        (20, 1),
    ]
    first = found[0]
    assert (first["state"], first["checked"]) == ("committed", "sizes")
    assert (first["path"], first["uri"]) == (str(run / "10"), None)
    assert (first["world_size"], first["workers"]) == (2, [0])
    assert first["bytes"] == 3 * 3000 + 11
    saved = datetime.datetime.fromisoformat(first["saved_at"])
    assert saved.utcoffset() == datetime.timedelta()


def test_the_table_for_people(run: Path) -> None:
    result = inspect(run, TZ="UTC")
    assert result.exit_code == 0
    header, *lines = result.stdout.splitlines()
    assert header.split() == [
        "step", "checkpoint", "saved", "(UTC)", "size", "workers", "state", "checked",
        "where",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines] == ["10", "30", "20"]
    assert "committed" in lines[0]


def test_each_time_has_its_zone_at_a_change_of_summer_time(run: Path) -> None:
    for name, month in (("10", 1), ("30", 7)):
        path = run / name / "MANIFEST.json"
        record = json.loads(path.read_text())
        moment = datetime.datetime(2026, month, 1, tzinfo=datetime.timezone.utc)
        record["metadata"]["saved_at"] = moment.timestamp()
        path.write_text(json.dumps(record))
        (run / name / "COMMITTED").unlink()
    shutil.rmtree(run / "20")
    text = inspect(run, TZ="Europe/Berlin").stdout
    assert "2026-01-01 01:00 CET" in text
    assert "2026-07-01 02:00 CEST" in text


def test_states(run: Path) -> None:
    assert told(run)[0]["states"] == [
        {"name": "progress", "worker": None, "bytes": 7},
        {"name": "rng", "worker": 0, "bytes": 4},
    ]
    text = inspect(run / "10", "--states").stdout
    assert "progress  all workers" in text
    assert "worker 0" in text


@pytest.mark.parametrize("name", ["30", "30/ckpt", "30/"])
def test_one_commit_can_be_named(run: Path, name: str) -> None:
    (one,) = told(f"{run}/{name}")
    assert (one["step"], one["state"]) == (30, "committed")


def test_sizes_are_checked_and_bytes_on_demand(run: Path) -> None:
    damage(str(run / "30" / "ckpt.index"))
    (run / "20" / "ckpt.index").write_bytes(b"short")
    (run / "10" / "ckpt.index").unlink()
    assert [state for _, state, _ in summary(run)] == [
        "corrupt", "committed", "corrupt",
    ]  # fmt: skip
    found = told(run, "--verify")
    assert {each["state"] for each in found} == {"corrupt"}
    assert {each["checked"] for each in found} == {"every byte"}
    assert "crc32c" in found[1]["problems"][0]
    assert "10/ckpt.index' is missing" in found[0]["problems"][0]


def test_running_or_interrupted_saves_are_not_committed(run: Path) -> None:
    saver = open_directory(run, OwnContents())
    write_part(saver, 40, "attempt-7")
    parts = run / ".tfpreempt-staging" / "attempt-7.parts" / "0001"
    parts.mkdir(parents=True)
    (parts / "0").write_bytes(bytes(1000))
    (run / "30" / "COMMITTED").unlink()
    (run / "checkpoint").unlink()  # the file names only commits
    os.symlink("/etc", run / ".tfpreempt-staging" / "link")
    found = {each["name"]: each for each in told(run)}
    staged = found[".tfpreempt-staging/attempt-7"]
    assert (staged["state"], staged["form"]) == ("not committed", "staging")
    assert staged["bytes"] == 9000 + 1000
    assert found["30"]["state"] == "not committed"
    assert found["30"]["step"] == 30
    assert "no marker" in found["30"]["remarks"][0]
    assert len(found) == 4


def test_a_second_commit_of_a_step_is_explained(run: Path) -> None:
    shutil.copytree(run / "20", run / "20.4")
    remark = "another commit of step 20; 4 is its sequence number"
    assert f"note: 20.4: {remark}" in inspect(run).stdout


def test_strangers_are_not_listed(run: Path) -> None:
    (run / "77").mkdir()
    (run / "77" / "notes.txt").write_text("mine")
    (run / "logs").mkdir()
    (run / "78").write_text("a file")
    assert len(told(run)) == 3


def test_an_empty_directory(tmp_path: Path) -> None:
    assert told(tmp_path) == []
    assert "no checkpoints" in inspect(tmp_path).stdout


# --- the flat form, and checkpoints of others ----------------------------------------


@pytest.fixture
def flat_run(tmp_path: Path) -> Path:
    directory = tmp_path / "flat"
    directory.mkdir()
    save(open_directory(directory, FlatContents(str(directory))), 1)
    return directory


@pytest.mark.parametrize("suffix", ["", ".index", ".tfpreempt"])
def test_a_flat_prefix_can_be_named(flat_run: Path, suffix: str) -> None:
    (one,) = told(f"{flat_run}/ckpt-1{suffix}")
    assert (one["name"], one["form"], one["state"]) == ("ckpt-1", "flat", "committed")
    assert one["path"] == str(flat_run / "ckpt-1")


def test_an_incomplete_flat_save(flat_run: Path) -> None:
    def die(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(open_directory(flat_run, FlatContents(str(flat_run), die)), 2)
    (flat_run / "ckpt-2.index").write_bytes(b"torn")
    states = {name: state for name, state, _ in summary(flat_run)}
    assert states["ckpt-1"] == "committed"
    assert states["ckpt-2"] == "not committed"


@pytest.mark.parametrize("intent", [b"[]", b"1", b"{", b"[" * 100_000])
def test_an_intent_that_makes_no_sense(flat_run: Path, intent: bytes) -> None:
    (flat_run / "ckpt-1.tfpreempt-intent").write_bytes(intent)
    (flat_run / "ckpt-9.tfpreempt-intent").write_bytes(intent)
    states = {name: state for name, state, _ in summary(flat_run)}
    assert states == {"ckpt-1": "committed", "ckpt-9": "not committed"}


def test_checkpoints_that_a_manager_deleted_or_wrote_again(flat_run: Path) -> None:
    marked = (flat_run / "ckpt-1.tfpreempt" / "COMMITTED").stat().st_mtime
    (flat_run / "ckpt-1.index").write_bytes(b"by the user's own manager.save()")
    os.utime(flat_run / "ckpt-1.index", (marked + 10, marked + 10))
    (one,) = told(flat_run)
    assert one["form"] == "external"
    assert "saved again without tfpreempt" in one["remarks"][0]
    (flat_run / "ckpt-1.index").unlink()
    (one,) = told(flat_run)
    assert one["state"] == "not committed"
    assert "checkpoint deleted" in one["remarks"][0]


def test_a_foreign_checkpoint(run: Path) -> None:
    (run / "model.index").write_bytes(b"no table")
    os.utime(run / "model.index", (4e9, 4e9))
    newest = told(run)[0]
    assert (newest["name"], newest["state"]) == ("model", "corrupt")
    assert newest["checked"] == "index and lengths"
    assert "written without tfpreempt" in newest["remarks"][0]
    assert newest["step"] is None


# --- a mirror ------------------------------------------------------------------------


def test_local_remote_or_both(run: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    folder = mirrored(run, "30", mirror)
    shutil.rmtree(run / "30" / "states")
    old = mirrored(run, "20", mirror)
    shutil.rmtree(run / "20")
    upload = mirrored(run, "10", mirror)
    (mirror / upload / "COMMITTED").unlink()
    assert summary(run, "--mirror", mirror.as_uri()) == [
        ("10", "committed", "local"),
        ("30", "corrupt", "both"),
        (old, "committed", "mirror"),
    ]
    newest, both, _ = told(run, "--mirror", mirror)
    assert any("upload is running" in remark for remark in newest["remarks"])
    assert both["uri"] == str(mirror / folder)
    assert both["path"] == str(run / "30")


def test_a_mirror_alone(run: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    folder = mirrored(run, "10", mirror)
    (mirror / "99.9-00000000").mkdir()
    assert summary(mirror.as_uri()) == [
        ("99.9-00000000", "not committed", "mirror"),
        (folder, "committed", "mirror"),
    ]
    (one,) = told(f"{mirror.as_uri()}/{folder}")
    assert (one["step"], one["where"]) == (10, "mirror")
    os.rename(mirror / folder, mirror / "10.3-00000000")
    (moved,) = told(mirror / "10.3-00000000")
    assert moved["state"] == "corrupt"
    assert "moved" in moved["problems"][0]


def test_a_uri_of_a_runs_own_directory_is_shown_as_local(run: Path) -> None:
    assert {where for _, _, where in summary(run.as_uri())} == {"local"}


def test_a_bucket(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(run)
    store.replace("5.1-00000000/COMMITTED", b"not JSON")
    store.replace("2024/data.csv", b"a stranger's")
    monkeypatch.setattr(open_store, "open_store", lambda place: store)
    found = told("gs://bucket/run")
    assert [each["where"] for each in found] == ["mirror"] * 4
    assert [each["state"] for each in found] == ["committed"] * 3 + ["corrupt"]
    assert found[0]["uri"] == f"memory://{found[0]['name']}"
    assert found[0]["path"] is None


def filled(run: Path) -> FaultyObjectStore:
    """A bucket with all commits of a run."""
    store, source = FaultyObjectStore(), LocalStore(str(run))
    for name in source.folders():
        commit = catalog.read_at(str(run / name))
        folder = catalog.folder_name(commit.step, commit.token)
        for file in source.list(f"{name}/"):
            data = io.BytesIO((run / file).read_bytes())
            store.put_if_absent(folder + file.removeprefix(name), data)
    return store


class Bucket(FaultyObjectStore):
    """A bucket below a URI."""

    def __init__(self, uri: str, root: Path | None) -> None:
        super().__init__()
        self._uri = uri
        for name in () if root is None else LocalStore(str(root)).list():
            assert root is not None
            self.put_if_absent(name, io.BytesIO((root / name).read_bytes()))

    @property
    def uri(self) -> str:
        return self._uri


def test_one_folder_of_a_bucket(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = catalog.read_at(str(run / "10"))
    folder = catalog.folder_name(10, commit.token)

    def look(name: str, root: Path | None) -> list[dict[str, Any]]:
        bucket = Bucket(f"gs://bucket/run/{name}", root)
        monkeypatch.setattr(open_store, "open_store", lambda place: bucket)
        return told(bucket.uri)

    (one,) = look(folder, run / "10")
    assert (one["step"], one["state"], one["uri"]) == (
        10,
        "committed",
        f"gs://bucket/run/{folder}",
    )
    (moved,) = look("10.3-00000000", run / "10")
    assert moved["state"] == "corrupt"
    (run / "10" / "COMMITTED").unlink()
    (upload,) = look(folder, run / "10")
    assert (upload["state"], upload["step"]) == ("not committed", 10)
    monkeypatch.setattr(open_store, "open_store", lambda place: Bucket(place, None))
    result = inspect(f"gs://bucket/run/{folder}")
    assert result.exit_code == 2
    assert "No checkpoint was found at" in result.stderr


def test_a_bucket_that_is_itself_the_checkpoint_directory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "30" / "COMMITTED").unlink()
    bucket = Bucket("gs://bucket/run", run)
    monkeypatch.setattr(open_store, "open_store", lambda place: bucket)
    assert summary("gs://bucket/run") == [
        ("10", "committed", "mirror"),
        ("30", "not committed", "mirror"),
        ("20", "committed", "mirror"),
    ]


def test_commits_that_were_written_in_place(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run whose checkpoint directory is a URL."""
    (run / "10").rename(run / "commit-3f2a-periodic-10")
    in_place = ("commit-3f2a-periodic-10", "committed", "local")
    assert summary(run)[0] == in_place
    bucket = Bucket("gs://bucket/run", run)
    monkeypatch.setattr(open_store, "open_store", lambda place: bucket)
    assert summary("gs://bucket/run")[0] == (*in_place[:2], "mirror")


def test_a_scheme_that_no_command_line_can_open() -> None:
    for arguments, names in (
        (["hdfs://a/b"], "DIR|URI"),
        ([".", "--mirror", "hdfs://a/b"], "--mirror"),
    ):
        result = inspect(*arguments)
        assert result.exit_code == 2
        assert "file://, gs://, s3://, az://" in result.stderr
        assert names in result.stderr
        assert "filesystem=" not in result.stderr


def test_a_problem_of_the_mirror_is_shown_for_the_mirror(
    run: Path, tmp_path: Path
) -> None:
    result = inspect(run, "--mirror", tmp_path / "nope")
    assert result.exit_code == 2
    assert "--mirror: No checkpoint was found at" in result.stderr
    (tmp_path / "empty").mkdir()
    result = inspect(run, "--mirror", tmp_path / "empty", "--json")
    assert result.exit_code == 0
    assert "no checkpoints in the mirror" in result.stderr
    assert len(json.loads(result.stdout)) == 3
