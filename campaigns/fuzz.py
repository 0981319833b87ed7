"""Changes input data at random; every reader raises only errors of tfpreempt.

A target reads bytes as from a disk, a bucket, a reply of a server, an environment
variable, or a key of the coordination service. The seeds of a target are written by
tfpreempt's own writers. The target must read the changed bytes in bounded time and
memory. If the bytes cannot be parsed, the target must raise an error of tfpreempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import re
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from campaigns import corpus, fuzz_runs
from campaigns.campaign import Campaign, Facts, Trial, silent
from campaigns.target import Target, as_json, environment, store_of, written
from tests.checkpoint.remote_commits import FILES, manifest_of
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.bundles.partitioning import DenseTensor
from tfpreempt.checkpoint.directory import (
    catalog,
    checkpoint_state,
    flat_commit,
    layout,
    user_metadata,
)
from tfpreempt.checkpoint.directory.manifest import from_json, to_json
from tfpreempt.checkpoint.lease import lease_record
from tfpreempt.checkpoint.lease.object_store_lease import ObjectStoreLease
from tfpreempt.checkpoint.mirror.download import download
from tfpreempt.checkpoint.mirror.download_target import PROGRESS
from tfpreempt.checkpoint.restore.verification import faults
from tfpreempt.checkpoint.state import encoding, state_file
from tfpreempt.checkpoint.state.contents import StagedSave
from tfpreempt.checkpoint.tensors.replica_parallel import ReplicaParallelWriter
from tfpreempt.cli import main as command
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.coordination import keys, rendezvous
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    DecidedStep,
    Key,
    NoticeKind,
    StepCount,
    Tombstone,
)
from tfpreempt.core import restarts
from tfpreempt.core.cluster import Cluster, cluster_from_environment
from tfpreempt.notice import aws, azure, gce
from tfpreempt.notice.metadata_session import Answer
from tfpreempt.states import (
    ArrayDictState,
    JsonState,
    NumpyRandomState,
    PythonRandomState,
    StepCounter,
)
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.open_store import local_path, split

EACH = 200  # inputs of a trial
SLOWEST = 2.0  # CPU seconds for an input of a few KiB
LONGEST = 60.0  # seconds for an input on a busy machine; no target waits
LARGEST = 8 << 20  # bytes at once, and as many times an input's own size:
TIMES = 200


MANIFEST = to_json(manifest_of(FILES, metadata={"saved_at": 1.5, "attempt": "a-1"}))
MARKER = catalog.marker_bytes(MANIFEST, 3)


CONTROL = {layout.MANIFEST: MANIFEST, layout.MARKER: MARKER}


def commit(manifest: bytes, marker: bytes, place: Path) -> None:
    """Reads and downloads a commit in a store, with the given manifest and marker."""
    control = {layout.MANIFEST: manifest, layout.MARKER: marker}
    store = store_of({f"7/{name}": data for name, data in (control | FILES).items()})
    entry = catalog.read(catalog.unread_entry(store, "7"))
    if entry.is_committed:
        faults(entry, every_byte=True)
        with contextlib.suppress(errors.CheckpointCorruptedError):
            download(entry, str(place / "copy"))


def vouched(manifest: bytes, place: Path) -> None:
    """Reads a commit whose marker has the checksum of the changed manifest."""
    try:
        sequence = from_json(manifest, "it").sequence
    except errors.CheckpointCorruptedError:
        sequence = 1
    commit(manifest, catalog.marker_bytes(manifest, sequence), place)


def go_on(data: bytes, place: Path) -> None:
    """Resumes an interrupted download from its record."""
    store = store_of({f"7/{name}": each for name, each in (CONTROL | FILES).items()})
    copy = place / "copy"
    written(data, copy / PROGRESS)
    for name, each in FILES.items():
        written(each[: len(each) // 2], copy / name)
    download(catalog.read(catalog.unread_entry(store, "7")), str(copy))
    assert all((copy / name).read_bytes() == each for name, each in FILES.items())


def read_pointer(data: bytes, place: Path) -> None:
    written(data, place / "checkpoint")
    if found := checkpoint_state.read(str(place)):
        checkpoint_state.to_bytes(found)
    checkpoint_state.named(str(place))


def read_lines(data: bytes, place: Path) -> None:
    written(data, place / "journal" / "worker-0.jsonl")
    JournalTailer(place / "journal", keeps_all=True).read_on(0.0)


def read_intent(data: bytes, place: Path) -> None:
    prefix = str(place / "ckpt-1")
    written(b"index", place / "ckpt-1.index")
    written(data, place / f"ckpt-1{layout.INTENT_SUFFIX}")
    flat_commit.is_incomplete(prefix)
    flat_commit.resolve_intents(LocalFiles(), str(place))
    flat_commit.is_incomplete(prefix)


def read_noted(data: bytes, place: Path) -> None:
    store = store_of({f"7/{layout.METADATA}": data})
    user_metadata.read(catalog.unread_entry(store, "7"))


def read_holder(data: bytes, place: Path) -> None:
    found = lease_record.from_json(data, "token")
    found.is_dead(HERE)
    str(found)
    found.to_json()


HERE = dataclasses.replace(lease_record.this_process(30.0), pid=1 << 21)


def take_lease(data: bytes, place: Path) -> None:
    """Takes over a lease whose holder was marking a commit; both records are inputs."""
    record, _, marking = data.partition(b"\0")
    store = store_of(
        {
            "lease/0000000001": record,
            "lease/0000000001.marking": marking,
            f"7/{layout.MANIFEST}": MANIFEST,
        }
    )
    lease = ObjectStoreLease(store)
    lease.read_owner()
    lease.take(HERE)


def load(make: Callable[..., Any], data: bytes, place: Path) -> None:
    state = make("state", registry=None)
    state.validate(io.BytesIO(data))
    state.load(io.BytesIO(data))


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    state.save(buffer)
    return buffer.getvalue()


def read_state_file(data: bytes, place: Path) -> None:
    state_file.read(str(written(data, place / "states" / "state.state")))


def own_file(value: int) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        state = StepCounter("state", value, registry=None)
        path = state_file.write(LocalFiles(), directory, 0, state)
        return Path(path).read_bytes()


def read_parts(data: bytes, place: Path) -> None:
    state = JsonState("state", registry=None)
    with encoding.readable(state):
        header, parts = encoding.read_parts(io.BytesIO(data))
        encoding.decode(header, parts)


def parts_of(value: Any) -> bytes:
    arrays: list[bytes] = []
    header = encoding.encode(value, arrays=arrays)
    buffer = io.BytesIO()
    encoding.write_parts(buffer, header, arrays)
    return buffer.getvalue()


def share_in(place: Path, worker: int) -> tuple[ReplicaParallelWriter, StagedSave]:
    """Returns the writer of a worker, and a save in which two workers write shares."""
    save = StagedSave(
        step=3,
        attempt="a-1",
        staging=str(place / "a-1"),
        started_at=0.0,
        tensors=TENSORS,
        is_dealt=True,
    )
    return ReplicaParallelWriter(worker=worker, num_workers=2, files=LocalFiles()), save


def read_share(data: bytes, place: Path) -> None:
    """Reads a peer's description of its share, as the chief does."""
    peer, save = share_in(place, 1)
    peer.write_own(save)
    written(data, Path(layout.parts_directory(save.staging, 1), "part.json"))
    chief, _ = share_in(place, 0)
    save.parts = own = chief.write_own(save)
    parts = chief.others(save, [0, 1])
    held = sum(each.data.nbytes for part in [*own, *parts] for each in part.slices)
    assert held == sum(each.data.nbytes for each in TENSORS)


