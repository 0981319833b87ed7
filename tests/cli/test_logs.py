"""Log files, their error lines, and the copy on the console."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import wait_until
from tfpreempt.cli.run import console
from tfpreempt.cli.run.console import OutputConsole
from tfpreempt.cli.run.logs import WorkerLog, pumped
from tfpreempt.core import contained
from tfpreempt.errors import ConfigurationError

TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    boom()
    ~~~~^^
ValueError: boom
"""


class Logs:
    """Creates logs in a directory; records failed writes."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "logs" / "worker-0.log"
        self.lost: list[str] = []
        self.made: list[WorkerLog] = []

    def make(
        self,
        *,
        size: int = 1 << 30,
        files: int = 3,
        console: OutputConsole | None = None,
        root: str = "",
    ) -> WorkerLog:
        log = WorkerLog(
            self.path,
            size=size,
            files=files,
            lost=lambda path, error: self.lost.append(f"{path.name}: {error.strerror}"),
            console=console,
            root=root,
        )
        self.made.append(log)
        return log

    def texts(self) -> list[str]:
        """The files' contents, the oldest first."""
        names = sorted(self.path.parent.glob("worker-0.log*"), reverse=True)
        return [name.read_text() for name in names]


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    logs = Logs(tmp_path)
    yield logs
    for log in logs.made:
        log.close()


@pytest.fixture
def log(logs: Logs) -> WorkerLog:
    return logs.make()


def write(log: WorkerLog, text: str) -> None:
    """Writes like the worker."""
    data = text.encode()
    while data:
        data = data[os.write(log.writing, data[:60_000]) :]
        log.take()


def test_parts_begin_on_a_line_of_their_own(log: WorkerLog) -> None:
    log.begin("first")
    write(log, "torn")
    log.end("second")
    lines = log.path.read_text().splitlines()
    assert lines[0].endswith(" first ===")
    assert lines[1] == "torn"
    assert lines[2].endswith(" second ===")


def test_a_later_supervisor_begins_on_a_line_of_its_own(logs: Logs) -> None:
    write(logs.make(), "torn")
    logs.make().begin("next")
    assert logs.path.read_text().startswith("torn\n=== ")


def test_the_last_traceback_of_this_part_is_found(log: WorkerLog) -> None:
    write(log, TRACE.replace("boom", "older"))
    log.begin("second")
    write(log, "step 1\n" + TRACE.replace("boom", "cause") + "\n" + TRACE + "bye\n")
    assert log.error_lines() == [*TRACE.splitlines(), "bye"]
    assert log.error_line() == "ValueError: boom"


def test_without_a_traceback_the_last_lines_are_the_error(log: WorkerLog) -> None:
    log.begin("part")
    write(log, "".join(f"line {i}\n" for i in range(50)))
    assert log.error_lines(limit=2) == ["line 48", "line 49"]
    assert log.error_line() == "line 49"


def test_a_silent_worker_has_no_error_lines(log: WorkerLog) -> None:
    log.begin("part")
    assert log.error_lines() == []
    assert log.error_line() == ""


def test_the_error_lines_need_no_file(log: WorkerLog) -> None:
    write(log, TRACE)
    log.path.unlink()
    assert log.error_lines()[-1] == "ValueError: boom"


def test_a_log_that_is_full_becomes_an_older_one(logs: Logs) -> None:
    log = logs.make(size=100, files=3)
    lines = [f"line {i:02}\n" for i in range(50)]
    write(log, "".join(lines[:25]))
    for line in lines[25:]:
        write(log, line)
    texts = logs.texts()
    assert len(texts) == 3
    assert "".join(lines).endswith("".join(texts))
    assert [len(text) for text in texts] == [96, 96, 16]
    assert logs.lost == []


def test_a_line_longer_than_a_log_is_cut(logs: Logs) -> None:
    write(logs.make(size=100, files=9), "x" * 250 + "\nend\n")
    assert "".join(logs.texts()) == "x" * 250 + "\nend\n"
    assert max(map(len, logs.texts())) == 100


def test_a_full_log_is_rotated(logs: Logs) -> None:
    write(logs.make(size=10, files=1), "one\ntwo\nthree\n")
    assert logs.texts() == ["three\n"]


def test_a_full_disk_does_not_disturb_a_worker(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, flags: int, **_: object) -> int:
        del path
        return os.open("/dev/full", flags & ~os.O_CREAT)

    monkeypatch.setattr(contained, "open_file", full)
    log = logs.make()
    log.begin("part")
    write(log, "a\n" * 100_000 + TRACE)
    assert set(logs.lost) == {"worker-0.log: No space left on device"}
    assert log.error_lines()[-1] == "ValueError: boom"
    monkeypatch.undo()  # room again
    write(log, "more\n")
    gap, more = logs.path.read_text().splitlines()
    assert "bytes of output lost" in gap
    assert more == "more"


