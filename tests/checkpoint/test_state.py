"""Named States: names, order, life time."""

from __future__ import annotations

import dataclasses
import gc
import io

import pytest

from tests.checkpoint.fakes import Words
from tfpreempt import errors
from tfpreempt.checkpoint.state.state import (
    State,
    StateRegistry,
    WorkerSteps,
    read_state,
    write_states,
)


def test_duplicates_are_refused_while_the_first_state_exists():
    registry = StateRegistry()
    first = Words("a", registry=registry)
    with pytest.raises(errors.DuplicateStateError, match="'a'"):
        Words("a", registry=registry)
    with pytest.raises(ValueError, match="'a'"):
        Words("a", registry=registry)
    first.unregister()
    first.unregister()
    second = Words("a", registry=registry)
    first.unregister()  # does not take the second out
    assert registry.in_order() == (second,)
    del second
    gc.collect()
    assert registry.in_order() == ()
    Words("a", registry=registry)


def test_name_order_whatever_the_order_of_registration():
    registry = StateRegistry()
    made = [Words(name, registry=registry) for name in ("c", "a", "b")]
    assert [state.name for state in registry.in_order()] == ["a", "b", "c"]
    assert len(made) == 3


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, 3, "a\0"])
def test_names_that_cannot_be_files(name):
    with pytest.raises(errors.ConfigurationError, match="State name"):
        Words(name, registry=StateRegistry())


def test_names_of_tfpreempts_own():
    with pytest.raises(errors.ConfigurationError, match="begins with 'tfp"):
        Words("tfpreempt.keras", registry=StateRegistry())
    Words("tfpreempt", registry=StateRegistry())


def test_a_state_that_forgot_to_be_one_is_refused_when_it_is_made():
    class Forgetful(Words):
        def __init__(self):
            self.text = "never saved"

    @dataclasses.dataclass(eq=False)
    class Generated(Words):
        text: str = "neither"

    for kind in (Forgetful, Generated):
        with pytest.raises(errors.ConfigurationError, match=r"did not call super\(\)"):
            kind()


def test_files(tmp_path):
    states = [Words("a", "one", registry=None), Words("b", "two", registry=None)]
    assert write_states(str(tmp_path / "x"), states) == 2
    fresh = Words("b", registry=None)
    assert read_state(str(tmp_path / "x"), fresh)
    assert fresh.text == "two"
    assert not read_state(str(tmp_path / "x"), Words("c", registry=None))
    assert write_states(str(tmp_path / "y"), []) == 0
    assert not (tmp_path / "y").exists()


def test_a_plain_state_does_nothing(tmp_path):
    plain = State("x", registry=None)
    assert write_states(str(tmp_path), [plain]) == 1
    assert read_state(str(tmp_path), plain)
    plain.sync()
    assert (tmp_path / "x.state").read_bytes() == b""


@pytest.mark.parametrize("method", ["save", "load"])
def test_save_without_load_is_refused_when_the_state_is_made(method):
    kind = type("Half", (State,), {method: lambda self, fileobj: None})
    with pytest.raises(
        errors.ConfigurationError, match=rf"defines {method}\(\) but not"
    ):
        kind("x", registry=None)


@pytest.mark.parametrize("text", [b"", b"-1", b"7 ", b"9" * 20])
def test_steps_that_no_worker_can_have_are_refused(text):
    """A heartbeat has 64 bits for a number of steps."""
    with pytest.raises(errors.CheckpointCorruptedError, match="number of steps"):
        WorkerSteps(5).load(io.BytesIO(text))