def own_share() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        peer, save = share_in(Path(directory), 1)
        peer.write_own(save)
        return Path(layout.parts_directory(save.staging, 1), "part.json").read_bytes()


def read_index(data: bytes, place: Path) -> None:
    written(data, place / "ckpt.index")
    written(bytes(1000), place / "ckpt.data-00000-of-00001")
    bundle.check(str(place / "ckpt"))


def read_values(data: bytes, place: Path) -> None:
    """Reads an index with changed values and correct checksums."""
    pieces = data.split(b"\0\0\0")
    values = {b"": pieces[0]} | {b"%d" % n: each for n, each in enumerate(pieces[1:])}
    read_index(bundle.to_bytes(values), place)


def read_config(data: bytes, place: Path) -> None:
    cluster_from_environment({"TF_CONFIG": environment(data)})


def read_restarts(data: bytes, place: Path) -> None:
    restarts.read_restarts({"TFPREEMPT_NUM_RESTARTS": environment(data)})


def read_place(data: bytes, place: Path) -> None:
    text = environment(data)
    if local_path(text) is None:
        split(text)


def read_arguments(data: bytes, place: Path) -> None:
    """Parses a command line, without running the command."""
    arguments = [os.fsdecode(each) for each in data.split(b"\0")]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(click.ClickException, click.exceptions.Exit, click.Abort),
    ):
        context = command.make_context("tfpreempt", arguments)
        name, sub, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        if sub is not None:
            sub.make_context(name, rest, parent=context)


