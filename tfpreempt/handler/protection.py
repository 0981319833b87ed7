"""Notices outside of training: before the first handler listens, and after the last."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from tfpreempt.core.cluster import LOCAL, cluster_from_environment
from tfpreempt.core.deadline import until_end
from tfpreempt.core.events import Notice
from tfpreempt.handler import session
from tfpreempt.handler.process_end import exit_hard, keep_streams
from tfpreempt.notice.watcher import WatchedSource, Watcher
from tfpreempt.platforms.config import TerminationConfig

log = logging.getLogger(__name__)

_current: Protection | None = None


class Protection:
    """Listens for notices that no handler hears; `protect` makes it.

    A context manager, which closes it. Main thread.

    Args:
        config: how to leave.
        watched: what to listen to.
    """

    def __init__(
        self, config: TerminationConfig, watched: tuple[WatchedSource, ...]
    ) -> None:
        self._config = config
        self._process = os.getpid()
        self._watcher = Watcher(watched, 0, self._hear)
        self._watcher.start()

    def rearm(self) -> None:
        """Listens again after TensorFlow has taken SIGTERM.

        It does where a MultiWorkerMirroredStrategy is made, and keeps what comes then
        for the handler; the handler's constructor calls this.
        """
        self._watcher.rearm()

    def close(self) -> None:
        """Listens no more, and puts signals back. Idempotent."""
        global _current
        self._watcher.close()
        if _current is self:
            _current = None

    def __enter__(self) -> Protection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hear(self, notice: Notice) -> None:
        """On a thread of the source."""
        if os.getpid() != self._process or session.hears_notices():
            return
        text = f"tfpreempt: notice from {notice.source} ({notice.detail})"
        wait = _seconds_to_wait(notice.grace_seconds)
        if wait == 0.0:
            self._leave(f"{text}, and nothing is being trained")
            return
        session.keep(notice)
        left = "" if wait is None else f"; without one the process leaves in {wait:g} s"
        log.warning("%s: the next handler of this process serves it%s", text, left)
        if wait is not None:
            alarm = threading.Timer(wait, self._expire, [notice])
            alarm.daemon = True
            alarm.start()

    def _expire(self, notice: Notice) -> None:
        """The time is over: leaves, if nobody has served the notice."""
        if session.take_back(notice):
            self._leave("tfpreempt: the machine goes, and nothing is being trained")

    def _leave(self, why: str) -> None:
        """Ends the process from this thread: main may be in C++ for long."""
        keep_streams()
        log.warning("%s; leaving to be started again, the last commit stands", why)
        here = session.current()
        cluster = LOCAL if here is None else here.cluster
        exit_hard(lambda: self._config.leave(True, cluster))


def protect(termination_config: Any = None) -> Protection:
    """Makes a notice outside of training a preemption too, not a failure.

    For the first line of a program: importing, building and tracing take their time,
    and so do an evaluation or an export after the loop. A handler or a fit that takes
    part hears its notices itself. Without one,

    - before the first, a process alone leaves at once, for nothing was trained yet. A
      worker of a cluster keeps the notice for the handler that is being made, so that
      all workers leave together; if none comes it leaves before the machine goes;
    - after the last, whose final state is committed, the program may go on until just
      before the machine goes. Where the config knows no grace it leaves at once.

    It leaves from a thread and like a process that a signal ends, without `finally`
    blocks and exit hooks, but with the code that makes the platform start it again. A
    second call takes the place of the first. Needs no TensorFlow.

    Main thread.

    Args:
        termination_config: what to listen to and how to leave, as for a handler; None
            listens to SIGTERM and leaves with 143.

    Returns:
        What listens: `close()` ends it, as does leaving it as a context manager.

    Raises:
        ConfigurationError: the config, or TF_CONFIG, cannot work.
        NotMainThreadError: signals can only be watched from the main thread.
    """
    global _current
    config = TerminationConfig.accept(termination_config)
    cluster_from_environment(os.environ)  # refused now, not when a notice comes
    before, _current = _current, Protection(config, config.watched_sources())
    if before is not None:
        before.close()
    return _current


@contextlib.contextmanager
def protected_start(config: TerminationConfig) -> Iterator[None]:
    """While a handler or a fit is made: signals are heard before it can serve them.

    Args:
        config: of the one that is made.
    """
    if _current is not None:
        _current.rearm()
        yield
        return
    with Protection(config, config.watched_signals()):
        yield


def _seconds_to_wait(grace: float | None) -> float | None:
    """How long a notice may stay unserved.

    Args:
        grace: seconds that the notice leaves; None or 0: nobody knows.

    Returns:
        Seconds; 0: leave at once; None: until the next handler is there.
    """
    here = session.current()
    cluster = cluster_from_environment(os.environ) if here is None else here.cluster
    has_trained = here is not None and here.gate.started > 0
    if cluster.world == 1 and not has_trained:
        return 0.0
    if grace:
        return until_end(grace)
    return 0.0 if has_trained else None
