"""The journal in an object store, for use after the loss of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.fakes.gcs import GcsServer
from tests.fakes.process import new_process
from tests.fakes.storage import FaultyObjectStore
from tests.handler.program import LIMIT, Program, wait_until
from tests.journals import read_journal
from tfpreempt import errors
from tfpreempt.checkpoint.mirror.journal_mirror import (
    FOLDER,
    MOST_JOINED,
    MOST_SMALL,
    JournalMirror,
    fetch,
)
from tfpreempt.cli import main
from tfpreempt.core.events import Fault
from tfpreempt.core.journal import Journal
from tfpreempt.storage.open_store import open_store

pytestmark = pytest.mark.tensorflow


@pytest.fixture(params=["file", "gs"])
def mirror(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Returns the URI of a mirror, in a working directory without a journal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFPREEMPT_JOURNAL_DIR", raising=False)
    monkeypatch.setenv("TFPREEMPT_SCRATCH_DIR", str(tmp_path / "scratch"))
    if request.param == "file":
        yield (tmp_path / "mirror").as_uri()
        return
    with GcsServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield "gs://bucket/run"


def report(place: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["report", place, *options])


def commits(place: str) -> list[Any]:
    """Returns the commits of the report."""
    done = report(place, "--json")
    return [] if done.exit_code else json.loads(done.stdout)["commits"]


def train(program: Program, store: Any, steps: int, *, notice: bool = False) -> None:
    """From where it is to a step; then a notice, or the end."""
    config = {"exit_fn": None} if notice else {}
    with program.handler(mirror_dir=store, config=config) as handler:
        while handler.total_run_calls < steps:
            handler.run(program.step)
        if notice:
            program.button.press()
            handler.run(program.step)


def test_the_report_is_readable_after_the_loss_of_the_machine(
    program: Program, tmp_path: Path, mirror: str
) -> None:
    with pytest.raises(SystemExit):
        train(program, mirror, 3, notice=True)
    here = json.loads(report(str(program.directory), "--json").stdout)
    shutil.rmtree(program.directory)
    told = json.loads(report(mirror, "--json").stdout)
    assert {**told, "warnings": here["warnings"]} == here
    assert told["workers"][0]["spans"]

    with new_process():  # another machine, whose disk is empty
        train(Program(tmp_path / "ckpt-2"), mirror, 5)
    shutil.rmtree(tmp_path / "ckpt-2")
    done = report(mirror, "--json")
    told = json.loads(done.stdout)
    assert (told["outcome"], told["step"]) == ("finished", 5)
    assert [each["cause"] for each in told["interruptions"]] == ["preemption"]
    assert "copy of the journal" in told["warnings"][0]
    assert len(list(open_store(mirror).list(f"{FOLDER}/"))) == 2
    done = CliRunner().invoke(main, ["status", mirror])
    assert done.exit_code == 2
    assert f"are shown by `tfpreempt report {mirror}`" in " ".join(done.stderr.split())


def test_a_machine_that_was_lost_without_a_word(
    program: Program, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the records that were uploaded during training remain."""
    monkeypatch.setattr("tfpreempt.checkpoint.mirror.journal_mirror.EVERY", 0.1)
    handler = program.handler(mirror_dir=mirror, save_freq=1)
    for _ in range(3):
        handler.run(program.step)
    assert handler.wait_for_mirror(LIMIT)
    here = program.events("commit")
    assert here
    wait_until(lambda: len(commits(mirror)) == len(here))
    handler.close()


def test_a_store_without_journals_is_reported(mirror: str) -> None:
    done = report(mirror)
    assert done.exit_code == 2
    assert "The URL has no copy of a journal either" in " ".join(done.stderr.split())


class Full(FaultyObjectStore):
    """A store that takes commits, and no journals."""

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        if name.startswith(f"{FOLDER}/"):
            raise errors.SaveError("no room for it")
        super().replace(name, data, timeout=timeout)


