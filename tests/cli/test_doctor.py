"""`tfpreempt doctor`: findings, conclusions, and leftovers."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tfpreempt.cli import main
from tfpreempt.cli.doctor import storage_check
from tfpreempt.cli.doctor.storage_check import Mount, mount_of, try_save
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.events import Commit
from tfpreempt.core.journal import Journal, JsonLines, journal_directory
from tfpreempt.platforms.detect import VARIANTS, Platform
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce

FAKES = {"gce-spot": FakeGce, "aws": FakeAws, "azure": FakeAzure}


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the variables of this machine, and makes the disk a persistent one."""
    for name in list(os.environ):
        if name.startswith(("TFPREEMPT_", "GCE_", "AWS_", "SLURM_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TFPREEMPT_PLATFORM", "generic")
    disk = Mount(point=Path("/data"), kind="ext4")
    monkeypatch.setattr(storage_check, "mount_of", lambda path: disk)


def doctor(*arguments: object, **variables: str) -> Result:
    command = ["doctor", *map(str, arguments)]
    return CliRunner().invoke(main, command, env={"COLUMNS": "400", **variables})


def told(*arguments: object, **variables: str) -> dict[str, Any]:
    result = doctor(*arguments, "--json", **variables)
    value: dict[str, Any] = json.loads(result.stdout)
    assert value["is_fine"] is (result.exit_code == 0)
    return value


# --- the command ---------------------------------------------------------------------


def test_all_is_fine(tmp_path: Path) -> None:
    result = doctor(tmp_path, "--size", "64KiB", "--grace", "30")
    assert result.exit_code == 0, result.output
    for part in (
        "platform: generic",
        "because TFPREEMPT_PLATFORM is 'generic'",
        "GenericTerminationConfig()",
        "signal:SIGTERM",
        "shortest grace period: 30 s",
        "64 KiB saved in 0.",
    ):
        assert part in result.output
    assert list(tmp_path.iterdir()) == []


def test_json_has_the_same(tmp_path: Path) -> None:
    value = told(tmp_path, "--size", "1MB", "--platform", "borg", "--grace", "20")
    assert value["platform"] == "borg"
    assert (value["config"], value["exit_code"]) == ("BorgTerminationConfig", 42)
    assert value["evidence"] == ["--platform is 'borg'"]
    assert value["grace_seconds"] == 20.0
    (source,) = value["sources"]
    assert (source["name"], source["state"]) == ("signal:SIGTERM", "working")
    storage = value["directory"]
    assert (storage["path"], storage["save_bytes"]) == (str(tmp_path), 1_000_000)
    assert storage["save_seconds"] > 0
    assert {each["level"] for each in value["findings"]} == {"ok"}
    assert value["versions"]["jax"] == importlib.metadata.version("jax")


def test_steps_of_a_run_are_read_from_its_journal(tmp_path: Path) -> None:
    """The newest known step counts; missing fields of other records are no fault."""
    journal = Journal(journal_directory(tmp_path), 0, incarnation="0")
    for step, seconds in ((1, 5.0), (2, 45.0), (3, None)):
        journal.record(
            Commit(
                step=step,
                path=str(tmp_path / str(step)),
                sequence=step,
                world_size=1,
                save_seconds=0.1,
                bytes=1,
                because="save",
                step_seconds=seconds,
            )
        )
    journal.close()
    value = told(tmp_path, "--size", "64KiB", "--grace", "30")
    assert value["step_seconds"] == 45.0
    assert not value["is_fine"]


def test_steps_that_others_wrote_are_no_steps(tmp_path: Path) -> None:
    journal = JsonLines(journal_directory(tmp_path) / "worker-0.jsonl", SystemClock())
    commit = {"event": "commit", "worker": 0, "incarnation": "a", "step": 1}
    commit |= {"save_seconds": 1.0, "bytes": 9, "because": "periodic"}
    for wrong in (45.0, "x", [1], 1e300, -3, {"x": 1}):
        journal.append(commit | {"step_seconds": wrong})
    journal.close()
    value = told(tmp_path, "--size", "64KiB", "--grace", "30")
    assert value["step_seconds"] == 45.0


def test_without_a_directory_no_save_is_tried() -> None:
    value = told()
    assert value["directory"] is None
    assert value["is_fine"]
    assert any("tfpreempt doctor DIR" in each["text"] for each in value["findings"])


def test_a_directory_that_cannot_be_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = doctor(tmp_path / "file" / "ckpt", "--size", "1KB")
    assert result.exit_code == 1
    assert (
        "Not a directory; a part of the path is a file: choose another" in result.output
    )
    assert "[Errno" not in result.output


def test_a_file_in_place_of_the_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fault = try_save(tmp_path / "file", 1).fault
    assert fault.startswith(
        f"{tmp_path / 'file'}: File exists; name a writable directory"
    )


def test_a_directory_that_cannot_be_created_has_advice() -> None:
    fault = try_save(Path("/proc/tfpreempt"), 1).fault
    assert fault.startswith("/proc/tfpreempt: ")
    assert fault.endswith("; name a writable directory")


def test_a_directory_that_is_not_there_yet_is_named_with_its_disk(
    tmp_path: Path,
) -> None:
    value = told(tmp_path / "a" / "b", "--size", "1KB")
    assert value["directory"]["exists"] is False
    (finding,) = [each for each in value["findings"] if each["about"] == "directory"]
    assert finding["level"] == "ok"
    assert "b does not exist; it would be created on /data (ext4)" in finding["text"]


@pytest.mark.parametrize(
    ("text", "size"), [("2K", 2048), ("2kib", 2048), ("1.5KB", 1500), ("7", 7)]
)
def test_sizes_as_people_write_them(text: str, size: int, tmp_path: Path) -> None:
    assert told(tmp_path, "--size", text)["directory"]["save_bytes"] == size


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gs://bucket/run"], 1, "is a URL, and doctor tests only directories"),
        (["--platform", "gpc"], 2, "'--platform': 'gpc' is not one of 'aws'"),
        (["--size", "big"], 2, "'big' is not a size"),
        (["--size", "0"], 2, "'0' is not a size"),
        (["--size", "5QiB"], 2, "is not a size"),
    ],
)
def test_a_config_that_cannot_work_is_reported(
    arguments: list[str], code: int, message: str
) -> None:
    result = doctor(*arguments)
    assert (result.exit_code, message in result.output) == (code, True), result.output


