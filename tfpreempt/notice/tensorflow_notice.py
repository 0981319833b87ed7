"""Notices from TensorFlow's preemption key, set by its C++ SIGTERM handler.

TensorFlow sets TF_DEFAULT_PREEMPTION_NOTICE_KEY within about 1 s of a SIGTERM to any
task. A get of the key blocks until then and cannot be cancelled; a get with a timeout
leaks memory in two processes. So one thread blocks in one get, is never joined, and
sends the value to the sources subscribed at that time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable

from tfpreempt.core.threads import ManagedThread
from tfpreempt.notice.source import NoticeSourceBase

_logger = logging.getLogger(__name__)


class NativeKeySource(NoticeSourceBase):
    """Reports the value of TensorFlow's key once, such as "/job:worker/task:1".

    The key can be set once in the lifetime of a cluster and stays set. So after the
    value has been delivered, sources with the same identity report nothing more. Code
    that deletes the key calls `read_again` to watch for the next preemption.

    Args:
        read_key: function that blocks until the key is set and returns its value, in a
            daemon thread. An exception (the cluster is going down) ends the watch and
            is logged.
        identity: identity of the key's cluster; sources with the same identity share
            one get. By default `read_key` itself: equal functions, or a bound method of
            the same object.
        is_alone: whether no other source reports preemptions of these machines. The end
            of such a watch is then logged as a warning while the source is open.
    """

    def __init__(
        self,
        read_key: Callable[[], str],
        *,
        identity: Hashable = None,
        is_alone: bool = False,
    ) -> None:
        super().__init__("tensorflow:preemption-notice")
        self.is_alone = is_alone
        self._read_key = read_key
        self._identity = read_key if identity is None else identity

    def _begin(self) -> None:
        with _lock:
            reader = _readers.setdefault(self._identity, _KeyReader(self._read_key))
            reader.sources.append(self)
            if not reader.is_reading and not reader.has_delivered:
                reader.read()
            detail, reader.undelivered = reader.undelivered, None
        if detail is not None:
            self.send(detail)

    def _end(self) -> None:
        with _lock:
            _readers[self._identity].sources.remove(self)


def read_again(identity: Hashable) -> None:
    """Waits again for the key, after delivery and deletion of the key.

    Args:
        identity: identity of the sources that receive the value.
    """
    with _lock:
        reader = _readers.get(identity)
        if reader is not None and not reader.is_reading:
            reader.read()


@dataclasses.dataclass(eq=False, slots=True)
class _KeyReader:
    """The only blocked get of an identity, and the sources waiting for the value."""

    read_key: Callable[[], str]
    sources: list[NativeKeySource] = dataclasses.field(default_factory=list)
    undelivered: str | None = None
    is_reading: bool = False
    has_delivered: bool = False

    def read(self) -> None:
        """Starts a get. The caller holds the lock."""
        self.undelivered, self.is_reading, self.has_delivered = None, True, False
        ManagedThread("tfpreempt-native-key", self._run).start()

    def _run(self) -> None:
        try:
            detail = str(self.read_key())
        except Exception as error:  # noqa: BLE001 - any failure means: no more notices
            with _lock:
                self.is_reading = False
                is_missed = any(each.is_alone for each in self.sources)
            _logger.log(
                logging.WARNING if is_missed else logging.INFO,
                "the watch of TensorFlow's preemption key ended (%s: %s): the cluster "
                "is shutting down, or has no coordination service",
                type(error).__name__,
                error,
            )
            return
        with _lock:
            receivers = tuple(self.sources)
            self.undelivered = None if receivers else detail
            self.is_reading, self.has_delivered = False, True
        for each in receivers:
            each.send(detail)


_lock = threading.Lock()
_readers: dict[Hashable, _KeyReader] = {}
