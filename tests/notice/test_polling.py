"""A source that polls: faults are logged once, retried with back-off, never silent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tfpreempt import errors
from tfpreempt.notice import polling
from tfpreempt.notice.polling import PollingSource, Wait, retry_seconds


class Polled(PollingSource):
    """Looks by a function."""

    def __init__(
        self,
        look: Callable[[], str | None],
        *,
        interval: float = 1.0,
        wait: Wait = threading.Event.wait,
    ) -> None:
        super().__init__("polled", interval, wait)
        self._look = look

    def poll_once(self) -> str | None:
        return self._look()


class Script:
    """Answers polls in order, and records the duration of each pause."""

    def __init__(self, *answers: str | BaseException | None) -> None:
        self.answers = list(answers)
        self.pauses: list[float] = []
        self.edges: list[str] = []
        self.done = threading.Event()

    def poll(self) -> str | None:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.pauses.append(seconds)
        if self.answers:
            return False
        self.done.set()
        return event.wait(10.0)

    def run(self, interval: float = 1.0) -> None:
        source = Polled(self.poll, interval=interval, wait=self.wait)
        source.start(self.edges.append)
        assert self.done.wait(10.0)
        source.close()


def test_only_edges_are_reported() -> None:
    script = Script(None, "a", "a", "b", None, None, "c", "")
    script.run()
    assert script.edges == ["a", "c"]


def test_an_interval_of_numpys_is_waited_for() -> None:
    """Events take Python's numbers only."""
    script = Script(None, "a")
    script.run(np.float32(0.5))
    assert script.edges == ["a"]
    assert [type(pause) for pause in script.pauses] == [float] * 2


def test_an_empty_detail_is_a_notice() -> None:
    script = Script("", "", None, "")
    script.run()
    assert script.edges == ["", ""]


def test_the_level_survives_a_failure() -> None:
    script = Script("a", OSError("gone"), "a", None, OSError("gone"), "a")
    script.run()
    assert script.edges == ["a", "a"]


def test_pauses_grow_to_a_limit_and_restart_after_a_success() -> None:
    script = Script(*[OSError("x")] * 8, None, OSError("x"), None)
    script.run(interval=0.25)
    assert script.pauses == [1, 2, 4, 8, 16, 30, 30, 30, 0.25, 1, 0.25]


def test_retry_seconds_has_a_limit() -> None:
    assert retry_seconds(1) == 1.0
    assert retry_seconds(10**9) == 30.0


def test_a_fault_is_logged_once_with_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    same = [OSError("no route") for _ in range(4)]
    with caplog.at_level(logging.DEBUG):
        Script(None, *same, OSError("refused"), ValueError("refused"), None).run()
    told = [record for record in caplog.records if "polled" in record.getMessage()]
    assert [bool(record.exc_info) for record in told] == [True, False, False, False]
    assert "OSError: no route" in told[0].getMessage()
    assert "OSError: refused" in told[1].getMessage()
    assert "ValueError: refused" in told[2].getMessage()
    assert "works again after 6 failures" in told[3].getMessage()


def test_an_error_with_a_new_address_in_it_is_the_same_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in errors of the requests package, which a user's function may raise."""
    errors = [ConnectionError(f"<a thing at 0x7f{n}c0>: refused") for n in range(4)]
    Script(*errors, ConnectionError("<a thing at 0x7f>: no route"), None).run()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3, told
    assert "0x7f0c0>: refused" in told[0]
    assert "no route" in told[1]


def test_a_failure_after_a_recovery_is_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Script(OSError("x"), None, OSError("x"), None).run()
    assert sum(bool(record.exc_info) for record in caplog.records) == 2


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_not_even_an_exit_ends_it(error: BaseException) -> None:
    script = Script(error, "a")
    script.run()
    assert script.edges == ["a"]


def test_a_call_that_hangs_does_not_hold_up_close(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "CLOSE_LIMIT_SECONDS", 0.05)
    entered, release = threading.Event(), threading.Event()
    edges: list[str] = []

    def hang() -> str:
        entered.set()
        release.wait(10.0)
        return "too late"

    source = Polled(hang)
    source.start(edges.append)
    assert entered.wait(10.0)
    source.close()
    assert "has not returned within" in caplog.text
    release.set()
    source.close()
    assert edges == []


@pytest.mark.parametrize(
    "interval", [0, -1, float("nan"), float("inf"), True, "1", None]
)
def test_bad_intervals_are_refused(interval: float) -> None:
    with pytest.raises(errors.ConfigurationError, match="positive, finite"):
        Polled(lambda: None, interval=interval)
