"""The callable source: its calls, and its treatment of the results."""

from __future__ import annotations

import functools
import threading

import pytest

from tests.notice.rigs import CallableRig
from tfpreempt import errors
from tfpreempt.notice import polling
from tfpreempt.notice.callable import CallableSource


def test_polls_every_second_by_default() -> None:
    pauses: list[float] = []
    has_paused = threading.Event()

    def wait(event: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        has_paused.set()
        return event.wait(10.0)

    source = CallableSource(lambda: False, wait=wait)
    source.start(lambda detail: None)
    assert has_paused.wait(10.0)
    source.close()
    assert pauses == [1.0]


def test_the_detail_names_the_function_and_its_result() -> None:
    rig = CallableRig()
    rig.answer = 7
    heard: list[str] = []
    source = rig.make()
    source.start(heard.append)
    rig.settle()
    source.close()
    assert heard == ["CallableRig.watcher_fn() returned 7"]
    assert source.name == "callable:CallableRig.watcher_fn"


def test_an_answer_without_a_truth_is_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ambiguous:
        def __bool__(self) -> bool:
            raise ValueError("the truth value is ambiguous")

    rig = CallableRig()
    rig.answer = Ambiguous()
    heard: list[str] = []
    source = rig.make()
    source.start(heard.append)
    rig.settle()
    rig.answer = True
    rig.settle()
    source.close()
    assert "ambiguous" in caplog.text
    assert len(heard) == 1


def test_a_function_without_a_name_can_be_polled() -> None:
    source = CallableSource(functools.partial(bool, 0))
    assert source.name == "callable:partial"


def test_a_hung_call_leaves_other_sources_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "CLOSE_LIMIT_SECONDS", 0.05)
    entered, release = threading.Event(), threading.Event()

    def hang() -> bool:
        entered.set()
        return release.wait(10.0)

    hung = CallableSource(hang)
    heard: list[str] = []
    hung.start(heard.append)
    assert entered.wait(10.0)
    rig = CallableRig()
    other = rig.make()
    other.start(heard.append)
    rig.give()
    rig.settle()
    other.close()
    hung.close()
    release.set()
    assert heard == ["CallableRig.watcher_fn() returned True"]


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="not its result"):
        CallableSource(False)  # type: ignore[arg-type]  # the mistake under test
