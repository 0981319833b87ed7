"""Signals in one process: calls, chained handlers, and restored handlers."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from tests.notice.rigs import wait_until
from tfpreempt import errors
from tfpreempt.notice._signal_registry import REGISTRY
from tfpreempt.notice.signals import SignalSource

USR1 = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Checks that every test restores handlers and the wake-up fd."""

    def found() -> list[object]:
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        watched = (USR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM)
        return [fd, *map(signal.getsignal, watched)]

    before = found()
    yield
    assert found() == before


class Handler:
    """A Python handler that counts its calls, and calls the handler before it."""

    def __init__(self, chains: bool = False) -> None:
        self.calls = 0
        self._below = signal.signal(USR1, self) if chains else None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.calls += 1
        if callable(self._below):
            self._below(signum, frame)


@pytest.fixture
def handler() -> Iterator[Handler]:
    """A handler that was there before."""
    made = Handler()
    before = signal.signal(USR1, made)
    yield made
    assert signal.getsignal(USR1) is made
    signal.signal(USR1, before)


def installed() -> object:
    return signal.getsignal(USR1)


@pytest.fixture
def heard(handler: Handler) -> list[str]:
    return []


@pytest.fixture
def source(heard: list[str]) -> Iterator[SignalSource]:
    made = SignalSource(USR1)
    made.start(heard.append)
    yield made
    made.close()


class Pair:
    """A wake-up fd of another library."""

    def __init__(self) -> None:
        self.read_end, self.write_end = socket.socketpair()
        self.read_end.setblocking(False)
        self.write_end.setblocking(False)
        self.fd = self.write_end.fileno()

    def received(self) -> bytes:
        try:
            return self.read_end.recv(100)
        except BlockingIOError:
            return b""


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.read_end.close()
    made.write_end.close()


def send(count: int = 1) -> None:
    for _ in range(count):
        os.kill(os.getpid(), USR1)


def heard_exactly(heard: list[str], count: int) -> bool:
    """Checks the number of signals; a superfluous signal would arrive in a moment."""
    assert wait_until(lambda: len(heard) >= count)
    return not wait_until(lambda: len(heard) > count, limit=0.03)


@pytest.mark.parametrize(
    "value",
    [signal.SIGUSR1, int(signal.SIGUSR1), "SIGUSR1", "USR1", "usr1", " sigusr1"],
)
def test_a_signal_by_any_name(value: int | str) -> None:
    assert SignalSource(value).name == "signal:SIGUSR1"


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "USR2", "HUP", "XCPU", "CONT"])
def test_signals_that_are_watched(name: str) -> None:
    assert SignalSource(name).name == f"signal:SIG{name}"


@pytest.mark.parametrize(
    "value",
    ["KILL", signal.SIGKILL, "SIGSTOP", "SEGV", "CHLD", "NOPE", "", 0, -1, 999, True],
)
def test_signals_that_are_refused(value: int | str) -> None:
    with pytest.raises(errors.ConfigurationError, match="TERM, INT, USR1") as caught:
        SignalSource(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [None, 1.5, b"TERM"])
def test_things_that_are_no_signals(value: object) -> None:
    with pytest.raises(errors.ConfigurationError, match="expected one of"):
        SignalSource(value)  # type: ignore[arg-type]  # the mistake under test