def read_key(key: Key, data: bytes, place: Path) -> None:
    value, extra = keys.decode(key, data.decode("utf-8", "replace"))
    keys.encode(value, extra)


def follow(data: bytes, place: Path) -> None:
    """Reads the keys of a start as worker 1, and then as worker 0."""
    texts = [*data.decode("utf-8", "replace").split("\0", 2), "", ""]
    for worker in (0, 1):
        store = InMemoryStore()
        if worker:
            store.insert("start/plan", texts[0])
            store.insert("start/ready", texts[1])
        else:
            store.insert("start/hello/1", texts[2])
        cluster = Cluster(worker=worker, jobs=(("worker", 2),))
        try:
            rendezvous.agree(
                store,
                "start",
                cluster,
                lambda: ({"step": 3}, None),
                lambda plan: (None, None),
                5.0,
            )
        finally:
            store.close()


def answered(read: Callable[[Answer], object], data: bytes, place: Path) -> None:
    read(Answer(url="http://there/it", status=200, headers={}, body=data))


def read_tree(answer: Answer) -> None:
    """The recursive answer of Google's server."""
    tree = answer.json()
    for topic in gce.TOPICS.values():
        value = gce.pick(tree, topic.path.removeprefix(gce.DIRECTORY))
        if value is not gce.ABSENT:
            with contextlib.suppress(errors.NoticeError):
                topic.read(value, 1e9)


INDEX = {
    b"": bytes([8, 1, 26, 2, 8, 1]),
    b"a/.ATTRIBUTES/VARIABLE_VALUE": bytes(
        [8, 1, 18, 4, 18, 2, 8, 7, 40, 28, 53, 1, 2, 3, 4]
    ),
    b"b/.ATTRIBUTES/VARIABLE_VALUE": bytes(
        [8, 9, 18, 0, 32, 28, 40, 8, 53, 1, 2, 3, 4]
    ),
}
KEYS = {
    Key.NOTICE: [NoticeKind.TRAIN_ON, NoticeKind.PERIODIC],
    Key.COMMIT: [CommitKind.EXIT],
    Key.COUNT: [StepCount(7, True), Tombstone()],
    Key.DECISION: [DecidedStep(9), DecidedStep(None)],
    Key.DONE: [True, Tombstone()],
}
EXTRA = {"worker": 1, "remaining": 20.5, "age": 0.5, "save_seconds": 1.5, "reason": "x"}
EVENT = {
    "EventId": "602d9444",
    "EventStatus": "Scheduled",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["vm_0"],
    "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
}
MAINTENANCE = {
    "type": "SCHEDULED",
    "canReschedule": "TRUE",
    "maintenanceStatus": "PENDING",
    "windowStartTime": "2023-09-18T17:42:51Z",
    "latestWindowStartTime": "2023-09-18T17:42:51.123456789Z",
}
TREE = {
    "preempted": "FALSE",
    "maintenanceEvent": "TERMINATE_ON_HOST_MAINTENANCE",
    "upcomingMaintenance": MAINTENANCE,
    "shutdownDetails": {"stopState": "PENDING_STOP"},
}
TENSORS = [
    DenseTensor(
        name=name,
        dtype=1,
        shape=shape,
        data=np.arange(np.prod(shape), dtype=np.float32).view(np.uint8),
        can_be_cut=True,
        is_replicated=True,
    )
    for name, shape in (("a", (40,)), ("b", (20, 2)), ("c", (70,)))
]
ARRAYS = {"a": np.arange(6.0).reshape(2, 3), "b": np.array("x"), "c": np.ones(2, bool)}

