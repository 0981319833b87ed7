"""TensorFlow's key: one blocked get in a process, for any number of listeners."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator

import pytest

from tests.notice.rigs import LIMIT, wait_until
from tfpreempt.errors import CoordinationServiceUnavailableError
from tfpreempt.notice.tensorflow_notice import NativeKeySource, read_again


class Key:
    """A key that appears when the test says so; counts the gets."""

    def __init__(self) -> None:
        self.values: queue.Queue[str | Exception] = queue.Queue()
        self.readers: list[threading.Thread] = []

    def read(self) -> str:
        self.readers.append(threading.current_thread())
        value = self.values.get(timeout=LIMIT)
        if isinstance(value, Exception):
            raise value
        return value

    def come(self, value: str | Exception) -> None:
        self.values.put(value)
        assert wait_until(lambda: bool(self.readers))
        for reader in self.readers:
            reader.join(LIMIT)


@pytest.fixture
def key() -> Iterator[Key]:
    made = Key()
    yield made
    made.values.put("")


def test_two_sources_share_one_get(key: Key) -> None:
    heard: list[str] = []
    sources = [NativeKeySource(key.read) for _ in range(2)]
    for source in sources:
        source.start(heard.append)
    key.come("/job:worker/task:1")
    assert heard == ["/job:worker/task:1"] * 2
    assert len(key.readers) == 1


def test_closing_one_leaves_the_other(key: Key) -> None:
    heard: list[str] = []
    first, second = (NativeKeySource(key.read) for _ in range(2))
    first.start(lambda detail: heard.append("first"))
    second.start(lambda detail: heard.append("second"))
    first.close()
    key.come("x")
    assert heard == ["second"]


def test_a_get_outlives_its_listener_and_is_used_again(key: Key) -> None:
    first = NativeKeySource(key.read)
    first.start(lambda detail: None)
    first.close()
    heard: list[str] = []
    NativeKeySource(key.read).start(heard.append)
    key.come("x")
    assert heard == ["x"]
    assert len(key.readers) == 1


def test_an_undelivered_value_waits_for_the_next_source(key: Key) -> None:
    first = NativeKeySource(key.read)
    first.start(lambda detail: None)
    first.close()
    key.come("x")
    heard: list[str] = []
    NativeKeySource(key.read).start(heard.append)
    NativeKeySource(key.read).start(heard.append)
    assert heard == ["x"]


def test_a_delivered_value_is_not_reported_again(key: Key) -> None:
    heard: list[str] = []
    NativeKeySource(key.read).start(heard.append)
    key.come("x")
    NativeKeySource(key.read).start(heard.append)
    assert heard == ["x"]
    assert len(key.readers) == 1


def test_a_new_identity_is_a_new_get(key: Key) -> None:
    heard: list[str] = []
    NativeKeySource(key.read, identity=(id(key), 1)).start(heard.append)
    key.come("x")
    NativeKeySource(key.read, identity=(id(key), 2)).start(heard.append)
    key.come("y")
    assert heard == ["x", "y"]


def test_read_again_reports_the_next_value_to_the_same_sources(key: Key) -> None:
    heard: list[str] = []
    identity = (id(key), 1)
    NativeKeySource(key.read, identity=identity).start(heard.append)
    key.come("x")
    read_again(identity)
    key.come("y")
    assert heard == ["x", "y"]


def test_read_again_while_a_get_is_blocked_does_nothing(key: Key) -> None:
    heard: list[str] = []
    identity = (id(key), 1)
    NativeKeySource(key.read, identity=identity).start(heard.append)
    assert wait_until(lambda: bool(key.readers))
    read_again(identity)
    read_again("nobody")
    key.come("x")
    assert heard == ["x"]
    assert len(key.readers) == 1


@pytest.mark.parametrize(
    "error", [CoordinationServiceUnavailableError("leader ended"), ValueError("odd")]
)
def test_a_failure_is_one_line_at_debug(
    key: Key, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    with caplog.at_level(logging.DEBUG, logger="tfpreempt"):
        NativeKeySource(key.read).start(heard.append)
        key.come(error)
    assert heard == []
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert str(error) in caplog.text
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize(("listens", "level"), [(True, "WARNING"), (False, "DEBUG")])
def test_the_end_of_the_only_watch_is_a_warning(
    key: Key, listens: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Remote workers have no other notice; at the program's end it does not matter."""
    source = NativeKeySource(key.read, is_alone=True)
    with caplog.at_level(logging.DEBUG, logger="tfpreempt"):
        source.start(lambda detail: None)
        if not listens:
            source.close()
        key.come(CoordinationServiceUnavailableError("leader ended"))
    assert [record.levelname for record in caplog.records] == [level]


def test_after_a_failure_the_next_source_reads_again(key: Key) -> None:
    NativeKeySource(key.read).start(lambda detail: None)
    key.come(CoordinationServiceUnavailableError("not yet"))
    heard: list[str] = []
    NativeKeySource(key.read).start(heard.append)
    key.come("x")
    assert heard == ["x"]
    assert len(key.readers) == 2


def test_after_a_failure_earlier_sources_get_the_next_value(key: Key) -> None:
    heard: list[str] = []
    NativeKeySource(key.read).start(heard.append)
    key.come(CoordinationServiceUnavailableError("not yet"))
    NativeKeySource(key.read).start(heard.append)
    key.come("x")
    assert heard == ["x", "x"]


def test_the_reading_thread_is_a_daemon(key: Key) -> None:
    NativeKeySource(key.read).start(lambda detail: None)
    key.come("x")
    assert key.readers[0].daemon
