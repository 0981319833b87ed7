"""Arrays in TensorFlow's format, written and read without TensorFlow."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.fakes import capture_part, open_directory, save
from tests.fakes.storage import damage
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle, bundle_writer
from tfpreempt.checkpoint.bundles.bundle import TensorEntry
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.restore.opening import Checkpoints
from tfpreempt.checkpoint.state.array_contents import (
    ArrayCheckpoint,
    ArrayContents,
    read_replica_values,
)
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.core import frameworks
from tfpreempt.core.cluster import LOCAL
from tfpreempt.storage.files import LocalFiles

DTYPES = (
    *("float32", "float64", "float16", "int32", "int8", "uint32", "int64"),
    *("bool", "complex64", "bfloat16", "float8_e4m3fn"),
)


class Program(ArrayCheckpoint):
    """A program whose arrays are in a dict."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.held = dict(arrays)

    def arrays(self) -> Mapping[str, Any]:
        return self.held

    def assign(self, arrays: Any) -> None:
        self.held = {name: arrays[name] for name in self.held}


def random_arrays(seed: int) -> dict[str, Any]:
    """Scalars, empty arrays and large arrays of every dtype."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(seed)
    found = {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for shape in ((), (0, 3), (7,), (300, 50)):
            values = (rng.normal(size=shape) * 100).astype("float32").astype(dtype)
            found[f"model/{name}/{shape}"] = values
    return found


def directory_of(path: Path, program: Program) -> Directory:
    contents = ArrayContents(program, LOCAL, LocalFiles(str(path)), keeps_copies=False)
    return open_directory(path, contents)


def assert_same(here: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert here.keys() == expected.keys()
    for name, array in expected.items():
        assert here[name].dtype == array.dtype
        assert here[name].shape == array.shape
        assert here[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_commit_gives_the_arrays_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, reads_ahead: bool
) -> None:
    """Large arrays are cut among the threads."""
    monkeypatch.setattr(bundle_writer, "THREADS", threads)
    expected = random_arrays(1)
    expected["embedding"] = np.arange(1 << 20, dtype="float32").reshape(1 << 10, -1)
    directory = directory_of(tmp_path, Program(expected))
    save(directory, 3)
    fresh = Program(dict.fromkeys(expected))
    directory = directory_of(tmp_path, fresh)
    newest = directory.newest()
    if not reads_ahead:
        directory.contents.free_read_ahead()
    directory.restore(newest)
    assert_same(fresh.held, expected)


@pytest.mark.tensorflow
def test_tensorflow_reads_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    monkeypatch.setattr(bundle_writer, "THREADS", 3)
    expected = random_arrays(2)
    expected["embedding"] = np.arange(1 << 20, dtype="int32").reshape(1 << 10, -1)
    save(directory_of(tmp_path, Program(expected)), 3)
    reader = tf.train.load_checkpoint(str(tmp_path / "3" / "ckpt"))
    assert set(reader.get_variable_to_shape_map()) == set(expected)
    assert_same({name: reader.get_tensor(name) for name in expected}, expected)


def test_an_asynchronous_save_has_the_values_of_the_capture(tmp_path: Path) -> None:
    values = np.arange(1000.0)
    directory = directory_of(tmp_path, Program({"weight": values}))
    part = capture_part(directory, 1, "run-1", CancellationToken())
    values += 1  # a step gives the memory to its results
    part.write()
    part.publish("periodic", (0,))
    fresh = Program({"weight": None})
    directory = directory_of(tmp_path, fresh)
    directory.restore(directory.newest())
    assert fresh.held["weight"].tolist() == np.arange(1000.0).tolist()


def test_a_damaged_commit_is_skipped(tmp_path: Path) -> None:
    program = Program({"weight": np.zeros(1000)})
    for step in (1, 2):
        program.held["weight"] = program.held["weight"] + 1
        save(directory_of(tmp_path, program), step)
    damage(str(min((tmp_path / "2").glob("ckpt.data-*"))))
    fresh = Program({"weight": None})
    directory = directory_of(tmp_path, fresh)
    newest = directory.newest()
    assert newest.step == 1
    directory.restore(newest)
    assert fresh.held["weight"].tolist() == [1.0] * 1000


def test_a_dtype_without_a_number_in_the_format(tmp_path: Path) -> None:
    program = Program({"name": np.array(["text"])})
    with pytest.raises(errors.SaveError, match="'name' has the dtype str"):
        save(directory_of(tmp_path, program), 1)


@pytest.mark.tensorflow
def test_entries_are_those_of_tensorflow() -> None:
    from tensorflow.core.protobuf import tensor_bundle_pb2

    proto = tensor_bundle_pb2.BundleEntryProto(
        dtype=1, shard_id=2, offset=1 << 40, size=300, crc32c=0xDEADBEEF
    )
    for size in (0, 7, 300):
        proto.shape.dim.add(size=size)
    extents = proto.slices.add().extent
    extents.add(start=4, length=3)
    extents.add()
    extents.add()
    entry = TensorEntry(
        dtype=1,
        shape=(0, 7, 300),
        shard=2,
        offset=1 << 40,
        size=300,
        crc32c=0xDEADBEEF,
        slices=(((4, 3), (0, None), (0, None)),),
    )
    assert TensorEntry.parse(proto.SerializeToString()) == entry
    assert tensor_bundle_pb2.BundleEntryProto.FromString(entry.to_bytes()) == proto
    header = tensor_bundle_pb2.BundleHeaderProto.FromString(bundle.header(5))
    assert (header.num_shards, header.version.producer) == (5, 1)


@pytest.mark.tensorflow
@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_an_adapter_has_the_functions_of_the_interface(framework: str) -> None:
    pytest.importorskip(framework)
    adapter = frameworks.adapter(framework, "checkpoints")
    for name, function in inspect.getmembers(Checkpoints, inspect.isfunction):
        if not name.startswith("_"):
            wanted = [*inspect.signature(function).parameters][1:]
            assert [*inspect.signature(getattr(adapter, name)).parameters] == wanted


@pytest.mark.parametrize(
    "header",
    [
        5,
        [{"path": "x", "dtype": "object", "shapes": [[1]]}],
        [{"path": "x", "dtype": "float32", "shapes": [[1], [1]]}],
        [{"path": "x", "dtype": "float32", "shapes": [[2]]}],
    ],
)
def test_values_of_replicas_that_make_no_sense_are_damage(header: Any) -> None:
    """`tfpreempt verify --replay` and a start on the other backend ended with KeyError
    or StopIteration."""
    file = io.BytesIO()
    write_parts(file, header, [bytes(4)])
    file.seek(0)
    with pytest.raises(errors.CheckpointCorruptedError, match="cannot be read"):
        read_replica_values(file)
