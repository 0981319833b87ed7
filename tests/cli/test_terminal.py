"""No text of others that a command prints can steer the terminal."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.cli.report.scripted import a_run
from tests.cli.test_simulate import Start, records, start  # noqa: F401  (a fixture)
from tests.fakes.clock import FakeClock
from tfpreempt import cli
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.cli import main
from tfpreempt.cli.run.console import OutputConsole, StatusLine
from tfpreempt.cli.run.reporter import Reporter
from tfpreempt.cli.terminal import LogHandler
from tfpreempt.core.events import Outcome
from tfpreempt.core.journal import JsonLines, journal_directory
from tfpreempt.core.log_output import plain
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    _pack,
    status_path,
)

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x7f"
NAME = f"run{ESCAPES}x"  # of a directory
TEXT = f"{ESCAPES}\udcff\nstep 9 is committed"  # in a journal, where JSON carries it


def hostile(value: Any, untouched: tuple[str, ...]) -> Any:
    """Returns a journal's value in which each text ends with escape codes."""
    if isinstance(value, str):
        return value + TEXT
    if isinstance(value, list):
        return [hostile(each, untouched) for each in value]
    if isinstance(value, dict):
        return {
            (name if name in untouched else name + TEXT): (
                each if name in untouched else hostile(each, untouched)
            )
            for name, each in value.items()
        }
    return value


def spoil(path: Path, untouched: tuple[str, ...] = ()) -> None:
    """Puts escapes into the values of a file of JSON lines."""
    spoiled = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("event", *untouched):
                record[name] = hostile(value, untouched)
        spoiled.append(json.dumps(record) + "\n")
    path.write_text("".join(spoiled))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint directory with commits and a journal; all texts are hostile."""
    directory = tmp_path / NAME
    saver = open_directory(directory, OwnContents())
    for step in (1, 2):
        save(saver, step)
    (directory / "2" / "COMMITTED").unlink()
    (directory / f"{NAME}.tfpreempt").mkdir()
    a_run().write(directory / "journal")
    for path in (directory / "journal").iterdir():
        # Records of one start, with a tier that no version of tfpreempt writes.
        spoil(path, ("incarnation", "supervisor", "outcome", "start", "path"))
    upload = MirrorStatus(uri=f"gs://b/{NAME}", last_error=NAME)
    now = WorkerStatus(
        at=2e9, worker=0, num_workers=1, host=NAME, pid=1,
        doing=WorkerActivity.TRAINING, step=9, upload=upload,
    )  # fmt: skip
    status_path(directory / "journal", 0).write_bytes(_pack(now))
    return directory


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "500"})


def unprintable(output: str) -> set[str]:
    return {c for c in output if not c.isprintable()} - {"\n"}


@pytest.mark.parametrize("place", ["run", "above", "missing"])
@pytest.mark.parametrize(
    "command",
    [
        "report",
        "report --json",
        "report --html {place}/none/page.html",
        "status",
        "status --json",
        "inspect --states --verify",
        "inspect --mirror {place}/mirror",
        "inspect --json",
        "verify",
        "verify --json",
        "doctor --size 1KiB",
        "doctor --size 1KiB --json",
        "simulate",
        "notify --file {place}/none/file --",
        "notify --metadata http://{place} --",
        pytest.param(
            "run --checkpoint-dir {place} --metrics-file {place}/none/m -- true",
            marks=pytest.mark.slow,  # starts a process
        ),
        f"{ESCAPES}",
        f"report --{ESCAPES}",
        f"report {ESCAPES}",
        f"doctor --platform {ESCAPES}",
    ],
)
def test_no_command_prints_escapes(run: Path, command: str, place: str) -> None:
    named = {"run": run, "above": run.parent, "missing": run / NAME}[place]
    words = [word.format(place=named) for word in command.split(" ")]
    if words[-1] == "--":
        words.pop()
    elif "--" not in words:
        words.append(str(named))
    result = call(*words)
    assert result.output
    assert unprintable(result.output) == set()
    is_clean_exit = result.exception is None or isinstance(result.exception, SystemExit)
    assert is_clean_exit, result.exception


def test_a_journal_fakes_no_line(run: Path) -> None:
    shown = call("report", run).stdout
    assert "from memory\\x1b]0;owned\\x07" in shown
    assert not [each for each in shown.splitlines() if each.startswith("step 9 is")]


@pytest.mark.slow  # starts a process
def test_follow_prints_no_escapes(start: Start, tmp_path: Path) -> None:  # noqa: F811
    spoiled = tmp_path / "spoiled"
    spoiled.write_text(records(Outcome.FAILED))
    spoil(spoiled, ("outcome",))
    start(1, says=spoiled.read_text())
    result = call("simulate", tmp_path, "--worker", "1", "--follow", "30")
    assert "failed at step 7: ValueError: why\\x1b]0;owned" in result.output
    assert unprintable(result.output) == set()
    assert "\nstep 9 is committed" not in result.output
    assert journal_directory(tmp_path).exists()


def test_log_records_and_errors_of_a_command_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    def say() -> None:
        logging.getLogger("tfpreempt.somewhere").warning("lost %s", NAME)
        raise click.ClickException(f"no {NAME}")

    monkeypatch.setattr(type(main), "get_command", lambda *_: say)
    monkeypatch.setattr(logging.getLogger("tfpreempt"), "handlers", [])
    result = call("say")
    assert result.stderr == (
        f"tfpreempt: WARNING: lost {plain(NAME)}\nError: no {plain(NAME)}\n"
    )
    assert not logging.getLogger("tfpreempt").handlers


def test_a_closed_terminal_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=False) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        record = logging.makeLogRecord({"msg": "a disk is full"})
        LogHandler(logging.WARNING).handle(record)
        # For the flush of stream.close().
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_the_supervisors_lines_are_escaped(tmp_path: Path) -> None:
    stream = io.BytesIO()
    console = OutputConsole("", stream)
    reporter = Reporter(JsonLines(tmp_path / "j", FakeClock()), "s", console)
    reporter.log_lost(Path(f"{NAME}\udcff\nfaked"), OSError(NAME))
    console.close()
    assert unprintable(stream.getvalue().decode()) == set()
    assert stream.getvalue().count(b"\n") == 1


def test_the_status_line_is_escaped() -> None:
    controller, terminal = os.openpty()
    with open(terminal, "wb", buffering=0) as stream:
        StatusLine(stream).show(NAME)
        told = os.read(controller, 1000)
    os.close(controller)
    assert told.decode() == plain(NAME)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 日本", "plain é 日本"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\tc\r", "a\\nb\tc\\r"),
        ("\udcff\u202e", "\\udcff\\u202e"),
    ],
)
def test_plain(text: str, expected: str) -> None:
    assert plain(text) == expected


# Files that print without `terminal` and `tables`, with the reason.
PRINTERS = {
    "terminal.py": "is the way to print",
    "tables.py": "is the way to print tables",
    "run/exec_with_pdeathsig.py": "is the worker's process, with its own output",
    "demo/worker.py": "is written as a user's program",
}


def test_nothing_else_prints() -> None:
    folder = Path(cli.__file__).parent
    found = {}
    for path in folder.rglob("*.py"):
        name = str(path.relative_to(folder))
        source = path.read_text("utf-8")
        calls = [c for c in ast.walk(ast.parse(source)) if isinstance(c, ast.Call)]
        names = {ast.unparse(each.func) for each in calls}
        printers = {"print", "click.echo", "click.secho", "rich.print"} & names
        if printers or "from rich.console import Console" in source:
            found[name] = printers
    assert found.keys() <= PRINTERS.keys(), found
