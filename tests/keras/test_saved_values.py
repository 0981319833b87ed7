"""Records of a fit that no version of tfpreempt has written."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaigns import fuzz_runs
from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.keras.callbacks import callback_state
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.fit import fit_progress
from tfpreempt.keras.fit.python_attributes import Attributes
from tfpreempt.keras.fit_record import EncodedValue, FitRecord

pytestmark = pytest.mark.tensorflow

DAMAGED = errors.CheckpointCorruptedError
PLACE: dict[str, Any] = {"kind": "index", "made": 1, "read": 1, "batches": 3}
WRONG = {"array": 7, "dtype": "<f4", "shape": [1]}  # there is no such part


def test_saved_values_are_restored() -> None:
    found = FitRecord.read(io.BytesIO(fuzz_runs.FIT))
    assert fit_progress.read(found["progress"]) == fuzz_runs.PLACE


@pytest.mark.parametrize(
    "header", [{"record": 3}, {"record": {"x": 3}}, {"record": {"x": [1, "x"]}}]
)
def test_a_record_of_another_form(header: Any) -> None:
    file = io.BytesIO()
    write_parts(file, header, [])
    with pytest.raises(DAMAGED, match=r"model\.fit"):
        FitRecord.read(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("header", [[], "x", 3])
def test_a_record_that_is_none_is_of_another_version(header: Any) -> None:
    file = io.BytesIO()
    write_parts(file, header, [])
    with pytest.raises(
        errors.CheckpointMismatchError, match="earlier version of tfpreempt"
    ):
        FitRecord.read(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(
    "value",
    [
        3,
        {"step": 3},
        {"epoch": "x"},
        {"batch": -1},
        {"phase": "sleep"},
        {"loop": [1]},
        {"histories": 3},
        {"histories": (3,)},
        {"made_of": None},
        {"made_of": {"slots": [7]}},
        {"made_of": {"slots": "7"}},
        {"made_of": {"slots": ""}},
        {"made_of": {"steps": np.ones(2)}},
    ],
    ids=str,
)
def test_invalid_progress_of_a_fit(value: Any) -> None:
    with pytest.raises(DAMAGED, match=r"model\.fit"):
        fit_progress.read(EncodedValue.of(value))


@pytest.mark.parametrize(
    "place",
    [
        3,
        {},
        {"kind": "index"},
        PLACE | {"kind": 3},
        PLACE | {"batches": -1},
        PLACE | {"made": 1.5},
        PLACE | {"states": 3},
        PLACE | {"states": (3,)},
        PLACE | {"states": (("x",),)},
        PLACE | {"step": 3},
        PLACE | {"is_shared": 3},
        PLACE | {"kind": "iterator", "more": "x"},
    ],
    ids=str,
)
def test_invalid_position_in_data(place: Any) -> None:
    with pytest.raises(DAMAGED, match=r"model\.fit"):
        Position.parse(place)


def test_a_position_in_data_is_restored() -> None:
    place = dataclasses.replace(Position(**PLACE), states=((b"now", b"more"),))
    saved = EncodedValue.of(dataclasses.asdict(place)).value()
    assert Position.parse(saved) == place
    assert Position.parse(None) is None


@pytest.mark.parametrize(
    "entry",
    [3, {"keras": WRONG}, {"keras": 3}, {"keras": {"tuple": 3}}, {"own": WRONG}],
    ids=str,
)
def test_no_state_of_a_callback(entry: Any) -> None:
    ours = fuzz_runs.callbacks()
    names = callback_state.capture(ours).header
    with pytest.raises(DAMAGED):
        callback_state.restore(ours, EncodedValue(header=dict.fromkeys(names, entry)))
    with pytest.raises(DAMAGED, match="callbacks of a fit"):
        callback_state.restore(ours, EncodedValue(header=["keras.History"]))


def test_no_file_of_a_logger(tmp_path: Path) -> None:
    csv = fuzz_runs.logger(tmp_path)
    for entry in (3, WRONG, {"dict": {"text": "x"}}, {"dict": {}}):
        with pytest.raises(DAMAGED):
            callback_state.restore_files(
                [csv], EncodedValue(header={"keras.CSVLogger": entry})
            )


@pytest.mark.parametrize("header", [3, [3], [["model", "x", 3]], [["m", "x", 3, "x"]]])
def test_no_attributes_of_a_model(header: Any) -> None:
    with pytest.raises(DAMAGED):
        Attributes(object()).restore(EncodedValue(header=header))


def test_an_attribute_that_cannot_be_set_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Attributes(object()).restore(EncodedValue(header=[["model", "x", WRONG, 0]]))
    assert "the attribute cannot be set" in caplog.text