def test_a_log_directory_that_vanishes_is_made_again(logs: Logs) -> None:
    log = logs.make()
    shutil.rmtree(logs.path.parent)
    write(log, "lost\n")
    assert logs.lost == ["worker-0.log: No such file or directory"]
    write(log, "there\n")
    assert logs.path.read_text().endswith("===\nthere\n")


def test_the_pump_empties_pipes_until_it_is_closed(logs: Logs) -> None:
    log = logs.make()
    with pumped([log]):
        for _ in range(100):
            os.write(log.writing, b"x" * 9_999 + b"\n")  # more than a pipe holds
    log.take()
    assert log.path.stat().st_size == 1_000_000


@pytest.mark.parametrize("name", ["logs", "logs/worker-0.log"])
@pytest.mark.parametrize("is_late", [False, True])
def test_no_link_leads_a_log_elsewhere(
    logs: Logs, tmp_path: Path, name: str, is_late: bool
) -> None:
    """Another user may write to the checkpoint directory, which contains the logs."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "worker-0.log").write_text("years of work\n")
    log = logs.make(root=str(tmp_path)) if is_late else None
    planted = tmp_path / name
    if is_late:
        planted.rename(tmp_path / "moved")
    planted.parent.mkdir(exist_ok=True)
    planted.symlink_to(mine if name == "logs" else mine / "worker-0.log")
    if log is None:
        with pytest.raises(ConfigurationError, match="Links are not followed"):
            logs.make(root=str(tmp_path))
    else:
        write(log, "lost\n")
        write(log, "lost\n")
        assert logs.lost[0] == "worker-0.log: Links are not followed here"
    assert (mine / "worker-0.log").read_text() == "years of work\n"


def test_a_log_directory_that_the_user_chose_may_be_a_link(
    logs: Logs, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "logs").symlink_to("scratch")
    write(logs.make(), "there\n")
    assert (tmp_path / "scratch" / "worker-0.log").read_text() == "there\n"


def test_an_unwritable_log_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--log-dir"):
        Logs(tmp_path / "file").make()


def test_whole_lines_are_copied_with_a_prefix(logs: Logs) -> None:
    stream = io.BytesIO()
    shown = OutputConsole("[w] ", stream)
    log = logs.make(console=shown)
    log.begin("part")
    write(log, "one\ntw")
    shown.flush()
    assert stream.getvalue() == b"[w] one\n"
    write(log, "o\n10%\r20%\r\nend")
    log.end("part ended")
    assert stream.getvalue() == b"[w] one\n[w] two\n[w] 20%\n[w] end\n"
    log.begin("another part")
    write(log, "last")
    shown.close()
    assert stream.getvalue().endswith(b"[w] end\n[w] last\n")


def test_a_closed_console_ends_nothing() -> None:
    stream = io.BytesIO()
    shown = OutputConsole("", stream)
    stream.close()
    shown.feed(b"line\n")
    shown.close()


class Terminal(io.BytesIO):
    """Accepts no bytes while it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: bytes) -> int:  # type: ignore[override]
        self.goes_on.wait(60)
        return super().write(text)


def test_a_stalled_console_stops_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_STALL_SECONDS", 0.01)
    terminal = Terminal()
    shown = OutputConsole("", terminal)
    for _ in range(20):
        shown.feed(b"x" * 999_999 + b"\n")
    terminal.goes_on.set()
    monkeypatch.undo()
    wait_until(lambda: bool(terminal.getvalue()), "the terminal to go on")
    shown.flush(60)
    shown.feed(b"more\n")
    shown.close()
    lines = terminal.getvalue().decode().splitlines()
    assert 3 < lines.count("x" * 999_999) < 20
    assert [each for each in lines if each[:1] not in ("x", "")] == [
        "(tfpreempt: the console stands still; what is missing is in the log)",
        "more",
    ]


def test_the_error_lines_of_a_worker_are_its_last_lines(logs: Logs) -> None:
    log = logs.make()
    log.begin("worker 0 starts")
    log.add_line("worker 0 cannot be started: Resource temporarily unavailable")
    assert log.error_lines() == [
        "worker 0 cannot be started: Resource temporarily unavailable"
    ]
    assert "cannot be started" in logs.texts()[-1]


@pytest.mark.slow  # waits in real time
@pytest.mark.timeout(30)  # half a second for each would be 100
def test_a_stalled_console_is_waited_for_once() -> None:
    terminal = Terminal()
    shown = OutputConsole("", terminal)
    shown.feed(b"line\n")
    for _ in range(200):
        shown.flush()
    shown.close()
    terminal.goes_on.set()