TARGETS = (
    Target(
        name="manifest",
        read=lambda data, place: commit(data, MARKER, place),
        seeds=[MANIFEST],
    ),
    Target(name="manifest, vouched for", read=vouched, seeds=[MANIFEST]),
    Target(
        name="marker",
        read=lambda data, place: commit(MANIFEST, data, place),
        seeds=[MARKER],
    ),
    Target(
        name="state file of TensorFlow",
        read=read_pointer,
        seeds=[
            checkpoint_state.to_bytes(
                checkpoint_state.CheckpointStateFile(
                    latest="3/ckpt",
                    paths=("2/ckpt", "ä\n/ckpt"),
                    timestamps=(1.5, 2.5),
                    last_preserved=0.5,
                )
            )
        ],
    ),
    Target(
        name="journal",
        read=read_lines,
        seeds=[
            b"\n".join(
                as_json(
                    {"event": "commit", "wall": 1.5e9, "step": 3, "path": "/x/3"},
                    {"event": "exit", "wall": 15, "code": 143},
                )
            )
        ],
    ),
    Target(
        name="intent",
        read=read_intent,
        seeds=as_json(
            {"format": 1, "attempt": "a-1", "before": [5, 1_700_000_000_000_000_000]},
            {"format": 1, "half": None},
        ),
    ),
    Target(name="notes", read=read_noted, seeds=as_json({"note": [1, "x", None]})),
    Target(name="lease", read=read_holder, seeds=[HERE.to_json()]),
    Target(
        name="lease of a bucket", read=take_lease, seeds=[HERE.to_json() + b"\x007"]
    ),
    *(
        Target(
            name=f"state: {type(state).__name__}",
            read=functools.partial(load, type(state)),
            seeds=[saved(state)],
        )
        for state in (
            JsonState("state", {"a": [1, None, "x"]}, registry=None),
            StepCounter("state", 7, registry=None),
            ArrayDictState("state", ARRAYS, registry=None),
            PythonRandomState("state", registry=None),
            NumpyRandomState("state", registry=None),
        )
    ),
    Target(
        name="state in parts",
        read=read_parts,
        seeds=[parts_of([ARRAYS, (1, {2: float("nan")}), "x", None])],
    ),
    Target(
        name="state in a file of its own",
        read=read_state_file,
        seeds=[own_file(7)],
    ),
    Target(name="share of a worker", read=read_share, seeds=[own_share()]),
    Target(
        name="record of a download",
        read=go_on,
        seeds=[
            b"\n".join(
                as_json(*([name, 0, len(each), 5] for name, each in FILES.items()))
            )
        ],
    ),
    Target(name="index", read=read_index, seeds=[bundle.to_bytes(INDEX)]),
    Target(
        name="values of an index",
        read=read_values,
        seeds=[b"\0\0\0".join(INDEX.values())],
    ),
    Target(
        name="TF_CONFIG",
        read=read_config,
        seeds=as_json(
            {
                "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]},
                "task": {"type": "worker", "index": 1},
            }
        ),
    ),
    Target(name="restarts", read=read_restarts, seeds=[b"3", b" 12 "]),
    Target(
        name="location",
        read=read_place,
        seeds=[
            b"gs://bucket/run/1",
            b"s3://bucket",
            b"az://container/x",
            b"file:///a%20b/c",
            b"/a/b",
        ],
    ),
    Target(
        name="command line",
        read=read_arguments,
        seeds=[
            b"run\0--checkpoint-dir\0x\0--max-restarts\x005\0--snapshots\x0020MiB\0--\0true",
            b"run\0--grace\x002.5\0--workers\x002\0python\0-c\x001",
            b"inspect\0--deep\0x",
            b"verify\0gs://bucket/run\0--json",
            b"notify\0--pid\x0012",
            b"doctor\0--checkpoint-dir\0x",
        ],
    ),
    *(
        Target(
            name=f"key: {key.value}",
            read=functools.partial(read_key, key),
            seeds=[keys.encode(value, EXTRA).encode() for value in values],
        )
        for key, values in KEYS.items()
    ),
    Target(
        name="keys of a start",
        read=follow,
        seeds=[
            b"\0".join(as_json({"ok": True}, {}, {"problem": None})),
            b"\0".join(as_json({"ok": True}, {"1": "X: x"}, {"problem": "X: x"})),
            b"\0".join(as_json({"ok": False, "problem": "X"}, {}, {"problem": None})),
        ],
    ),
    Target(
        name="answer: spot interruption",
        read=functools.partial(answered, aws.read_interruption),
        seeds=as_json({"action": "terminate", "time": "2017-09-18T08:22:00Z"}),
    ),
    Target(
        name="answer: rebalance",
        read=functools.partial(answered, aws.read_rebalance),
        seeds=as_json({"noticeTime": "2020-11-05T08:22:00.5+01:00"}),
    ),
    Target(
        name="answer: lifecycle",
        read=functools.partial(answered, aws.read_lifecycle),
        seeds=[b"InService", b"Warmed:Terminated"],
    ),
    Target(
        name="answer: scheduled events",
        read=functools.partial(answered, azure.read_events),
        seeds=as_json({"DocumentIncarnation": 2, "Events": [EVENT, EVENT]}),
    ),
    Target(
        name="answer: Google's tree",
        read=functools.partial(answered, read_tree),
        seeds=as_json(TREE),
    ),
    *fuzz_runs.TARGETS,
)


