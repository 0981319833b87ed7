"""Log files, their error lines, and the copy on the console."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tfpreempt.cli._logs import Echo, WorkerLog
from tfpreempt.errors import ConfigurationError

TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    boom()
    ~~~~^^
ValueError: boom
"""


@pytest.fixture
def log(tmp_path: Path) -> WorkerLog:
    return WorkerLog(tmp_path / "logs" / "worker-0.log")


def write(log: WorkerLog, text: str) -> None:
    with log.path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_parts_begin_on_a_line_of_their_own(log: WorkerLog) -> None:
    log.mark("first")
    write(log, "torn")
    log.mark("second")
    lines = log.path.read_text().splitlines()
    assert lines[0].endswith(" first ===")
    assert lines[1] == "torn"
    assert lines[2].endswith(" second ===")
    assert log.start == log.path.stat().st_size


def test_the_last_traceback_of_this_part_is_found(log: WorkerLog) -> None:
    write(log, TRACE.replace("boom", "older"))
    log.mark("second")
    write(log, "step 1\n" + TRACE.replace("boom", "cause") + "\n" + TRACE + "bye\n")
    assert log.error_lines() == [*TRACE.splitlines(), "bye"]
    assert log.error_line() == "ValueError: boom"


def test_without_a_traceback_the_last_lines_are_the_error(log: WorkerLog) -> None:
    log.mark("part")
    write(log, "".join(f"line {i}\n" for i in range(50)))
    assert log.error_lines(limit=2) == ["line 48", "line 49"]


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ("tfpreempt: goes on at step 1008", ""),
        ("SyntaxError: invalid syntax", "SyntaxError: invalid syntax"),
        ("python: can't open file 'x.py'", "python: can't open file 'x.py'"),
        ("1/1 - 0s - loss: 0.34 - mean_squared_error: 0.12", ""),
        ("Fatal: no space", "Fatal: no space"),
        ("x.errors_impl.InternalError: no", "x.errors_impl.InternalError: no"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_last_line_is_the_error_only_if_it_says_so(
    last: str, error: str, log: WorkerLog
) -> None:
    log.mark("part")
    write(log, f"error before\n{last}\n")
    assert log.error_line() == error


def test_a_silent_worker_has_no_error_lines(log: WorkerLog) -> None:
    log.mark("part")
    assert log.error_lines() == []
    assert log.error_line() == ""


def test_a_log_file_that_vanished_is_not_an_error(log: WorkerLog) -> None:
    log.path.unlink()
    assert log.error_lines() == []


def test_an_unwritable_log_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--log-dir"):
        WorkerLog(tmp_path / "file" / "worker-0.log")


def test_whole_lines_are_copied_with_a_prefix(log: WorkerLog) -> None:
    write(log, "before\n")
    console = io.StringIO()
    echo = Echo(log.path, log.path.stat().st_size, "[w] ", console)
    write(log, "one\ntw")
    echo.pump()
    assert console.getvalue() == "[w] one\n"
    write(log, "o\n10%\r20%\r\nend")
    echo.close()
    assert console.getvalue() == "[w] one\n[w] two\n[w] 20%\n[w] end\n"


def test_a_closed_console_ends_nothing(log: WorkerLog) -> None:
    console = io.StringIO()
    echo = Echo(log.path, 0, "", console)
    console.close()
    write(log, "line\n")
    echo.pump()
    echo.close()
