"""Notices from the preemption key that the SIGTERM handler of TensorFlow or JAX sets.

Within about 1 s after any task has received SIGTERM, TensorFlow sets
TF_DEFAULT_PREEMPTION_NOTICE_KEY in its coordination service, and JAX sets
RECEIVED_PREEMPTION_NOTICE, if its SIGTERM handler is installed. A get of the key waits
until the key is set, and cannot be cancelled; a get with a timeout leaks memory in this
process and in the service. So one thread waits in a single get, and nothing waits for
the thread. When the key is set, the thread sends its value to all open sources.
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
    """Reports a notice when the preemption key of a framework is set.

    The detail of the notice is the value of the key, such as "/job:worker/task:1". The
    key can be set only once while a cluster runs. So after one report, sources of the
    same cluster report nothing more, unless the key is deleted and `read_again` is
    called.

    Args:
        read_key: function that waits until the key is set, and returns its value;
            called on a daemon thread. If it raises an error (the cluster shuts down),
            the error is logged, and the watch ends.
        identity: value that identifies the cluster; sources with equal identities share
            one get. By default `read_key`.
        is_alone: whether no other source reports preemptions of these machines. If
            True, an error of `read_key` is logged as a warning; if False, as debug.
        framework: name of the framework, for logs.
    """

    def __init__(
        self,
        read_key: Callable[[], str],
        *,
        identity: Hashable = None,
        is_alone: bool = False,
        framework: str = "tensorflow",
    ) -> None:
        super().__init__(f"{framework}:preemption-notice")
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
    """Waits for the key again, after its value was reported and the key was deleted.

    Args:
        identity: `identity` of the sources of the cluster.
    """
    with _lock:
        reader = _readers.get(identity)
        if reader is not None and not reader.is_reading:
            reader.read()


@dataclasses.dataclass(eq=False, slots=True)
class _KeyReader:
    """Reads the preemption key of one cluster, for all sources of the same identity.

    Attributes:
        read_key: function that waits until the key is set, and returns its value.
        sources: the open sources.
        undelivered: value read while no source was open; the next source gets it.
        is_reading: whether a thread waits for the key.
        has_delivered: whether the key was read.
    """

    read_key: Callable[[], str]
    sources: list[NativeKeySource] = dataclasses.field(default_factory=list)
    undelivered: str | None = None
    is_reading: bool = False
    has_delivered: bool = False

    def read(self) -> None:
        """Starts a thread that reads the key. The caller holds the lock."""
        self.undelivered, self.is_reading, self.has_delivered = None, True, False
        ManagedThread("tfpreempt-native-key", self._run).start()

    def _run(self) -> None:
        try:
            detail = str(self.read_key())
        except Exception as error:  # noqa: BLE001 - any failure ends the watch
            with _lock:
                self.is_reading = False
                is_missed = any(each.is_alone for each in self.sources)
            _logger.log(
                logging.WARNING if is_missed else logging.DEBUG,
                "the watch of the preemption key in the coordination service ended "
                "(%s: %s): the cluster is shutting down, or has no such service",
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
