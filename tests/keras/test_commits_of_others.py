"""A commit of another user changes nothing that no commit holds; needs no Keras."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import encode
from tfpreempt.core import contained
from tfpreempt.keras.callbacks import callback_files
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.data.sequence import SequenceTracker, generators, set_generators
from tfpreempt.keras.fit.python_attributes import Attributes
from tfpreempt.keras.fit_record import EncodedValue


class Rows:
    """A sequence of the user, with a method that a fit never calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_epoch_end(self) -> None:
        self.called.append("on_epoch_end")

    def delete_cache(self) -> None:
        self.called.append("delete_cache")


def tracker_of(rows: Rows) -> SequenceTracker:
    options = SimpleNamespace(data=rows, repeats=True)
    pipelines = SimpleNamespace(is_seeded=lambda: True)
    fit: Any = SimpleNamespace(
        sequence=options, adapter=SimpleNamespace(), pipelines=pipelines, model=None
    )
    return SequenceTracker(fit, SimpleNamespace())  # type: ignore[arg-type]


def position(*calls: tuple[str, Any]) -> Position:
    more = {"shuffle": None, "calls": calls, "again": [], "state": None}
    return Position(kind="sequence", made=0, read=0, batches=0, more=more)


def test_a_position_calls_no_other_method_of_a_sequence() -> None:
    rows = Rows()
    tracker_of(rows).prepare(position(("on_epoch_end", None)))
    assert rows.called == ["on_epoch_end"]
    with pytest.raises(errors.CheckpointCorruptedError):
        tracker_of(rows).prepare(position(("delete_cache", None)))
    assert rows.called == ["on_epoch_end"]


def test_a_generator_reads_no_memory_beyond_its_state() -> None:
    """NumPy does not check the position, and reads behind its 624 numbers."""
    before = generators()
    of_python, of_numpy = generators()
    of_numpy["state"]["pos"] = 1 << 20
    with pytest.raises(errors.CheckpointCorruptedError, match="pos is 1048576"):
        set_generators((of_python, of_numpy))
    assert encode(generators()) == encode(before)
    random.random()
    np.random.random()
    set_generators(before)
    assert encode(generators()) == encode(before)


class Layer:
    """A class of a library."""

    def __init__(self) -> None:
        self.units = 3
        self._internal = 4

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units}


Layer.__module__ = "keras.src.layers.layer"


class Model:
    """A class of the user."""

    def __init__(self) -> None:
        self.count, self.layer = 1, Layer()


@pytest.mark.parametrize(
    ("owner", "name", "is_set"),
    [
        ("model", "later", True),
        ("model", "__dict__", False),
        ("model.layer", "_internal", False),
        ("model.layer", "other", True),
    ],
)
def test_only_attributes_that_a_commit_can_hold_are_set(
    owner: str, name: str, is_set: bool
) -> None:
    model = Model()
    attributes = Attributes(model)
    holder: Any = model if owner == "model" else model.layer
    before = dict(vars(holder))
    attributes.restore(EncodedValue(header=[[owner, name, {"dict": {"a": 1}}, 0]]))
    expected = {**before, name: {"a": 1}} if is_set else before
    assert dict(vars(holder)) == expected


def test_a_log_file_that_becomes_a_link_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user replaced the file between the restore of its text and the open."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    root.mkdir()
    outside.write_text("mine")
    path = root / "log.csv"
    logger = SimpleNamespace(filename=str(path), csv_file=path.open("w"), sep=",")
    state = {"text": b"epoch\n", "keys": ["loss"], "append_header": True}
    overwrite = callback_files._overwrite

    def swap(logger: Any, text: bytes) -> None:
        overwrite(logger, text)
        path.unlink()
        path.symlink_to(outside)

    with callback_files.resolved([logger], str(root)):
        callback_files.restore(logger, {**state, "has_writer": True}, extends=False)
        with logger.csv_file:
            logger.csv_file.write("1\n")
        assert path.read_text() == "epoch\n1\n"
        logger.csv_file = path.open("a")
        monkeypatch.setattr(callback_files, "_overwrite", swap)
        with pytest.raises(contained.LinkError):
            callback_files.restore(logger, {**state, "has_writer": True}, extends=False)
    assert outside.read_text() == "mine"
