"""State and names of the core without TensorFlow: Python and NumPy."""

from __future__ import annotations

import io
import json
import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tfpreempt.checkpoint.state.random_state import GlobalRngState
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.checkpoint.state.unsaved_state_check import UnsavedStateCheck
from tfpreempt.core import frameworks
from tfpreempt.states import JsonState


@pytest.fixture(autouse=True)
def _no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework can be imported, and no adapter is imported yet."""
    for framework, adapters in frameworks.ADAPTERS.items():
        monkeypatch.setitem(sys.modules, framework, None)
        for name in set(adapters.values()):
            monkeypatch.delitem(sys.modules, name, raising=False)


def saved() -> dict[str, Any]:
    file = io.BytesIO()
    GlobalRngState().save(file)
    record: dict[str, Any] = json.loads(file.getvalue())
    return record


def load(record: dict[str, Any]) -> None:
    GlobalRngState().load(io.BytesIO(json.dumps(record).encode()))


def draw() -> list[float]:
    return [random.random(), float(np.random.normal())]


def test_the_generators_of_python_and_numpy_resume() -> None:
    record = saved()
    expected = draw()
    load(record)
    assert draw() == expected
    generators_of_tensorflow = record.keys() - {"python", "numpy"}
    assert len(generators_of_tensorflow) == 4
    assert {record[key] for key in generators_of_tensorflow} == {None}


def test_generators_of_tensorflow_in_a_commit_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = saved() | {"tf_seed": 3, "tf_rng": "what TensorFlow's adapter wrote"}
    expected = draw()
    load(record)
    assert draw() == expected
    assert "tensorflow, which is not installed here" in caplog.text


ARRAY = np.zeros(3)
LOSSES: list[float] = []
NUMBERS = {"seen": 0}
REGISTRY = StateRegistry()
KEPT = JsonState("kept", [], registry=REGISTRY)


def changes_an_array() -> None:
    ARRAY[0] += 1.0


def grows_a_list() -> None:
    LOSSES.append(1.0)


def counts() -> None:
    NUMBERS["seen"] += 1


def changes_a_state() -> None:
    KEPT.value.append(1)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (changes_an_array, "ARRAY"),
        (grows_a_list, "LOSSES"),
        (counts, "NUMBERS['seen']"),
        (changes_a_state, None),
    ],
)
def test_state_that_a_step_changes_and_no_commit_holds_is_named(
    step: Callable[[], None], name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    check = UnsavedStateCheck(None, REGISTRY)
    with caplog.at_level(logging.WARNING):
        check.before_call(step, (), {})
        step()
        check.after_call()
    if name is None:
        assert caplog.text == ""
    else:
        assert f"changes state that is not in the commits: {name}. " in caplog.text
        assert "Put these values into a named State (tfpreempt.states)." in caplog.text