def test_each_arrival_is_reported_and_chained(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    send(20)
    assert heard_exactly(heard, 20)
    assert set(heard) == {"SIGUSR1"}
    assert handler.calls == 20


def test_close_puts_the_handler_back(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    assert installed() is not handler
    source.close()
    assert installed() is handler
    send()
    assert handler.calls == 1
    assert heard == []


def test_two_sources_on_one_signal(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    second_heard: list[str] = []
    second = SignalSource("USR1")
    second.start(second_heard.append)
    send()
    assert heard_exactly(heard, 1)
    assert heard_exactly(second_heard, 1)
    assert handler.calls == 1
    source.close()
    send()
    assert heard_exactly(second_heard, 2)
    assert installed() is not handler
    second.close()
    assert installed() is handler
    assert len(heard) == 1


def test_two_signals_share_the_wakeup_fd(source: SignalSource) -> None:
    threads = threading.active_count()
    second_heard: list[str] = []
    second = SignalSource("USR2")
    second.start(second_heard.append)
    assert threading.active_count() == threads
    source.close()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard_exactly(second_heard, 1)
    second.close()


@pytest.mark.slow  # starts a process
def test_during_the_exit_a_fatal_signal_is_ignored() -> None:
    """But not by a child, and no longer than that."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        source = SignalSource(signum)
        before = signal.getsignal(signum)
        source.start(lambda detail: None)
        REGISTRY.leave()
        source.close()
        assert signal.getsignal(signum) is signal.SIG_IGN
        child = os.fork()
        if child == 0:
            os._exit(signal.getsignal(signum) is before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        REGISTRY.stay()
        assert signal.getsignal(signum) is before


@pytest.mark.parametrize("kind", ["a handler", "ignored"])
def test_during_the_exit_the_earlier_handler_is_restored(
    kind: str, handler: Handler
) -> None:
    there = handler if kind == "a handler" else signal.SIG_IGN
    signal.signal(USR1, there)
    source = SignalSource(USR1)
    source.start(lambda detail: None)
    REGISTRY.leave()
    source.close()
    assert installed() is there
    REGISTRY.stay()
    assert installed() is there
    signal.signal(USR1, handler)


def test_the_default_of_sigint_is_not_chained() -> None:
    heard: list[str] = []
    source = SignalSource("INT")
    source.start(heard.append)
    os.kill(os.getpid(), signal.SIGINT)  # no KeyboardInterrupt
    assert wait_until(lambda: heard == ["SIGINT"])
    source.close()


def test_an_error_of_the_chained_handler_is_raised(heard: list[str]) -> None:
    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(7)

    below = signal.signal(USR1, leave)
    source = SignalSource(USR1)
    source.start(heard.append)
    with pytest.raises(SystemExit):
        send()
    assert heard_exactly(heard, 1)
    source.close()
    assert signal.signal(USR1, below) is leave


def test_the_error_off_the_main_thread_has_advice() -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            SignalSource("TERM").start(lambda detail: None)
        except errors.NotMainThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=start, name="a-worker-thread")
    thread.start()
    thread.join(10.0)
    for said in ("signal:SIGTERM", "a-worker-thread", "termination_watcher_fn"):
        assert said in str(caught[0])


def test_rearm_off_the_main_thread_warns_once(
    source: SignalSource, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        thread = threading.Thread(target=source.rearm)
        thread.start()
        thread.join(10.0)
    assert caplog.text.count("cannot be installed again") == 1


def test_the_next_close_on_the_main_thread_restores_the_handler() -> None:
    """Otherwise the wake-up fd and its thread would stay until the process exits."""
    sources = [SignalSource("USR1"), SignalSource("USR2")]
    for each in sources:
        each.start(lambda detail: None)
    thread = threading.Thread(target=sources[0].close)
    thread.start()
    thread.join(10.0)
    sources[1].close()
    assert not REGISTRY.watches
    assert REGISTRY.wakeup is None


def test_an_earlier_handler_may_close_a_source_during_a_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal of the program arrives while the first source restores its handler."""
    first, second = SignalSource("USR1"), SignalSource("USR2")
    before = signal.signal(signal.SIGHUP, lambda *_: second.close())
    for each in (first, second):
        each.start(lambda detail: None)
    put_back = REGISTRY.put_back

    def interrupted(signum: int, handler: Any) -> None:
        put_back(signum, handler)
        if signum == USR1:
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(REGISTRY, "put_back", interrupted)
    first.close()
    signal.signal(signal.SIGHUP, before)
    assert not REGISTRY.watches
    assert REGISTRY.wakeup is None


# --- others who come later -----------------------------------------------------------


def test_rearm_after_c_code_took_the_signal(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    """TensorFlow does so when MultiWorkerMirroredStrategy is created (FACTS 1)."""
    ours = installed()
    ignore = ctypes.c_void_p(1)  # SIG_IGN
    ctypes.CDLL(None).signal(int(USR1), ignore)
    assert installed() is ours
    send()
    assert heard == []
    source.rearm()
    send()
    assert heard_exactly(heard, 1)
    assert handler.calls == 1


def test_rearm_chains_a_handler_that_was_installed_later(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    later = Handler()
    signal.signal(USR1, later)
    source.rearm()
    send()
    assert heard_exactly(heard, 1)
    assert (later.calls, handler.calls) == (1, 0)
    source.close()
    assert installed() is later
    signal.signal(USR1, handler)


def test_a_later_handler_that_chains_ours_makes_no_cycle(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    later = Handler(chains=True)
    for expected in (1, 2, 3):
        source.rearm()
        send()
        assert heard_exactly(heard, expected)
        assert (later.calls, handler.calls) == (expected, expected)
        signal.signal(USR1, later)
    source.close()
    assert installed() is later
    signal.signal(USR1, handler)


def test_close_leaves_a_later_handler_alone(
    source: SignalSource, heard: list[str], handler: Handler
) -> None:
    later = Handler(chains=True)
    source.close()
    assert installed() is later
    send()
    assert (later.calls, handler.calls) == (1, 1)  # signals are passed on
    assert heard == []
    signal.signal(USR1, handler)


def test_the_previous_wakeup_fd_gets_its_bytes_and_is_restored(pair: Pair) -> None:
    heard: list[str] = []
    none = signal.set_wakeup_fd(pair.fd)
    source = SignalSource(USR1)
    source.start(heard.append)
    send()
    assert heard_exactly(heard, 1)
    assert wait_until(lambda: pair.received() == bytes([USR1]))
    source.close()
    assert signal.set_wakeup_fd(none) == pair.fd


def test_a_previous_wakeup_fd_that_was_closed_is_no_harm() -> None:
    heard: list[str] = []
    closed = Pair()
    signal.set_wakeup_fd(closed.fd)
    source = SignalSource(USR1)
    source.start(heard.append)
    closed.read_end.close()
    closed.write_end.close()
    send()
    assert heard_exactly(heard, 1)
    source.close()


def test_a_wakeup_fd_installed_later_loses_no_notice(
    source: SignalSource, heard: list[str], pair: Pair
) -> None:
    ours = signal.set_wakeup_fd(pair.fd)
    send()
    assert heard_exactly(heard, 1)
    assert pair.received() == bytes([USR1])
    source.rearm()
    send()
    assert heard_exactly(heard, 2)
    assert wait_until(lambda: pair.received() == bytes([USR1]))
    source.close()
    assert signal.set_wakeup_fd(-1) == pair.fd
    assert os.fstat(ours)  # left open: the other library may still write to it


def test_a_later_wakeup_fd_that_forwards_to_ours_makes_no_circle(
    source: SignalSource, heard: list[str], pair: Pair
) -> None:
    ours = signal.set_wakeup_fd(pair.fd)
    source.rearm()
    send()
    assert wait_until(lambda: pair.received() == bytes([USR1]))
    gc.collect()  # closes a socket without an owner
    os.write(ours, bytes([USR1]))
    assert heard_exactly(heard, 1)
    assert pair.received() == b""
    source.close()
    assert signal.set_wakeup_fd(-1) == pair.fd
    assert os.fstat(ours)


def test_a_wakeup_fd_that_was_taken_away_is_put_in_again(
    source: SignalSource, heard: list[str]
) -> None:
    ours = signal.set_wakeup_fd(-1)
    send()
    assert heard_exactly(heard, 1)
    assert signal.set_wakeup_fd(ours) == ours
    send()
    assert heard_exactly(heard, 2)
