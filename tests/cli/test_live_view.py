"""The live view of `tfpreempt run`: a line on a terminal, and metrics."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
import termios
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.conftest import Run, wait_until
from tests.ports import free_ports
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.cli.run.console import OutputConsole, StatusLine, status_line
from tfpreempt.cli.status import metrics
from tfpreempt.cli.status.metrics import parse_address
from tfpreempt.cli.status.run_status import ReportedState, RunStatus, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]  # real servers, and terminals

ERASE = b"\r\x1b[2K"

Samples = dict[tuple[str, ...], float]


def samples(text: str) -> Samples:
    """Values by the metric's name and its labels in their order, but for the run's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = {k: v for k, v in each.labels.items() if k != "run"}
            found[(each.name, *labels.values())] = each.value
    return found


def measured(status: RunStatus) -> Samples:
    return samples(generate_latest(metrics.registry("r", lambda: status)).decode())


# --- metrics --------------------------------------------------------------------------


def test_the_alerts_of_the_page_exclude_finished_runs() -> None:
    """The file of --metrics-file stays, and its times grow old."""
    page = Path(__file__).parents[2] / "docs" / "live.md"
    [block] = re.findall(r"```promql\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    alarms = block.strip().split("\n\n")
    done = Worker(worker=0, state=ReportedState.FINISHED, step=1, stepped_at=1.0)
    status = RunStatus(at=9e9, workers=[done], commit_step=1, committed_at=1.0)
    known = measured(status)
    for alarm in alarms:
        assert " unless on (instance, run" in alarm
        assert set(re.findall(r"tfpreempt_\w+", alarm)) <= {key[0] for key in known}
        assert 'tfpreempt_worker_state{state="finished"}' in alarm
    assert len(alarms) == 2
    assert known["tfpreempt_worker_state", "finished", "0"] == 1


def test_the_state_of_a_run_as_metrics() -> None:
    upload = MirrorStatus(
        uri="gs://b/r",
        mirrored_step=4,
        pending=1,
        sent_bytes=3,
        total_bytes=7,
        error_count=2,
    )
    workers = [
        Worker(
            worker=0,
            state=ReportedState.SAVING,
            since=1e9,
            step=12,
            steps_per_second=2.5,
            stepped_at=998.0,
            noticed_at=999.0,
            deadline=1030.5,
            upload=upload,
        ),
        Worker(worker=1, state=ReportedState.STARTING),
    ]
    found = measured(
        RunStatus(
            at=1000.0,
            workers=workers,
            commits=3,
            commit_step=8,
            committed_at=990.0,
            restarts={"preemption": 2, "stopped": 1},
            bad_steps=4,
        )
    )
    states = {key: value for key, value in found.items() if "worker_state" in key[0]}
    assert {key for key, value in states.items() if value} == {
        ("tfpreempt_worker_state", "saving", "0"),
        ("tfpreempt_worker_state", "starting", "1"),
    }
    assert {key: value for key, value in found.items() if key not in states} == {
        ("tfpreempt_step", "0"): 12,
        ("tfpreempt_steps_per_second", "0"): 2.5,
        ("tfpreempt_last_step_timestamp_seconds", "0"): 998.0,
        ("tfpreempt_last_report_timestamp_seconds", "0"): 1e9,
        ("tfpreempt_notice_timestamp_seconds", "0"): 999.0,
        ("tfpreempt_notice_deadline_timestamp_seconds", "0"): 1030.5,
        ("tfpreempt_commits_total",): 3,
        ("tfpreempt_last_commit_timestamp_seconds",): 990.0,
        ("tfpreempt_last_commit_step",): 8,
        ("tfpreempt_restarts_total", "preemption"): 2,
        ("tfpreempt_restarts_total", "stopped"): 1,
        ("tfpreempt_restarts_total", "failure"): 0,
        ("tfpreempt_restarts_total", "hang"): 0,
        ("tfpreempt_bad_steps_total",): 4,
        ("tfpreempt_uploaded_step",): 4,
        ("tfpreempt_upload_pending_commits",): 1,
        ("tfpreempt_upload_sent_bytes",): 3,
        ("tfpreempt_upload_size_bytes",): 7,
        ("tfpreempt_upload_errors_total",): 2,
    }


def test_unknown_values_are_left_out() -> None:
    found = measured(RunStatus(at=1.0, workers=[]))
    assert {key[0] for key in found} == {
        "tfpreempt_bad_steps_total",
        "tfpreempt_commits_total",
        "tfpreempt_restarts_total",
    }


def test_runs_of_one_machine_have_other_labels() -> None:
    """Otherwise node_exporter refuses the files."""
    status = RunStatus(at=1.0, workers=[])
    texts = [
        generate_latest(metrics.registry(name, lambda: status)).decode()
        for name in ("/ckpt/a", "/ckpt/b")
    ]
    lines = [
        line for text in texts for line in text.splitlines() if not line.startswith("#")
    ]
    keys = [line.rpartition(" ")[0] for line in lines]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("", None),
        ("0", None),
        ("70000", None),
        ("here:", None),
        ("::1:80", None),
    ],
)
def test_where_metrics_are_served(text: str, address: tuple[str, int] | None) -> None:
    assert parse_address(text) == address


