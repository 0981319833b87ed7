"""`tfpreempt probe`: reports about the workers of a container to a controller."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tfpreempt.cli import main
from tfpreempt.cli.probe.progress import trainer_status
from tfpreempt.core.clock import process_seconds
from tfpreempt.core.events import Exit, Outcome, Restored
from tfpreempt.core.journal import Journal
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    _pack,
    status_path,
)

pytestmark = pytest.mark.timeout(30)

INIT = 1
"""The process id of a process that has run for long on each machine."""


def status(
    worker: int = 0, *, age: float = 0.0, still: float = 0.0, **more: Any
) -> WorkerStatus:
    """A status that is so many seconds old, with the newest step before it."""
    at = time.time() - age
    values: dict[str, Any] = {
        "at": at, "worker": worker, "num_workers": 2, "host": socket.gethostname(),
        "pid": os.getpid(), "doing": WorkerActivity.TRAINING, "step": 940,
        "steps_per_second": 12.4, "stepped_at": at - still,
    }  # fmt: skip
    return WorkerStatus(**values | more)


def write(directory: Path, now: WorkerStatus) -> None:
    """Writes a status file, as the worker does."""
    path = status_path(directory / "journal", now.worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_pack(now))


def record(directory: Path, *events: Any) -> None:
    journal = Journal(directory / "journal", 0)
    for event in events:
        journal.record(event)
    journal.close()


def probe(condition: str, directory: Path, *more: object) -> Result:
    words = ["probe", condition, str(directory), *map(str, more)]
    return CliRunner().invoke(main, words)


def codes(directory: Path, *more: object) -> tuple[int, int]:
    """The exit statuses of both probes."""
    ready, alive = (probe(each, directory, *more) for each in ("ready", "alive"))
    return ready.exit_code, alive.exit_code


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (0, 0)),
        ({"doing": WorkerActivity.WAITING}, (0, 0)),
        ({"pid": INIT, "age": 25}, (0, 0)),
        ({"pid": INIT, "age": 40}, (1, 1)),
        ({"host": "another-pod", "age": 40}, (1, 0)),
        ({"age": 1e6}, (1, 0)),
        ({"still": 1000}, (0, 0)),
        ({"still": 2000}, (1, 1)),
        ({"still": 2000, "doing": WorkerActivity.SAVING}, (0, 0)),
        ({"still": 2000, "doing": WorkerActivity.WAITING}, (0, 0)),
    ],
    ids=[
        "trains", "waits", "reported", "is silent", "is in another pod",
        "is of an earlier process", "makes a long step", "makes no step",
        "saves long", "waits long",
    ],
)  # fmt: skip
def test_ready_and_alive(
    tmp_path: Path, more: dict[str, Any], expected: tuple[int, int]
) -> None:
    write(tmp_path, status(**more))
    assert codes(tmp_path, "--hang-timeout", 1800) == expected


def test_before_the_first_step_a_container_is_alive_and_not_ready(
    tmp_path: Path,
) -> None:
    assert codes(tmp_path / "not yet made") == (1, 0)
    record(tmp_path, Restored(path=None, step=0, sequence=1, world_size=2))
    assert codes(tmp_path) == (1, 0)
    assert probe("alive", tmp_path).stdout == "no worker of this container trains\n"


@pytest.mark.slow  # starts a process
def test_an_id_that_now_belongs_to_another_process_is_no_worker(tmp_path: Path) -> None:
    """In a container, the program always has process id 1."""
    seconds = process_seconds()
    assert seconds is not None
    write(tmp_path, status(age=seconds + 2))
    assert codes(tmp_path) == (1, 0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write(tmp_path, status(pid=ended.pid))
    assert codes(tmp_path) == (1, 0)


def test_a_program_that_has_ended_training_is_alive(tmp_path: Path) -> None:
    """It may export the model for a long time, without a status file."""
    begun = Restored(path=None, step=0, sequence=1, world_size=2)
    record(tmp_path, begun, Exit(outcome=Outcome.FINISHED, code=None, step=940))
    write(tmp_path, status(pid=INIT, age=40))
    assert codes(tmp_path) == (1, 0)
    write(tmp_path, status())  # the last uploads took until now
    assert codes(tmp_path) == (1, 0)
    write(tmp_path, status(pid=INIT, age=40))
    record(tmp_path, begun)  # a second handler in the same process
    assert codes(tmp_path) == (1, 1)


def test_a_worker_that_trains_on_after_its_exit_is_ready(tmp_path: Path) -> None:
    """Its exit function returned."""
    begun = Restored(path=None, step=0, sequence=1, world_size=2)
    left = Exit(outcome=Outcome.COMMITTED, code=143, step=940)
    record(tmp_path, begun, left)
    write(tmp_path, status(step=940))
    assert codes(tmp_path) == (1, 0)
    write(tmp_path, status(step=941))
    assert codes(tmp_path) == (0, 0)
    write(tmp_path, status(step=941, still=2000))
    assert codes(tmp_path, "--hang-timeout", 1800) == (1, 1)
    record(tmp_path, Exit(outcome=Outcome.FINISHED, code=0, step=941))
    assert codes(tmp_path) == (1, 0)


def test_one_silent_worker_of_several_is_named(tmp_path: Path) -> None:
    write(tmp_path, status(0))
    write(tmp_path, status(1, pid=INIT, age=40))
    told = probe("alive", tmp_path)
    assert (told.exit_code, told.stdout[:25]) == (1, "worker 1 has not reported")
    assert codes(tmp_path, "--worker", 0) == (0, 0)
    write(tmp_path, status(1, step=939))
    told = probe("ready", tmp_path)
    assert told.stdout == "worker 0: training, step 940; worker 1: training, step 939\n"


def test_an_unreadable_status_is_no_reason_to_restart(tmp_path: Path) -> None:
    write(tmp_path, status())
    status_path(tmp_path / "journal", 0).write_bytes(b"half a li")
    assert codes(tmp_path) == (1, 0)


@pytest.mark.parametrize(
    ("total", "step", "rate", "percent", "seconds"),
    [
        (None, 940, 12.4, None, None),
        (10_000, 4500, 12.4, 45, 444),
        (10_000, 9_999, 12.4, 99, 1),
        (10_000, 10_000, 12.4, 100, 0),
        (10_000, 12_000, 12.4, 100, 0),
        (10_000, 0, None, 0, None),
        (10**9, 1, 1e-9, 0, 2**31 - 1),
    ],
)
def test_the_progress(
    total: int | None,
    step: int,
    rate: float | None,
    percent: int | None,
    seconds: int | None,
) -> None:
    now = status(step=step, steps_per_second=rate, at=1_800_000_000.7)
    told = trainer_status(now, total)["trainerStatus"]
    assert told.get("progressPercentage") == percent
    assert told.get("estimatedRemainingSeconds") == seconds
    assert told["lastUpdatedTime"] == "2027-01-15T08:00:00+00:00"
    assert {"name": "step", "value": str(step)} in told["metrics"]


def test_the_progress_is_written_while_a_worker_trains(tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    options = ("--total-steps", 9400, "--progress-file", file)
    assert probe("ready", tmp_path, *options).exit_code == 1
    assert not file.exists()
    write(tmp_path, status())
    assert probe("ready", tmp_path, *options).exit_code == 0
    told = json.loads(file.read_text())
    assert told["trainerStatus"]["progressPercentage"] == 10
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("progress.json?*")]


def test_no_link_of_another_user_is_followed_to_write_the_progress(
    tmp_path: Path,
) -> None:
    file, elsewhere = tmp_path / "progress.json", tmp_path / "thesis"
    elsewhere.write_text("years of work")
    for name in (".progress.json.part", f"progress.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(elsewhere)
    write(tmp_path, status())
    assert probe("ready", tmp_path, "--progress-file", file).exit_code == 0
    assert "trainerStatus" in json.loads(file.read_text())
    assert elsewhere.read_text() == "years of work"


def test_a_report_that_fails_changes_no_answer(tmp_path: Path) -> None:
    write(tmp_path, status())
    told = probe("ready", tmp_path, "--progress-file", tmp_path / "none/progress.json")
    assert (told.exit_code, "progress was not reported" in told.stderr) == (0, True)
    told = probe("ready", tmp_path, "--trainjob")  # without Kubeflow's variables
    assert told.exit_code == 0
    assert "KUBEFLOW_TRAINER_SERVER_TOKEN" in told.stderr


class TrainerServer(http.server.BaseHTTPRequestHandler):
    """Answers as Kubeflow Trainer does, by the token."""

    requests: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_known = self.headers["Authorization"] == "Bearer of worker 0"
        if is_known:
            self.requests.append((self.path, body))
        self.send_response(200 if is_known else 403)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Returns an HTTPS server with its own certificate, and the accepted requests."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    files = [str(tmp_path / name) for name in ("key.pem", "ca.crt", "token")]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", files[0], "-out", files[1]),
        ],
        check=True,
        capture_output=True,
    )
    Path(files[2]).write_text("of worker 0\n")
    TrainerServer.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TrainerServer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"https://127.0.0.1:{server.server_port}/status"
    for name, value in (("URL", address), ("CA_CERT", files[1]), ("TOKEN", files[2])):
        monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{name}", value)
    try:
        yield TrainerServer.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow  # starts openssl
def test_worker_0_sends_the_progress(
    tmp_path: Path, trainer: list[tuple[str, dict[str, Any]]]
) -> None:
    run = tmp_path / "run"
    write(run, status(0))
    write(run, status(1))
    told = probe("ready", run, "--total-steps", 1000, "--trainjob")
    assert (told.exit_code, told.stderr) == (0, "")
    [(path, body)] = trainer
    assert path == "/status"
    assert body["trainerStatus"]["progressPercentage"] == 94
    # Kubernetes replaces the token; here, by one that the server refuses.
    (tmp_path / "token").write_text("of another job")
    told = probe("ready", run, "--trainjob")
    assert (told.exit_code, "403" in told.stderr) == (0, True)
    assert len(trainer) == 1
