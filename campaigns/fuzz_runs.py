"""Targets of the fuzz campaign: records of runs, and records of `model.fit`.

The targets read the files that tfpreempt's commands read (journals, status files,
listings of buckets), the environment variables of a process, and the records of
`model.fit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from rich.console import Console

from campaigns.target import Target, as_json, environment, written
from tests.checkpoint.remote_commits import put_commit
from tests.fakes.clock import FakeClock
from tests.fakes.storage import FaultyObjectStore
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.lease import lease_record
from tfpreempt.checkpoint.lease.object_store_lease import ObjectStoreLease
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.checkpoint.restore.verification import faults
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.cli.doctor.slurm_settings import ask_slurm
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report import view
from tfpreempt.cli.report.run_report import build_report
from tfpreempt.cli.status import metrics, text
from tfpreempt.cli.status.read_status import read_status
from tfpreempt.core.events import Commit, Decision, Exit, Notice, Outcome, Restored
from tfpreempt.core.journal import Journal, JsonLines
from tfpreempt.core.snapshot_memory import VARIABLES, from_environment
from tfpreempt.handler.status_file import WorkerActivity, WorkerStatus, status_path
from tfpreempt.keras.callbacks import callback_state as of_callbacks
from tfpreempt.keras.fit import fit_progress
from tfpreempt.keras.fit_record import EncodedValue, FitRecord
from tfpreempt.platforms.slurm import SlurmTerminationConfig
from tfpreempt.storage.object_store import ObjectStat

WALL = 1_700_000_000.0

# --- journals and status files --------------------------------------------------------


def of_a_run() -> dict[str, bytes]:
    """Returns the journals of a run with one preemption, by file name."""
    clock = FakeClock(wall=WALL)
    with tempfile.TemporaryDirectory() as directory:
        ours = Path(directory)
        supervisor = JsonLines(ours / "supervisor.jsonl", clock)

        def say(event: str, **values: Any) -> None:
            clock.advance(1.0)
            supervisor.append({"event": event, "supervisor": "s", **values})

        def record(*told: Any, incarnation: str) -> None:
            for worker in range(2):
                journal = Journal(ours, worker, clock, incarnation)
                for each in told:
                    clock.advance(1.0)
                    journal.record(each)
                journal.close()

        commit = Commit(
            step=7,
            path="/x/7",
            sequence=1,
            world_size=2,
            save_seconds=0.5,
            bytes=900,
            because="preemption",
            step_seconds=0.25,
        )
        for number, outcome in enumerate((Outcome.COMMITTED, Outcome.FINISHED)):
            name, step = f"s-{number}", 7 * number
            path = "/x/7" if number else None
            say("restarted" if number else "started", workers=2, incarnation=name)
            record(
                Restored(path=path, step=step, sequence=1, world_size=2),
                Notice(source="x", worker=0, grace_seconds=30.0, received_at=1000.0),
                Decision(round=1, boundary=7),
                commit,
                Exit(outcome=outcome, code=143, step=7 + step),
                incarnation=name,
            )
            for worker in range(2):
                codes = {"returncode": 143, "code": 143}
                say("worker_ended", incarnation=name, worker=worker, **codes)
            cause = "finished" if number else "preemption"
            say("budget", cause=cause, is_used_up=False)
        say("exited", cause="finished", code=0)
        supervisor.close()
        return {each.name: each.read_bytes() for each in ours.iterdir()}


RUN = of_a_run()
JOURNALS = [b"".join(RUN.values()), *RUN.values()]
NOW = WorkerStatus(
    at=WALL,
    worker=0,
    num_workers=2,
    host="host",
    pid=100,
    doing=WorkerActivity.TRAINING,
    step=7,
    steps_per_second=2.5,
    stepped_at=WALL,
    step_seconds=0.4,
    step_deviation=0.1,
    own_seconds=0.2,
    cpu_seconds=1.5,
    noticed_at=WALL,
    deadline=WALL + 30.0,
    upload=MirrorStatus(uri="gs://b/r", latest_step=7, uploading=7, total_bytes=900),
)


def word(**values: Any) -> bytes:
    """Returns a status file's JSON, with some values replaced."""
    [said] = as_json(dataclasses.asdict(NOW) | values)
    return said


