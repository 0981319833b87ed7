"""Managed threads: the owner's view of their end."""

from __future__ import annotations

import logging
import threading

import pytest

from tfpreempt.core.threads import ManagedThread

LIMIT = 10.0


def test_runs_and_stops() -> None:
    thread = ManagedThread("t", lambda: None)
    thread.start()
    assert thread.join(LIMIT)
    assert not thread.is_alive()


def test_stop_event_ends_the_target() -> None:
    seen: list[bool] = []
    thread = ManagedThread("t", lambda: seen.append(thread.stop_event.wait(LIMIT)))
    thread.start()
    assert thread.is_alive()
    assert not thread.join(0.0)
    thread.stop_event.set()
    assert thread.join(LIMIT)
    assert seen == [True]


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3)])
def test_a_failure_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    thread = ManagedThread("the-name", fail)
    with caplog.at_level(logging.ERROR):
        thread.start()
        assert thread.join(LIMIT)
    assert "the-name" in caplog.text


def test_join_before_start_and_from_itself() -> None:
    answers: list[bool] = []
    thread = ManagedThread("t", lambda: answers.append(thread.join(LIMIT)))
    assert thread.join(0.0)
    thread.start()
    assert thread.join(LIMIT)
    assert answers == [False]


def test_is_a_named_daemon() -> None:
    seen: list[threading.Thread] = []
    thread = ManagedThread("a name", lambda: seen.append(threading.current_thread()))
    thread.start()
    assert thread.join(LIMIT)
    assert seen[0].daemon
    assert seen[0].name == thread.name == "a name"


def test_starts_once() -> None:
    thread = ManagedThread("t", lambda: None)
    thread.start()
    with pytest.raises(RuntimeError):
        thread.start()
