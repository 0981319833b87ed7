"""The journal: one complete line per event, for any damage to the file."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.journals import read_journal
from tfpreempt.core import events
from tfpreempt.core.journal import (
    MAX_LINE_BYTES,
    Journal,
    JsonLines,
    LineReader,
    journal_directory,
    parse_record,
    segments,
)


class FixedClock:
    def __init__(self, wall: float = 100.0, monotonic: float = 7.0) -> None:
        self.now = wall
        self._monotonic = monotonic

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self.now


NOTICE = events.Notice(
    source="signal:SIGTERM", worker=1, grace_seconds=None, received_at=3.0
)
EXIT = events.Exit(outcome=events.Outcome.COMMITTED, code=143, step=5)


def test_the_directory_of_a_journal_lasts(tmp_path: Path, synced: list[Path]) -> None:
    """Without a sync of its parents, a loss of power removes the files."""
    Journal(tmp_path / "new" / "journal", 0)
    assert sorted(synced) == [tmp_path, tmp_path / "new"]


def test_a_record_has_times_worker_incarnation_and_the_event(tmp_path: Path) -> None:
    directory = journal_directory(tmp_path)
    journal = Journal(directory, 1, FixedClock(), incarnation="ab-0")
    journal.record(NOTICE)
    journal.close()
    journal.close()

    assert directory == tmp_path / "journal"
    line = (directory / "worker-1.jsonl").read_text(encoding="utf-8")
    assert line.endswith("\n")
    assert json.loads(line) == {
        "wall": 100.0,
        "monotonic": 7.0,
        "worker": 1,
        "incarnation": "ab-0",
        "event": "notice",
        "source": "signal:SIGTERM",
        "grace_seconds": None,
        "received_at": 3.0,
        "detail": "",
    }


def test_a_value_that_cannot_be_copied_is_recorded_as_text(tmp_path: Path) -> None:
    """A user's notice source may have any value."""
    lock = threading.Lock()
    Journal(tmp_path, 0).record(dataclasses.replace(NOTICE, detail=lock))
    (record,) = read_journal(tmp_path)
    assert record["detail"] == str(lock)


def test_the_journal_of_a_url_is_in_its_scratch_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFPREEMPT_SCRATCH_DIR", str(tmp_path))
    monkeypatch.delenv("TFPREEMPT_JOURNAL_DIR", raising=False)
    found = journal_directory("gs://b/run")
    assert tmp_path in found.parents
    assert found.parent.name.startswith("gs-b-run-")
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(tmp_path / "j"))
    assert journal_directory("gs://b/run") == tmp_path / "j"
    assert journal_directory(found.parent) == tmp_path / "j"
    assert journal_directory("/local") == Path("/local/journal")


def test_runs_in_buckets_have_a_journal_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFPREEMPT_JOURNAL_DIR", raising=False)
    long = "gs://bucket/" + "x" * 500
    urls = ["gs://run-a", "gs://run/a", "s3://run/a", "gs://run/ä", long, long + "y"]
    assert len({journal_directory(url) for url in urls}) == len(urls)
    assert journal_directory("gs://b/run/") == journal_directory("gs://b/run")
    assert all(len(journal_directory(url).parent.name) < 100 for url in urls)


def test_commits_and_exits_are_synced_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = Journal(tmp_path, 0)
    journal.record(NOTICE)
    assert synced == []
    journal.record(EXIT)
    assert len(synced) == 1
    journal.close()


def test_an_incomplete_line_swallows_no_record_of_the_next_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "worker-0.jsonl"
    path.write_bytes(b'{"wall": 1.0, "event": "exit"}\n{"wall": 2.0, "ev')
    journal = Journal(tmp_path, 0, FixedClock())
    journal.record(EXIT)
    journal.close()
    assert [r["wall"] for r in read_journal(tmp_path)] == [1.0, 100.0]


@pytest.mark.parametrize(
    "line",
    [
        *(b"[1]", b'{"event": "x"}', b'{"wall": "x"}', b"\xff", b'{"wall": true}'),
        *(b'{"wall": 9e18}', b'{"wall": 9223372036854775808}', b'{"wall": -1}'),
    ],
)
def test_a_line_that_is_no_record_is_not_read(line: bytes) -> None:
    assert parse_record(line) is None


def test_a_pipe_in_place_of_a_journal_does_not_block_its_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "worker-0.jsonl")
    Journal(tmp_path, 0).record(EXIT)
    assert "Not a regular file" in caplog.text


def test_a_write_error_is_logged_once_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "journal").write_text("a file where the directory should be")
    journal = Journal(tmp_path / "journal", 0)
    with caplog.at_level(logging.WARNING):
        journal.record(NOTICE)
        journal.record(EXIT)
    assert len(caplog.records) == 1
    assert "cannot write the journal" in caplog.text


def test_a_full_disk_does_not_reach_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal = Journal(tmp_path, 0)
    journal.record(EXIT)
    journal.close()
    assert "No space left" in caplog.text