DEEP = b"[" * 100_000
KEPT: Sequence[tuple[str, bytes]] = (
    ("journal", DEEP),
    ("journal", b'{"event": "x", "wall": 1' + b"0" * 400 + b"}"),
    ("status", b'{"event": "started", "wall": 15, "workers": 3000000000}\n'),
    ("status", b'{"event": "exited", "wall": 9e18, "cause": "finished", "code": 0}\n'),
    ("what a worker says", fuzz_runs.word(at=-1e300)),
    ("what a worker says", fuzz_runs.word(step=1 << 4000)),
    ("memory that is lent", b"9" * 5000 + b"\x001"),
    ("Slurm", b"1\x001\x000\0Requeue=" + b"9" * 5000),
    ("values of a fit", b"[]\0"),
    ("values of a fit", b'{"record": {"callbacks": [["x"], "x"]}}\0'),
    ("values of a fit", b'{"record": {"progress": [{"dict": {"step": 1}}, 0]}}\0'),
    ("values of a fit", fuzz_runs.header_of(fuzz_runs.FIT).replace(b": 7", b": [7]")),
    ("state in parts", parts_of(np.ones(2)).replace(b'"<f8"', b'",f8"')),
    ("lease", dataclasses.replace(HERE, pid=1 << 40).to_json()),
    ("TF_CONFIG", b'{"task": {"index": 1e999}}'),
    ("location", b"s3://b[ket/run"),
    ("command line", b"run\0--snapshots\0" + b"9" * 400 + b"\0--\0true"),
    ("key: count", DEEP),
    ("key: count", b'{"count": 1e999, "final": true}'),
    ("key: decision", b'{"boundary": 1e999}'),
    ("key: commit", b'{"kind": "exit", "save_seconds": "x"}'),
    (
        "share of a worker",
        own_share().replace(b'["b", 0, null]', b'["b", [[]], null]'),
    ),
    ("keys of a start", b"\0\0"),
    ("keys of a start", b'{"step": 3}\0{}\0{"problems": null}'),
    ("keys of a start", b'{"ok": true}\0{"x": "X: x"}\0[]'),
    (
        "answer: rebalance",
        b'{"noticeTime": "Mon, 19 Sep 2016 18:29:47 +9999999999999999999999"}',
    ),
)
"""Inputs that found a fault: the target, and the input."""