def told_in(place: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        written(data, place / name)
    return place


ROWS = 64  # most rows of a table, which is slow to draw; one input in eight is drawn


def is_drawn(data: bytes) -> bool:
    return zlib.crc32(data) % 8 == 0


def look(place: Path, *, draws: bool) -> None:
    """Builds the status of a run, and shows the status in every form."""
    journals = JournalTailer(place, keeps_all=True)
    status = read_status(journals, WALL + 30.0)
    report = build_report(journals.workers, journals.supervisors)
    status = dataclasses.replace(status, report=report)
    assert status.is_fine in (True, False)
    if draws:
        short = dataclasses.replace(status, workers=status.workers[:ROWS])
        Console(file=io.StringIO(), width=160).print(text.table(short))
    text.one_line(status)
    json.dumps(text.to_json(status))
    generate_latest(metrics.registry("run", lambda: status))


def status(data: bytes, place: Path) -> None:
    """Reads one text as every journal of a run; readers ignore unknown records."""
    look(told_in(place, dict.fromkeys(RUN, data)), draws=is_drawn(data))


def report(data: bytes, place: Path) -> None:
    told_in(place, dict.fromkeys(RUN, data))
    journals = JournalTailer(place, keeps_all=True)
    journals.read_on(WALL)
    found = build_report(journals.workers, journals.supervisors, journals.warnings)
    if found is not None:
        json.dumps(view.to_json(found))
        if is_drawn(data):
            view.show(Console(file=io.StringIO(), width=160), found)


def read_word(data: bytes, place: Path) -> None:
    """Reads a worker's status file with a correct checksum."""
    told_in(place, RUN)
    written(b"%08x %s\n" % (zlib.crc32(data), data), status_path(place, 0))
    look(place, draws=is_drawn(data))


# --- records of a fit -----------------------------------------------------------------


def callback(name: str, **values: Any) -> Any:
    """Returns an object that tfpreempt takes for a callback of Keras."""
    made = type(name, (), {"__module__": "keras.callbacks"})()
    vars(made).update(values)
    return made


class Counting:
    """A callback of a user, with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def callbacks() -> list[Any]:
    return [
        callback("EarlyStopping", wait=1, stopped_epoch=0, best=0.5, best_weights=None),
        callback("History", epoch=[0], history={"loss": [0.5]}),
        callback("ReduceLROnPlateau", best=float("inf"), cooldown_counter=0, wait=1),
        callback("ProgbarLogger", seen=3, target=None, progbar=None),
        callback(
            "TensorBoard",
            _writers={},
            _epoch_start_time=1.5,
            _global_train_batch=3,
        ),
        Counting({"x": [1, 2.5, ("y", None)]}),
    ]


def logger(place: Path) -> Any:
    file = written(b"epoch,loss\n0,0.5\n", place / "log.csv")
    return callback(
        "CSVLogger",
        filename=str(file),
        writer=None,
        sep=",",
        keys=["loss"],
        append_header=True,
        csv_file=io.StringIO(),
    )


MADE_OF = {"keras": "keras", "steps": 5, "slots": 7, "weights": 4, "values": "1 2"}
PLACE = fit_progress.Progress(
    fit=1,
    phase="validation",
    epoch=2,
    batch=3,
    loop={"num_batches": 5},
    logs={"loss": 0.5},
    histories=({"epoch": [0], "history": {"loss": [0.5]}, "made_of": MADE_OF},),
    made_of=MADE_OF,
)


def record_of_a_fit() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        taken = {
            "progress": EncodedValue.of(dataclasses.asdict(PLACE)),
            "callbacks": of_callbacks.capture(callbacks()),
            "files": of_callbacks.capture_files([logger(Path(directory))]),
        }
    record, buffer = FitRecord("fuzz", lambda: taken), io.BytesIO()
    record.unregister()
    record.save(buffer)
    return buffer.getvalue()


def read_fit(data: bytes, place: Path) -> None:
    found = FitRecord.read(io.BytesIO(data))
    if "progress" in found:
        saved = fit_progress.read(found["progress"])
        fit_progress.check_same(saved, MADE_OF, "/x")
        fit_progress.check_values(saved, MADE_OF, "/x")
    if "callbacks" in found:
        of_callbacks.restore(callbacks(), found["callbacks"])
    if "files" in found:
        with contextlib.ExitStack() as opened:
            csv = logger(place)
            opened.callback(lambda: csv.csv_file.close())
            of_callbacks.restore_files([csv], found["files"])


def read_fit_of(data: bytes, place: Path) -> None:
    """Reads a record with a changed header and correct checksums."""
    header, _, parts = data.partition(b"\0")
    buffer = io.BytesIO()
    try:
        write_parts(buffer, json.loads(header), [parts[:16], parts[16:]])
    except (ValueError, RecursionError):
        return
    read_fit(buffer.getvalue(), place)


def header_of(record: bytes) -> bytes:
    """Returns the header of a record, followed by all parts."""
    size = int.from_bytes(record[8:12], "little")
    head = json.loads(record[12 : 12 + size])["header"]
    return json.dumps(head).encode() + b"\0" + record[12 + size :]


FIT = record_of_a_fit()

# --- listing of a bucket --------------------------------------------------------------


def objects_of_a_commit() -> dict[str, bytes]:
    store, found = FaultyObjectStore(), {}
    put_commit(store)
    for name in store.list():
        target = io.BytesIO()
        store.get(name, target)
        found[name] = target.getvalue()
    return found


COMMIT = objects_of_a_commit()
HERE = dataclasses.replace(lease_record.this_process(30.0), pid=1 << 21)


class Listed(FaultyObjectStore):
    """An object store whose listing has changed names and sizes.

    Attributes:
        told: sizes in the listing, by name.
    """

    told: dict[str, int]

    def list(self, prefix: str = "") -> Iterator[str]:
        yield from (name for name in sorted(self.told) if name.startswith(prefix))

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        found = super().stat(name, timeout=timeout)
        if found is None and name not in self.told:
            return None
        return ObjectStat(size=self.told.get(name, 0))


def read_listing(data: bytes, place: Path) -> None:
    store = Listed()
    store.told = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        name, _, size = line.partition("\t")
        is_size = size.isascii() and size.isdecimal() and len(size) < 20
        store.told[name] = int(size) if is_size else 0
    for name, content in COMMIT.items():
        store.replace(name, content)
    for entry in catalog.contents(store):
        if entry.is_committed:
            faults(entry, every_byte=True)
    list(catalog.commits(store, lambda problem: None))
    lease = ObjectStoreLease(store)
    lease.read_owner()
    lease.take(HERE)


# --- the environment ------------------------------------------------------------------


def read_lent(data: bytes, place: Path) -> None:
    texts = [environment(each) for each in (*data.split(b"\0", 2), b"")]
    told = dict(zip(VARIABLES, (str(place), *texts), strict=False))
    if (lent := from_environment(told)) is not None:
        assert from_environment(lent.to_environment()) == lent


def read_slurm(data: bytes, place: Path) -> None:
    """Reads the variables of Slurm, and a reply of scontrol."""
    job, count, task, answer = [*map(environment, data.split(b"\0", 3)), *[""] * 4][:4]
    told = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": count, "SLURM_PROCID": task}
    ask_slurm(told, "exit", lambda command, seconds: answer)
    config = SlurmTerminationConfig(
        max_restarts=3,
        requeue="scontrol",
        environment=told,
        run_command=lambda command, seconds: answer,
    )
    with contextlib.suppress(SystemExit):
        config._exit(True)


TARGETS = (
    Target(name="status", read=status, seeds=JOURNALS),
    Target(name="report", read=report, seeds=JOURNALS),
    Target(
        name="what a worker says",
        read=read_word,
        seeds=[word()],
    ),
    Target(name="record of a fit", read=read_fit, seeds=[FIT]),
    Target(name="values of a fit", read=read_fit_of, seeds=[header_of(FIT)]),
    Target(
        name="listing of a bucket",
        read=read_listing,
        seeds=[
            "\n".join(f"{name}\t{len(data)}" for name, data in COMMIT.items()).encode()
            + b"\nlease/0000000001\t300\nother/x\t5"
        ],
    ),
    Target(name="memory that is lent", read=read_lent, seeds=[b"20971520\x002"]),
    Target(
        name="Slurm",
        read=read_slurm,
        seeds=[
            b"123\x001\x000\0RequeueExit = 1,142-150\nJobRequeue = 1\n"
            b"JobId=123 Requeue=1 BatchFlag=1"
        ],
    ),
)