def test_a_journal_that_cannot_be_copied_is_one_warning(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    with program.handler(mirror_dir=Full(), save_freq=1) as handler:
        for _ in range(3):
            handler.run(program.step)
            assert handler.wait_for_mirror(LIMIT)
        assert handler.mirror_status is not None
        assert handler.mirror_status.error_count == 0
    assert caplog.text.count("no room for it") == 1


@pytest.mark.parametrize(
    "name",
    [
        "journals/../../evil-12345678.jsonl",
        "journals/sub/worker-0-12345678.jsonl",
        "journals/worker-0.jsonl",
        "journals/worker-0-12345678.jsonl.exe",
        "journals/other-12345678.jsonl",
        "journals/supervisor-" + "\u0905" * 99 + "-12345678.jsonl",
    ],
)
def test_names_of_others_become_no_paths(tmp_path: Path, name: str) -> None:
    class Hostile(FaultyObjectStore):
        def list(self, prefix: str = "") -> Iterator[str]:
            yield name

    fetch(Hostile(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_object_larger_than_a_journal_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpreempt.checkpoint.mirror.journal_mirror._MOST_BYTES", 10)
    store = FaultyObjectStore()
    store.replace(f"{FOLDER}/worker-0-12345678.jsonl", b"x" * 11)
    with pytest.raises(errors.CheckpointError, match="too large for a run"):
        fetch(store, tmp_path)


def test_journals_larger_than_those_of_a_run_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may put many sparse files into the directory."""
    monkeypatch.setattr("tfpreempt.checkpoint.mirror.journal_mirror._MOST_READ", 10)
    local = tmp_path / "journal"
    local.mkdir()
    for number in range(2):
        (local / f"worker-{number}.jsonl").write_bytes(b"x" * 6)
    with pytest.raises(errors.CheckpointError, match="too large for a run"):
        fetch(FaultyObjectStore(), tmp_path, local)


def test_files_of_other_programs_are_not_uploaded(tmp_path: Path) -> None:
    """$TFPREEMPT_JOURNAL_DIR may name a directory with data of the user."""
    for name in ("worker-0.2.jsonl", "supervisor-node-a.jsonl", "patients.jsonl"):
        (tmp_path / name).write_bytes(b'{"wall": 1}\n')
    store, target = FaultyObjectStore(), tmp_path / "target"
    JournalMirror(store, tmp_path).put_within(10.0)
    assert [name.rpartition("-")[0] for name in store.list()] == [
        f"{FOLDER}/supervisor-node-a",
        f"{FOLDER}/worker-0.2",
    ]
    target.mkdir()
    fetch(store, target, tmp_path)
    assert sorted(os.listdir(target)) == ["supervisor-node-a.jsonl", "worker-0.jsonl"]


def test_millions_of_files_in_one_object_do_not_fill_the_memory(tmp_path: Path) -> None:
    """16 MiB of text took 600 MiB."""
    store, count = FaultyObjectStore(), 300_000
    text = b"\n\n".join(b"%x" % number for number in range(count))
    store.replace(f"{FOLDER}/worker-0-12345678.jsonl", text)
    tracemalloc.start()
    with pytest.raises(errors.CheckpointError, match="more than 100000 files"):
        fetch(store, tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 150 * count


def test_a_sparse_file_does_not_fill_the_memory_of_a_start(tmp_path: Path) -> None:
    """A file of terabytes without a line end was read as one line."""
    (tmp_path / "worker-9.jsonl").touch()
    os.truncate(tmp_path / "worker-9.jsonl", 1 << 28)
    tracemalloc.start()
    JournalMirror(FaultyObjectStore(), tmp_path).join_small()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 24


def test_copies_of_several_machines_are_put_together_in_order(tmp_path: Path) -> None:
    store = FaultyObjectStore()
    store.replace(f"{FOLDER}/worker-0-00000000.jsonl", b'{"wall": 9}\n')
    store.replace(f"{FOLDER}/worker-0-11111111.jsonl", b'{"wall": 5}\n{"wall": 8')
    store.replace(f"{FOLDER}/supervisor-node-a-00000000.jsonl", b'{"wall": 1}\n')
    fetch(store, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "worker-0.jsonl": b'{"wall": 5}\n{"wall": 8\n{"wall": 9}\n',
        "supervisor-node-a.jsonl": b'{"wall": 1}\n',
    }


def test_a_full_file_is_uploaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a restarted worker: the uploads of a long run cost no more over time."""
    monkeypatch.setattr("tfpreempt.core.journal.SEGMENT_BYTES", 500)
    store, uploaded = FaultyObjectStore(), list[str]()
    replace = store.replace

    def counted(name: str, data: bytes, *, timeout: float | None = None) -> None:
        uploaded.append(name.rpartition("-")[0])
        replace(name, data, timeout=timeout)

    monkeypatch.setattr(store, "replace", counted)
    local, joined = tmp_path / "journal", tmp_path / "joined"
    for _ in range(2):  # processes
        journal, mirror = Journal(local, 0), JournalMirror(store, local)
        for _ in range(5):
            journal.record(Fault(where="save", error="x" * 200))
            mirror.put_within(LIMIT)
        journal.close()
    copies = [f"{FOLDER}/worker-0"] + [f"{FOLDER}/worker-0.{n}" for n in (2, 3, 4, 5)]
    assert set(uploaded) == set(copies)
    assert all(uploaded.count(name) <= 2 for name in copies)
    joined.mkdir()
    fetch(store, joined, local)
    assert [path.name for path in joined.iterdir()] == ["worker-0.jsonl"]
    assert read_journal(joined) == read_journal(local)


def test_a_store_that_hangs_at_the_end_is_waited_for_a_moment_only(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The upload of a commit is not delayed either."""
    monkeypatch.setattr("tfpreempt.handler.run.HANDS_IN", 0.2)
    monkeypatch.setattr("tfpreempt.checkpoint.mirror.journal_mirror.EVERY", 0.01)
    go_on = threading.Event()

    class Hanging(FaultyObjectStore):
        def replace(
            self, name: str, data: bytes, *, timeout: float | None = None
        ) -> None:
            if name.startswith(f"{FOLDER}/"):
                go_on.wait(LIMIT)
            super().replace(name, data, timeout=timeout)

    began = time.monotonic()
    train(program, Hanging(), 2)
    assert time.monotonic() - began < LIMIT / 2
    assert "the journal in the mirror memory:// may lack the last events" in caplog.text
    assert [each["outcome"] for each in program.events("exit")] == ["finished"]
    go_on.set()


def machine(directory: Path, store: Any, number: int) -> JournalMirror:
    """Returns the journal of another machine with an empty disk, before its upload."""
    journal = Journal(directory / f"machine-{number}", 0)
    for _ in range(2):
        journal.record(Fault(where="save", error=f"of machine {number}"))
    journal.close()
    return JournalMirror(store, directory / f"machine-{number}")


def errors_in(store: Any, target: Path, local: Path | None = None) -> list[str]:
    """Returns the errors in the records of all machines, in order."""
    target.mkdir()
    fetch(store, target, local)
    return [record["error"] for record in read_journal(target)]


def count(store: Any) -> int:
    return len(list(store.list(f"{FOLDER}/")))


EACH = [f"of machine {number}" for number in range(100) for _ in range(2)]


def test_small_files_of_many_machines_are_joined(tmp_path: Path) -> None:
    store = FaultyObjectStore()
    for number in range(100):
        mirror = machine(tmp_path, store, number)
        mirror.start()
        wait_until(lambda: count(store) < MOST_SMALL)
        mirror.stop()
        mirror.put_within(LIMIT)
    assert errors_in(store, tmp_path / "all") == EACH


def test_a_large_file_is_not_joined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tfpreempt.checkpoint.mirror.journal_mirror.SEGMENT_BYTES", 2000
    )
    store = FaultyObjectStore()
    for number in range(100):
        mirror = machine(tmp_path, store, number)
        mirror.join_small()
        mirror.put_within(LIMIT)
    found = [store.stat(name) for name in store.list(f"{FOLDER}/")]
    assert sum(stat is not None and stat.size >= 2000 for stat in found) > 4
    assert len(found) < 5 * MOST_SMALL
    assert errors_in(store, tmp_path / "all") == EACH


def test_a_crash_before_the_small_files_are_deleted_doubles_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultyObjectStore()
    for number in range(MOST_SMALL):
        machine(tmp_path, store, number).put_within(LIMIT)
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            machine(tmp_path, store, MOST_SMALL).join_small()
    assert count(store) == MOST_SMALL + 1
    told = EACH[: 2 * MOST_SMALL]
    assert errors_in(store, tmp_path / "before") == told
    machine(tmp_path, store, MOST_SMALL).join_small()
    assert count(store) == 1
    assert errors_in(store, tmp_path / "after") == told


def test_a_store_that_refuses_to_delete_gets_one_more_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultyObjectStore()
    monkeypatch.setattr(store, "delete", lambda *_, **__: 1 / 0)
    for number in range(2 * MOST_SMALL):
        mirror = machine(tmp_path, store, number)
        with contextlib.suppress(ZeroDivisionError):
            mirror.join_small()
        mirror.put_within(LIMIT)
    assert count(store) == 2 * MOST_SMALL + 1
    assert errors_in(store, tmp_path / "all") == EACH[: 4 * MOST_SMALL]


def test_a_machine_that_lost_the_run_and_comes_back_loses_no_record(
    tmp_path: Path,
) -> None:
    store = FaultyObjectStore()
    first = machine(tmp_path, store, 0)
    first.put_within(LIMIT)
    for number in range(1, MOST_SMALL):
        machine(tmp_path, store, number).put_within(LIMIT)
    machine(tmp_path, store, MOST_SMALL).join_small()
    journal = Journal(tmp_path / "machine-0", 0)
    journal.record(Fault(where="save", error="late"))
    journal.close()
    first.put_within(LIMIT)
    told = errors_in(store, tmp_path / "all")
    assert sorted(told) == sorted([*EACH[: 2 * MOST_SMALL], "late"])
    # Its own file is not joined while the machine may write to the file.
    first.join_small()
    assert count(store) == 2
    here = errors_in(store, tmp_path / "with the local file", tmp_path / "machine-0")
    assert here == told


@pytest.mark.parametrize("is_joined", [False, True], ids=["read", "joined before"])
def test_records_that_a_machine_uploads_during_the_join_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_joined: bool
) -> None:
    """The machine has released the lease, and uploads its exit record."""
    store = FaultyObjectStore()
    first = machine(tmp_path, store, 0)
    first.put_within(LIMIT)
    [own] = store.list(f"{FOLDER}/")
    for number in range(1, MOST_SMALL):
        machine(tmp_path, store, number).put_within(LIMIT)
    if is_joined:  # a crash before the joined objects were deleted
        with monkeypatch.context() as patch:
            patch.setattr(store, "delete", lambda *_, **__: None)
            machine(tmp_path, store, MOST_SMALL).join_small()
        assert count(store) == MOST_SMALL + 1
    get = store.get

    def get_before_the_end(name: str, *args: Any, **kwargs: Any) -> int:
        done = get(name, *args, **kwargs)
        if name == own:
            journal = Journal(tmp_path / "machine-0", 0)
            journal.record(Fault(where="save", error="late"))
            journal.close()
            first.put_within(LIMIT)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(store, "get", get_before_the_end)
        machine(tmp_path, store, MOST_SMALL).join_small()
    assert count(store) == 2
    told = errors_in(store, tmp_path / "all")
    assert sorted(told) == sorted([*EACH[: 2 * MOST_SMALL], "late"])


def test_a_start_joins_a_limited_number_of_objects(tmp_path: Path) -> None:
    store = FaultyObjectStore()
    for number in range(100):
        machine(tmp_path, store, number).put_within(LIMIT)
    late = machine(tmp_path, store, 100)
    late.join_small()
    assert count(store) == 100 - MOST_JOINED + 1
    assert errors_in(store, tmp_path / "all") == EACH
    late.join_small()
    assert count(store) == 1
    assert errors_in(store, tmp_path / "again") == EACH


def test_a_joined_object_is_not_too_large_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tfpreempt.checkpoint.mirror.journal_mirror"
    most = 3000
    monkeypatch.setattr(f"{module}._MOST_JOINED_BYTES", most)
    store = FaultyObjectStore()
    for number in range(100):
        machine(tmp_path, store, number).put_within(LIMIT)
    for _ in range(3):
        machine(tmp_path, store, 100).join_small()
    monkeypatch.setattr(f"{module}._MOST_BYTES", most + MOST_JOINED)
    assert errors_in(store, tmp_path / "all") == EACH
