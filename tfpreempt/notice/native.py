"""A notice from TensorFlow's own key, which its C++ SIGTERM handler sets.

TensorFlow sets TF_DEFAULT_PREEMPTION_NOTICE_KEY within about 1 s of a SIGTERM to any
task. A get of it blocks until then and cannot be cancelled, and a get that times out
leaks memory in two processes, so one thread per process blocks in one get, is never
joined, and serves whoever is subscribed when the value comes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable

from tfpreempt.core.threads import OwnedThread
from tfpreempt.notice.source import Source

_logger = logging.getLogger(__name__)


class NativeKeySource(Source):
    """Reports the value of TensorFlow's key once, such as "/job:worker/task:1".

    The key can be set once in the life of a cluster and stays. So after it has been
    delivered, sources of the same identity stay quiet; whoever deletes the key and
    wants to hear of the next preemption calls `read_again`.

    Args:
        read_key: blocks until the key is there and returns its value. It runs in a
            daemon thread. Whatever it raises (the cluster is going down) ends the
            watch with a line in the log.
        identity: what the key belongs to; sources of one identity share one read. By
            default `read_key` itself: equal functions, or one object's bound method.
        is_alone: nothing else tells of these machines, so that a watch which ends
            while somebody listens is a warning. Else others tell, or are told.
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
    """Waits for the key anew, after it was delivered and deleted.

    Args:
        identity: of the sources that are to hear of it.
    """
    with _lock:
        reader = _readers.get(identity)
        if reader is not None and not reader.is_reading:
            reader.read()


@dataclasses.dataclass(eq=False, slots=True)
class _KeyReader:
    """The one blocked get of an identity, and who is waiting for it."""

    read_key: Callable[[], str]
    sources: list[NativeKeySource] = dataclasses.field(default_factory=list)
    undelivered: str | None = None
    is_reading: bool = False
    has_delivered: bool = False

    def read(self) -> None:
        """Begins a get; under the lock."""
        self.undelivered, self.is_reading, self.has_delivered = None, True, False
        OwnedThread("tfpreempt-native-key", self._run).start()

    def _run(self) -> None:
        try:
            detail = str(self.read_key())
        except Exception as error:  # noqa: BLE001 - any failure means: no more notices
            with _lock:
                self.is_reading = False
                is_missed = any(each.is_alone for each in self.sources)
            _logger.log(
                logging.WARNING if is_missed else logging.INFO,
                "the watch of TensorFlow's preemption key ended (%s: %s); the cluster "
                "is going down or has no coordination service",
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
