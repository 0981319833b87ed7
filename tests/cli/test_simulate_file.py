"""`tfpreempt simulate --file`: the file is there for a while, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import wait_until
from tfpreempt.cli import main

pytestmark = pytest.mark.slow  # starts interpreters

ROOT = Path(__file__).parents[2]


def notify(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def test_a_file_that_disappears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = tmp_path / "stop"
    held: list[tuple[float, str]] = []

    def wait(ends: object, seconds: float) -> None:
        if seconds:  # 0: received data are dropped at the end
            held.append((seconds, stop.read_text()))

    monkeypatch.setattr(signal, "sigtimedwait", wait)
    assert notify("--file", stop).exit_code == 0
    assert held == [(5.0, "tfpreempt simulate\n")]
    assert not stop.exists()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
    ],
)
def test_the_file_is_removed_however_the_command_ends(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Otherwise each restart of the job would find the file, and exit."""
    stop = tmp_path / "stop"
    process = subprocess.Popen(
        [sys.executable, "-m", "tfpreempt", "simulate", "--file", stop],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        wait_until(stop.exists, "the notice file")
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert f"received {number.name}: removed {stop}" in output
    assert not stop.exists()


def test_a_file_that_is_there_already_is_kept(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    stop.write_text("real")
    result = notify("--file", stop)
    assert result.exit_code == 1
    assert "exists already" in result.output
    assert stop.read_text() == "real"


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    result = notify("--file", tmp_path / "missing" / "stop")
    assert result.exit_code == 1
    assert "cannot be created (No such file or directory)" in result.output
