"""Manifests are read as written; hostile manifests are refused by field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.manifest import (
    FileEntry,
    Manifest,
    from_json,
    to_json,
)

GOOD = Manifest(
    step=7,
    sequence=3,
    world_size=4,
    workers=(0, 2),
    files=(
        FileEntry(name="ckpt.index", size=10, crc32c=0xFFFFFFFF),
        FileEntry(name="worker-0000/a b.state", size=0, crc32c=0),
    ),
    prefix="ckpt",
    versions={"tensorflow": "2.21.0"},
    because="preemption",
    save_seconds=1.25,
    metadata={"saved_at": 1.5},
)


def test_round_trip():
    assert from_json(to_json(GOOD), "here") == GOOD
    assert GOOD.bytes == 10


def test_a_save_reads_each_manifest_once(tmp_path, monkeypatch):
    """For the highest sequence number, the rules, and the mirrored commits."""
    loads, read = json.loads, []
    monkeypatch.setattr(json, "loads", lambda data: read.append(data) or loads(data))
    saver = open_directory(tmp_path, OwnContents())
    for step in (1, 2, 3):
        assert catalog.read_at(save(saver, step).path).step == step
    manifests = [data for data in read if b"crc32c" in data]
    assert len(manifests) == len(set(manifests)) == 3


def changed(path, value):
    record = json.loads(to_json(GOOD))
    inner = record
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return json.dumps(record).encode()


HOSTILE_NAMES = [
    "/etc/passwd",
    "../up",
    "a/../../b",
    "",
    ".",
    "a//b",
    "a/",
    "nul\0",
    "back\\slash",
    "new\nline",
    "x" * 2000,
    None,
    3,
    ["a"],
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names(name):
    with pytest.raises(errors.CheckpointCorruptedError, match=r"files\[1\].name"):
        from_json(changed(["files", 1, "name"], name), "here")
    if name is not None:
        with pytest.raises(errors.CheckpointCorruptedError, match="prefix"):
            from_json(changed(["prefix"], name), "here")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["files", 0, "size"], -1),
        (["files", 0, "size"], 1 << 60),
        (["files", 0, "size"], 1.5),
        (["files", 0, "size"], True),
        (["files", 0, "crc32c"], 1 << 32),
        (["files", 0, "crc32c"], "12"),
        (["files", 0], "ckpt.index"),
        (["files", 1, "name"], "ckpt.index"),
        (["files"], {}),
        (["step"], -1),
        (["step"], "7"),
        (["sequence"], 0),
        (["world_size"], 0),
        (["world_size"], 100_001),  # a restore makes a path for each worker
        (["workers"], [0, 0]),
        (["workers"], [4]),
        (["workers"], [-1]),
        (["workers"], "0"),
        (["versions"], []),
        (["because"], 3),
        (["save_seconds"], float("nan")),
        (["format"], 2),
    ],
)
def test_impossible_fields(path, value):
    with pytest.raises(errors.CheckpointCorruptedError, match=str(path[0])):
        from_json(changed(path, value), "here")


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_and_nothing_worse(data):
    with pytest.raises(errors.CheckpointCorruptedError):
        from_json(data, "here")


@settings(max_examples=200)
@given(st.integers(0), st.integers(0, 7))
def test_one_flipped_bit_is_an_error_or_another_manifest(position, bit):
    data = bytearray(to_json(GOOD))
    data[position % len(data)] ^= 1 << bit
    try:
        from_json(bytes(data), "here")
    except errors.CheckpointCorruptedError:
        pass  # the marker's checksum finds the others


def test_deep_nesting_is_an_error():
    with pytest.raises(errors.CheckpointCorruptedError):
        from_json(b"[" * 100_000, "here")