@pytest.mark.parametrize("place", ["the file", "the directory"])
def test_a_link_is_not_followed_but_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    mine, directory = tmp_path / "mine", tmp_path / "journal"
    mine.mkdir()
    (mine / "worker-0.jsonl").write_text("notes\n")
    if place == "the file":
        directory.mkdir()
        (directory / "worker-0.jsonl").symlink_to(mine / "worker-0.jsonl")
    else:
        directory.symlink_to(mine)
    journal = Journal(directory, 0)
    journal.record(EXIT)
    journal.record(EXIT)
    assert (mine / "worker-0.jsonl").read_text() == "notes\n"
    (said,) = caplog.messages
    assert "Links are not followed" in said


def test_lines_are_read_as_the_file_grows(tmp_path: Path, rng: random.Random) -> None:
    lines = [b"x" * rng.choice([0, 1, 7, 1 << 20, 1 << 21]) for _ in range(20)]
    text = b"".join(line + b"\n" for line in lines)
    path, reader, found = tmp_path / "lines", LineReader(), []
    with path.open("wb", buffering=0) as file, path.open("rb") as reading:
        while text:
            count = rng.randint(1, 1 << 21)
            file.write(text[:count])
            text = text[count:]
            found += reader.read_on(reading.fileno())
    assert found == [line[:MAX_LINE_BYTES] for line in lines]
    assert reader.rest == b""


def test_records_of_earlier_processes_are_read_if_no_other_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records name caches, whose unfinished files are deleted."""
    journal = Journal(tmp_path, 0)
    journal.record(events.CacheWrite(path="/data/cache", lock=7))
    journal.record(EXIT)

    def found() -> list[Any]:
        return [each["path"] for each in journal.read_earlier(events.CacheWrite)]

    assert found() == ["/data/cache"]
    for mode in (0o664, 0o646):
        journal.path.chmod(mode)
        assert found() == []
    journal.path.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert found() == []


def test_a_full_file_is_followed_by_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is lost or repeated, also if a restarted worker and its predecessor
    write at the same time."""
    monkeypatch.setattr("tfpreempt.core.journal.SEGMENT_BYTES", 1000)
    before, after = (Journal(tmp_path, 1, FixedClock()) for _ in range(2))
    other = Journal(tmp_path, 10, FixedClock())
    for number in range(70):
        journal = before if number < 30 or number % 5 == 0 else after
        journal.record(dataclasses.replace(EXIT, step=number))
        other.record(NOTICE)
    names = [path.name for path in segments(tmp_path / "worker-1.jsonl")]
    assert names[:2] == ["worker-1.jsonl", "worker-1.2.jsonl"]
    assert names[9] == "worker-1.10.jsonl"
    sizes = [(tmp_path / name).stat().st_size for name in names]
    assert min(sizes[:-1]) >= 1000
    assert max(sizes) < 1300
    records = Journal(tmp_path, 1).read_earlier(events.Exit)
    assert sorted(each["step"] for each in records) == list(range(70))


def test_a_file_with_the_highest_number_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program created the file: a run does not create a million files."""
    monkeypatch.setattr("tfpreempt.core.journal.SEGMENT_BYTES", 100)
    (tmp_path / "worker-0.999999.jsonl").write_bytes(b"{}\n" * 100)
    journal = Journal(tmp_path, 0)
    for step in range(3):
        journal.record(dataclasses.replace(EXIT, step=step))
    assert [each["step"] for each in journal.read_earlier(events.Exit)] == [0, 1, 2]


def test_the_records_of_a_file_that_others_can_write_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpreempt.core.journal.SEGMENT_BYTES", 1)
    journal = Journal(tmp_path, 0)
    for step in range(3):
        journal.record(dataclasses.replace(EXIT, step=step))
    (tmp_path / "worker-0.2.jsonl").chmod(0o666)
    assert [each["step"] for each in journal.read_earlier(events.Exit)] == [0, 2]


def test_a_missing_directory_is_not_created_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file system was unmounted: its path is now on another disk."""
    journal = Journal(tmp_path / "run" / "journal", 0)
    (tmp_path / "run").rename(tmp_path / "away")
    journal.record(EXIT)
    assert "No such file" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_short_write_is_closed_off_by_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    journal = Journal(tmp_path, 0, FixedClock())
    with monkeypatch.context() as short:
        short.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        journal.record(EXIT)
    journal.record(EXIT)
    journal.close()
    assert len(read_journal(tmp_path)) == 1


def test_records_of_many_threads_stay_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)

    def write() -> None:
        for _ in range(50):
            journal.record(NOTICE)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert len(read_journal(tmp_path)) == 200


def test_a_late_record_is_still_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    journal.record(NOTICE)
    journal.close()
    journal.record(EXIT)
    journal.close()
    assert len(read_journal(tmp_path)) == 2


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> int:
            return 4

    lines = JsonLines(tmp_path / "x.jsonl", FixedClock())
    lines.append({"step": Scalar(), "path": Path("/a")})
    lines.close()
    (record,) = read_journal(tmp_path)
    assert record["step"] == 4
    assert record["path"] == "/a"