@pytest.mark.parametrize("name", sorted(FAKES))
def test_metadata_servers_are_asked(name: str) -> None:
    with FAKES[name]() as fake:
        value = told("--platform", name, **fake.environment())
        assert value["is_fine"], value
        clouds = [each for each in value["sources"] if each["name"][:6] != "signal"]
        assert clouds
        assert {each["state"] for each in clouds} == {"working"}
        fake.down()
        value = told("--platform", name, **fake.environment())
        assert not value["is_fine"]
        clouds = [each for each in value["sources"] if each["name"][:6] != "signal"]
        assert {each["state"] for each in clouds} == {"failed"}


@pytest.mark.parametrize("hides_directory", [False, True])
def test_an_entry_that_a_proxy_hides_is_reported(hides_directory: bool) -> None:
    with FakeGce(hides_directory=hides_directory) as fake:
        value = told("--platform", "gce-cpu", **fake.environment())
        assert value["is_fine"], value
        fake.remove("instance/maintenance-event")
        value = told("--platform", "gce-cpu", **fake.environment())
    assert not value["is_fine"]
    states = {each["name"]: each["state"] for each in value["sources"]}
    assert states == {
        "signal:SIGTERM": "working",
        "gce:preempted": "working",
        "gce:maintenance-event": "failed",
    }
    (finding,) = [each for each in value["findings"] if each["level"] == "problem"]
    assert "status 404" in finding["text"]
    assert "a proxy hides the entry" in finding["text"]


def test_a_notice_for_the_machine_is_reported() -> None:
    with FakeGce() as fake:
        fake.preempt()
        result = doctor("--platform", "gce-spot", **fake.environment())
    assert result.exit_code == 1
    assert (
        "announces a preemption of this machine now: preempted is TRUE" in result.output
    )


def test_the_cloud_s_source_is_shown_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    detected = Platform(
        name="kubernetes",
        config_class=VARIANTS["kubernetes"],
        evidence=("tested",),
        cloud="aws",
    )
    monkeypatch.setattr(
        "tfpreempt.cli.doctor.command.detect_platform", lambda **_: detected
    )
    result = doctor(COLUMNS="60")
    assert result.exit_code == 0
    line = 'sources=[aws_source("spot-interruption", grace_period=120)]'
    assert line in result.output  # whole, though the terminal is narrow
    (finding,) = [each for each in told()["findings"] if each["about"] == "cloud aws"]
    assert finding["level"] == "advice"
    assert line in finding["code"]


# --- storage -------------------------------------------------------------------------


def test_a_save_is_written_whole_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    size = 9 * 1024 * 1024 + 1
    storage = try_save(tmp_path, size)
    assert sizes[0] == size  # the file first, then its directory
    assert len(sizes) == 2
    assert storage.save_seconds is not None
    assert (storage.save_bytes, storage.filesystem) == (size, "ext4")
    assert storage.free_bytes > size
    assert list(tmp_path.iterdir()) == []


def test_a_directory_created_for_the_check_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    storage = try_save(tmp_path / "there" / "a" / "b", 10)
    assert storage.save_seconds is not None
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    storage = try_save(tmp_path, 10)
    assert storage.save_seconds is None
    assert "Input/output error" in storage.fault
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_not_filled(tmp_path: Path) -> None:
    storage = try_save(tmp_path, 2**60)
    assert storage.save_seconds is None
    assert "free, 1.05e+06 TiB needed; free space" in storage.fault
    assert "bytes" not in storage.fault


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    deep = tmp_path / "with blank" / "deep"
    deep.mkdir(parents=True)
    escaped = str(tmp_path / "with blank").replace(" ", "\\040")
    table = tmp_path / "mounts"
    table.write_text(
        "/dev/sda1 / ext4 rw,relatime 0 0\n"
        f"/dev/sdb {tmp_path} xfs rw 0 0\n"
        f"none {escaped} overlay rw 0 0\n"
        f"tmpfs {escaped} tmpfs rw 0 0\n"
        f"server:/ {tmp_path}/with nfs4 rw 0 0\n"
    )
    top = tmp_path / "with blank"
    assert mount_of(deep, table) == Mount(point=top, kind="tmpfs")
    assert mount_of(tmp_path, table) == Mount(point=tmp_path, kind="xfs")
    assert mount_of(tmp_path.parent, table) == Mount(point=Path("/"), kind="ext4")
    assert mount_of(tmp_path, tmp_path / "missing") is None
