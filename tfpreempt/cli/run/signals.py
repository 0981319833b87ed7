"""Signals as values that a select can wait for; the handlers themselves do nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import signal
import socket
from collections.abc import Iterator
from types import FrameType

from tfpreempt.core.clock import Clock

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The first signal that told the supervisor to leave, at monotonic seconds."""

    signal: signal.Signals
    at: float


class SignalBox:
    """Made by `watch_signals`; main thread only.

    Attributes:
        stop: None until the supervisor is told to leave; the first one stays.
        urges: each Ctrl-C that came after it. One must not cut short what was asked
            for before; platforms repeat SIGTERM, which asks for nothing new.
    """

    def __init__(self, receiver: socket.socket, clock: Clock) -> None:
        self._receiver = receiver
        self._clock = clock
        self.stop: Stop | None = None
        self.urges = 0

    @property
    def is_urged(self) -> bool:
        """Whether to wait no longer: the first urge only asks what is waited for."""
        return self.urges >= 2

    def wait(self, seconds: float | None) -> None:
        """Waits for any of the signals, the end of a child among them.

        Args:
            seconds: how long at most; None is without limit.
        """
        ready, _, _ = select.select([self._receiver], [], [], seconds)
        for byte in self._receiver.recv(4096) if ready else b"":
            if byte in _STOPS and self.stop is None:
                number = signal.Signals(byte)
                self.stop = Stop(signal=number, at=self._clock.monotonic())
            elif byte == signal.SIGINT:
                self.urges += 1


@contextlib.contextmanager
def watch_signals(clock: Clock) -> Iterator[SignalBox]:
    """Makes SIGTERM, SIGINT, SIGHUP and SIGCHLD end a wait while the context lasts.

    A signal that the caller ignores (SIGHUP under nohup, SIGINT in a background job)
    stays ignored. The previous handlers come back at the end.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender, contextlib.ExitStack() as restore:
        receiver.setblocking(False)
        sender.setblocking(False)
        # A full pipe means that there is something to see already: no warning.
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        restore.callback(signal.set_wakeup_fd, previous_fd)
        for number in (*_STOPS, signal.SIGCHLD):
            previous = signal.getsignal(number)
            if previous is signal.SIG_IGN and number in _STOPS:
                continue
            signal.signal(number, _record_only)
            restore.callback(signal.signal, number, previous or signal.SIG_DFL)
        yield SignalBox(receiver, clock)


def _record_only(number: int, frame: FrameType | None) -> None:
    """The interpreter has written the number to the wake-up fd already."""