def empty() -> RunStatus:
    return RunStatus(at=1.0, workers=[])


@contextlib.contextmanager
def served(timeout: float, look: Callable[[], RunStatus] = empty) -> Iterator[int]:
    """A context with the port that metrics are served at."""
    [port] = free_ports(1)
    made = metrics.registry("r", look)
    with metrics.served("127.0.0.1", port, made, timeout=timeout):
        yield port


def test_connections_that_ask_nothing_use_up_no_descriptors() -> None:
    with served(timeout=60.0) as port, contextlib.ExitStack() as ends:
        idle = [
            ends.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(100)
        ]
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"tfpreempt_commits_total" in answer.read()
        assert [each.recv(1) for each in idle[:-16]] == [b""] * 84  # ended


def test_a_client_that_sends_nothing_is_not_waited_for() -> None:
    with (
        served(timeout=0.05) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as idle,
    ):
        assert idle.recv(1) == b""


def test_an_error_of_the_metrics_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def look() -> RunStatus:
        raise ValueError("no such state")

    with served(timeout=60.0, look=look) as port, contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    assert "no such state" in caplog.text


WAITS = """
if restart == 0:
    sys.exit(143)
until_told()
"""


@pytest.mark.slow
def test_a_run_is_scraped_and_written_to_a_file(supervised: Run) -> None:
    [port] = free_ports(1)
    options = ["--metrics-port", f"127.0.0.1:{port}", "--metrics-file", "run.prom"]
    supervised.start(WAITS, "--workers", "2", *options)
    supervised.wait_told("ready-0-1")
    supervised.wait_recorded("restarted")  # written after the workers were started
    file = supervised.directory / "run.prom"
    assert file.exists()  # from the start on
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain")
    found = samples(text)
    assert found["tfpreempt_restarts_total", "preemption"] == 1
    assert found["tfpreempt_worker_state", "starting", "1"] == 1
    assert f'run="{supervised.directory}/ckpt"' in text
    supervised.signal(signal.SIGTERM)
    assert supervised.finish()[0] == 143
    found = samples(file.read_text())  # as it ended
    assert found["tfpreempt_worker_state", "down", "0"] == 1
    assert list(supervised.directory.glob("run.prom*")) == [file]


@pytest.mark.slow
def test_a_port_that_is_taken_is_refused(supervised: Run) -> None:
    [port] = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        code, _, err = supervised.run("", "--metrics-port", f"127.0.0.1:{port}")
    assert code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in err


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_refused(supervised: Run) -> None:
    code, _, err = supervised.run("", "--metrics-file", "nowhere/run.prom")
    assert code == 2
    assert "Cannot write --metrics-file 'nowhere/run.prom'" in err


@pytest.mark.slow
def test_a_file_that_cannot_be_written_later_ends_nothing(supervised: Run) -> None:
    program = "import shutil; shutil.rmtree('metrics')"
    (supervised.directory / "metrics").mkdir()
    code, _, err = supervised.run(program, "--metrics-file", "metrics/run.prom")
    assert code == 0
    assert err.count("cannot write the metrics to metrics/run.prom") == 1