# --- the changes ---------------------------------------------------------------------

NUMBERS = (
    *("0", "-1", "1e999", "-1e999", "NaN", "1e-400", "0.5", "true", "null", '""', "[]"),
    *(str(1 << bits) for bits in (31, 32, 63, 64, 1024)),
    *("9" * 400, "9" * 5000, f"-{1 << 63}", "00", "٣", "²"),
)
TOKENS = [
    *(each.encode() for each in NUMBERS),
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"\\ud800", b"\xff"),
    *(
        b"\0",
        b"\n",
        b"\r\n",
        b"../",
        b"/",
        b"//",
        b"*",
        b"=",
        b"--",
        b"+24:00",
        b"\xe2",
    ),
    *(
        b'"\\ud800"',
        b'"../x"',
        b'"/etc/x"',
        b'{"dtype": "O"}',
        b'"' + b"x" * 2000 + b'"',
    ),
]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def flip(data: bytearray, rng: random.Random, _: Target) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, rng: random.Random, _: Target) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice([1, 1, 4, 40, len(data)])]


def insert(data: bytearray, rng: random.Random, _: Target) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice([rng.choice(TOKENS), rng.randbytes(rng.randint(1, 8))])


def splice(data: bytearray, rng: random.Random, target: Target) -> None:
    other = rng.choice(rng.choice([target, rng.choice(TARGETS)]).seeds)
    start, at = rng.randrange(len(other)), rng.randrange(len(data) + 1)
    data[at : at + rng.choice([0, 10, len(data)])] = other[start:][
        : rng.choice([10, 4000])
    ]


def repeat(data: bytearray, rng: random.Random, _: Target) -> None:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.choice([1, 2, 5, 50])]
    data[start:start] = piece * rng.choice([1, 2, 100, 1000])


def number(data: bytearray, rng: random.Random, _: Target) -> None:
    """Replaces a number by another number."""
    if found := list(_NUMBER.finditer(bytes(data))):
        match = rng.choice(found)
        data[match.start() : match.end()] = rng.choice(NUMBERS).encode()


def nest(data: bytearray, rng: random.Random, _: Target) -> None:
    """Inserts nested lists, as deep as the JSON reader allows, or deeper."""
    depth = rng.choice([2, rng.randint(100, 1100), 100_000])
    deep = b"[" * depth + b"]" * rng.choice([depth, depth, 0])
    found = list(_NUMBER.finditer(bytes(data)))
    where = rng.choice(found).span() if found else (0, len(data))
    data[where[0] : where[1]] = deep


def rewrite(data: bytearray, rng: random.Random, target: Target) -> None:
    """Replaces, deletes or adds a field of JSON."""
    lines = bytes(data).split(b"\n")
    chosen = rng.randrange(len(lines))
    text, mark, rest = lines[chosen].partition(b"\0")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return flip(data, rng, target)
    holders: list[Any] = []
    around: list[Any] = [record]
    while around:
        each = around.pop()
        if isinstance(each, dict | list) and each:
            holders.append(each)
            around += each.values() if isinstance(each, dict) else each
    if not holders:
        return flip(data, rng, target)
    of = rng.choice(holders)
    field = rng.choice(list(of) if isinstance(of, dict) else range(len(of)))
    value = rng.choice(ODD)
    if rng.random() < 0.2:
        del of[field]
    elif isinstance(of, dict) and rng.random() < 0.2:
        of[rng.choice(["", "../x", "\ud800", "x" * 300])] = value
    else:
        of[field] = value
    lines[chosen] = json.dumps(record).encode() + mark + rest
    data[:] = b"\n".join(lines)
    return None


ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 0.5, -0.5, 1e308, float("inf"), float("nan")),
    *(2**31, 2**63, 2**64, 10**400, "", "x", "1", "../x", "/x", "a/b", "\0", "\ud800"),
    *("x" * 2000, [], {}, [[]], [1, 2], {"x": 1}, ["x"] * 3),
]
CHANGES = (flip, cut, insert, splice, repeat, number, nest, rewrite, rewrite)


