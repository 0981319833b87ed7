"""One rig for each source: makes the source see, lose, garble and fail its notice."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.fakes.clock import FakeClock
from tfpreempt.notice.callable import CallableSource
from tfpreempt.notice.file import FileSource
from tfpreempt.notice.signals import SignalSource
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.tensorflow_notice import NativeKeySource
from tfpreempt.testing.notice import ScriptedSource

LIMIT = 10.0
INTERVAL = 1.0


def wait_until(is_met: Callable[[], bool], limit: float = LIMIT) -> bool:
    """Waits, by the real clock, for the work of another thread."""
    nap, end = threading.Event(), time.monotonic() + limit
    while not (met := is_met()) and time.monotonic() < end:
        nap.wait(0.001)
    return met


class Rig:
    """The contract test's control of a source; None for impossible actions."""

    has_level = False  # can be withdrawn
    trusts_garbage = True  # an invalid form is a notice, too
    can_fail = False
    keeps_going_after_notice = True

    def make(self) -> NoticeSource:
        raise NotImplementedError

    def give(self) -> None:
        """Sends the notice."""
        raise NotImplementedError

    def garbage(self) -> None:
        """Sends the notice in an invalid form."""
        self.give()

    def withdraw(self) -> None:
        raise NotImplementedError

    def fail(self) -> None:
        """Breaks the object that the source watches."""
        raise NotImplementedError

    def recover(self) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """Returns when the source has seen all earlier actions."""

    def step(self) -> None:
        """Lets time pass, for a source that may have ended."""

    def stop(self) -> None:
        """Frees the resources of the rig."""

    def own_threads(self) -> set[threading.Thread]:
        """The threads that are not the rig's servers'."""
        return {
            each
            for each in threading.enumerate()
            if not each.name.startswith("fake-metadata-")
        }


class PolledRig(Rig):
    has_level = True
    can_fail = True

    def __init__(self) -> None:
        self.clock = FakeClock()

    def step(self) -> None:
        self.clock.advance(60.0)

    def settle(self) -> None:
        # Twice, as the first look may have begun before; over any back-off.
        for _ in range(2):
            self.clock.wait_for_waiters()
            self.clock.advance(60.0)
        self.clock.wait_for_waiters()


class FileRig(PolledRig):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "preempted"

    def make(self) -> NoticeSource:
        return FileSource(self.path, INTERVAL, wait=self.clock.wait)

    def give(self) -> None:
        self.path.write_text("the machine goes\n")

    def garbage(self) -> None:
        self.path.write_bytes(b"\x00\xff\x1b[2J" * 100_000)

    def withdraw(self) -> None:
        self.path.unlink()

    def fail(self) -> None:
        self.path.symlink_to(self.path)  # ELOOP, for root too

    def recover(self) -> None:
        self.path.unlink()


class CallableRig(PolledRig):
    def __init__(self) -> None:
        super().__init__()
        self.answer: object = False

    def watcher_fn(self) -> object:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def make(self) -> NoticeSource:
        return CallableSource(self.watcher_fn, INTERVAL, wait=self.clock.wait)

    def give(self) -> None:
        self.answer = True

    def garbage(self) -> None:
        self.answer = [b"\x00", object()] * 10_000

    def withdraw(self) -> None:
        self.answer = ""

    def fail(self) -> None:
        self.answer = SystemExit("a user's function may do that")

    def recover(self) -> None:
        self.answer = None


class SignalRig(Rig):
    def __init__(self) -> None:
        # One keeps the process alive when the source under test is closed; the other
        # tells how far the thread has come that reads all signals in their order.
        self.lifeguard = SignalSource("USR1")
        self.lifeguard.start(lambda detail: None)
        self.marker = SignalSource("USR2")
        self.marked: list[str] = []
        self.marker.start(self.marked.append)

    def make(self) -> NoticeSource:
        return SignalSource(signal.SIGUSR1)

    def give(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def settle(self) -> None:
        before = len(self.marked)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wait_until(lambda: len(self.marked) > before)

    def stop(self) -> None:
        self.marker.close()
        self.lifeguard.close()


class NativeRig(Rig):
    keeps_going_after_notice = False

    def __init__(self) -> None:
        self.values: queue.Queue[object] = queue.Queue()
        self.readers: list[threading.Thread] = []
        self.has_given = False

    def read_key(self) -> str:
        self.readers.append(threading.current_thread())
        return self.values.get()  # type: ignore[return-value]  # garbage is a test

    def make(self) -> NoticeSource:
        return NativeKeySource(self.read_key, identity=self)

    def give(self) -> None:
        self.values.put("/job:worker/task:1")
        self.has_given = True

    def garbage(self) -> None:
        self.values.put(b"\xff\x00")
        self.has_given = True

    def settle(self) -> None:
        assert wait_until(lambda: bool(self.readers))
        if self.has_given:
            assert wait_until(lambda: not any(map(is_alive, self.readers)))

    def stop(self) -> None:
        self.give()  # frees the thread that is never joined


def is_alive(thread: threading.Thread) -> bool:
    return thread.is_alive()


class ScriptedRig(Rig):
    def __init__(self) -> None:
        self.sources: list[ScriptedSource] = []

    def make(self) -> NoticeSource:
        self.sources.append(ScriptedSource())
        return self.sources[-1]

    def give(self) -> None:
        for source in self.sources:
            source.fire("scripted")

    def garbage(self) -> None:
        for source in self.sources:
            source.fire("\0" * 100)