# --- the line -------------------------------------------------------------------------


class Terminal:
    """Two descriptors of a terminal, and the written text."""

    def __init__(self, columns: int) -> None:
        self.ours, self.theirs = os.openpty()
        fcntl.ioctl(
            self.theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0)
        )
        self.stream = os.fdopen(self.theirs, "wb", buffering=0)
        os.set_blocking(self.ours, False)
        self.written = b""

    def read(self) -> bytes:
        while True:
            try:
                self.written += os.read(self.ours, 1 << 16)
            except (BlockingIOError, OSError):
                return self.written

    def close(self) -> None:
        self.stream.close()
        os.close(self.ours)


@pytest.fixture
def make_terminal(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[int], Terminal]:
    monkeypatch.setenv("TERM", "xterm")

    def make(columns: int = 80) -> Terminal:
        made = Terminal(columns)
        request.addfinalizer(made.close)
        return made

    return make


def test_output_is_printed_above_the_line(
    make_terminal: Callable[..., Terminal],
) -> None:
    terminal = make_terminal()
    line = status_line(terminal.stream)
    assert line is not None
    consoles = [OutputConsole(prefix, terminal.stream, line) for prefix in ("", "[w] ")]
    line.show("step 1")
    for each in consoles:
        each.feed(b"said\n")
        each.flush()
    line.show("step 2")
    line.show("step 2")
    line.show("")
    for each in consoles:
        each.close()
    assert terminal.read() == (
        b"step 1"
        + (ERASE + b"said\r\nstep 1")
        + (ERASE + b"[w] said\r\nstep 1")
        + (ERASE + b"step 2")
        + ERASE
    )


def test_nothing_is_drawn_within_a_line_of_others(
    make_terminal: Callable[..., Terminal],
) -> None:
    terminal = make_terminal()
    line = StatusLine(terminal.stream)
    line.show("step 1")
    line.print(terminal.stream, b"half a ")
    line.show("step 2")
    line.print(terminal.stream, b"line\n")
    assert terminal.read() == b"step 1" + ERASE + b"half a line\r\nstep 2"


def test_a_long_line_is_cut(make_terminal: Callable[..., Terminal]) -> None:
    terminal = make_terminal(20)
    StatusLine(terminal.stream).show("x" * 20)
    assert terminal.read() == b"x" * 16 + b"..."


def test_a_pipe_and_a_dumb_terminal_get_none(
    make_terminal: Callable[..., Terminal],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert status_line(file) is None
    monkeypatch.setenv("TERM", "dumb")
    assert status_line(make_terminal().stream) is None


@pytest.mark.slow
def test_a_run_on_a_terminal(
    supervised: Run, make_terminal: Callable[..., Terminal]
) -> None:
    terminal = make_terminal(200)
    name = os.ttyname(terminal.stream.fileno())
    wrapper = ["sh", "-c", f'exec "$@" >{name} 2>{name}', "sh"]
    supervised.start("until_told()", environment={"TERM": "xterm"}, wrapper=wrapper)
    supervised.wait_told("ready-0-0")
    wait_until(lambda: b"| no commit yet" in terminal.read(), "the line")
    supervised.signal(signal.SIGTERM)
    code, out, err = supervised.finish()
    assert (code, out, err) == (143, "", "")
    said = terminal.read().decode()
    assert "tfpreempt: received SIGTERM" in said
    assert ERASE.decode() in said.rpartition("no commit yet")[2]  # the line has gone


@pytest.mark.slow
def test_a_stalled_terminal_does_not_delay_the_end(
    supervised: Run, make_terminal: Callable[..., Terminal]
) -> None:
    terminal = make_terminal()
    name = os.ttyname(terminal.stream.fileno())
    wrapper = ["sh", "-c", f'exec "$@" >{name} 2>{name}', "sh"]
    supervised.start("until_told()", environment={"TERM": "xterm"}, wrapper=wrapper)
    supervised.wait_told("ready-0-0")
    wait_until(lambda: b"no commit yet" in terminal.read(), "the line")
    termios.tcflow(terminal.theirs, termios.TCOOFF)  # like Ctrl-S
    supervised.signal(signal.SIGTERM)
    assert supervised.finish()[0] == 143