KNOWN = {target.name: corpus.load(target.name) for target in TARGETS}


def changed(target: Target, rng: random.Random) -> bytes:
    """Returns a seed or a kept input after one or more random changes."""
    known = KNOWN.get(target.name, []) if rng.random() < 0.3 else []
    data = bytearray(rng.choice(known or target.seeds))
    for _ in range(rng.choice([1, 1, 2, 4])):
        data = data or bytearray(b"0")
        rng.choice(CHANGES)(data, rng, target)
    return bytes(data)


# --- the expected result ------------------------------------------------------------


def attempt(target: Target, data: bytes, place: Path) -> bool:
    """Reads an input; returns whether tfpreempt refused the input.

    Raises:
        AssertionError: the target took too much time or memory.
        Exception: an error of the target that is not a TfpreemptError.
    """
    tracemalloc.reset_peak()
    before, since = tracemalloc.get_traced_memory()[0], time.monotonic()
    began = time.process_time()
    try:
        target.read(data, place)
        is_refused = False
    except errors.TfpreemptError:
        is_refused = True
    took, waited = time.process_time() - began, time.monotonic() - since
    peak = tracemalloc.get_traced_memory()[1] - before
    assert took < SLOWEST, f"{took:.1f} s for {len(data)} bytes"
    assert waited < LONGEST, f"{waited:.1f} s for {len(data)} bytes"
    assert peak < LARGEST + TIMES * len(data), f"{peak} bytes for {len(data)}"
    return is_refused


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Context manager: measures memory, and hides thousands of warnings."""
    tracemalloc.start()
    try:
        with silent():
            yield
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: creates a directory for the files of the inputs."""
    alone = threading.Lock()  # time and memory are measured for the whole process
    with measured(), tempfile.TemporaryDirectory() as made:

        def trial(rng: random.Random) -> Facts:
            target, refused = rng.choice(TARGETS), 0
            for _ in range(EACH):
                data = changed(target, rng)
                with tempfile.TemporaryDirectory(dir=made) as place:
                    try:
                        with alone:
                            refused += attempt(target, data, Path(place))
                    except Exception as error:
                        shown = data if len(data) < 2000 else data[:2000] + b"..."
                        raise AssertionError(f"{target.name}: {shown!r}") from error
            return {"target": target.name, "inputs": EACH, "refused": refused}

        yield trial


CAMPAIGN = Campaign(
    name="fuzz",
    promise=(
        "43 readers of external input get random inputs, 200 in a trial, derived "
        "from the output of tfpreempt's own writers. There are readers of manifests, "
        "markers, leases, States, indexes, bucket listings, fit records, replies of "
        "metadata services, environment variables, command lines and keys of other "
        "workers. The readers of journals and status files are `status`, the metrics "
        "of `status`, and `report`. Each input is read, or refused with an error of "
        "tfpreempt, in bounded time and memory."
    ),
    trials=5_000,
    short=20,
    mark="slow",
    prepare=prepare,
    fixed=(
        "The readers of journals, leases, TF_CONFIG, positions, options, keys of "
        "other workers, and times from metadata services raised Python's own errors, "
        "not errors of tfpreempt. The causes were infinite numbers, lists with "
        "thousands of levels, numbers with hundreds of digits, and values of wrong "
        "types. Fixed (`campaigns/test_fuzz.py`).",
        "If the description of a worker's share had rows without numbers, the save of "
        "the chief failed. Fixed (`campaigns/test_fuzz.py`).",
        "A journal that names billions of workers filled the memory of `status`. A "
        "time outside the calendar ended `status`, and the page of `report`, with "
        "Python's own errors. Fixed (`cli/test_status.py`, `cli/report/test_page.py`).",
        "A restore raised Python's own errors for values of a fit that an unknown "
        "version had saved, and for a dtype that NumPy parses as Python code. Fixed "
        "(`keras/test_saved_values.py`, `checkpoint/test_encoding.py`).",
    ),
    labels={
        "refused": "refused inputs",
        "target": "reader",
    },
)
