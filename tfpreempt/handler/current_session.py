"""The one session of this process, and notices while no handler listens.

A process belongs to one cluster, so it has at most one session. `protect()` serves the
notices before the first handler listens, and after the last one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tfpreempt.coordination.memory import MemoryStore
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core import frameworks
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster, cluster_from_environment, read_cluster
from tfpreempt.core.deadline import until_end
from tfpreempt.core.events import Notice
from tfpreempt.core.life import tell
from tfpreempt.errors import ConfigurationError, UsageError
from tfpreempt.handler.exit import exit_hard, holders, keep_streams, on_interpreter_end
from tfpreempt.handler.session import Session, take_notice
from tfpreempt.handler.single_client import connection
from tfpreempt.handler.training_end import at_interpreter_end
from tfpreempt.notice.watcher import FindSources, WatchedSource, Watcher
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.platforms.detected import resolve_config

log = logging.getLogger(__name__)

_current: Session | None = None
_pending: list[Notice] = []  # that came while no run listened


def _after_fork_in_child() -> None:
    """The parent's handlers refuse to work here; a handler made here has a session."""
    global _current, _pending
    if _current is None:
        return
    for run in _current.runs:
        run.stop_at = -1  # so that run() looks
    _current, _pending = None, []


os.register_at_fork(after_in_child=_after_fork_in_child)


def find_session(cluster_resolver: Any, save_timeout: float) -> Session:
    """The session of this process, made at the first call.

    Args:
        cluster_resolver: names the cluster; None for one process.
        save_timeout: seconds that waiting may take where no deadline is known; the
            newest handler's number holds.

    Raises:
        ConfigurationError: the resolver or the time-out cannot be one.
        UsageError: this process belongs to another cluster already.
    """
    global _current
    cluster = read_cluster(cluster_resolver, drives_others=connection() is not None)
    timeout = check_seconds("save_timeout", save_timeout)
    if _current is None:
        store: KeyValueStore
        if cluster.world > 1:
            service = frameworks.adapter("tensorflow", "coordination")
            store = service.TensorFlowStore(cluster.jobs)
        else:
            store = MemoryStore()
            if cluster_resolver is None and connection() is None:
                _warn_of_others()
        incarnation = os.environ.get("TFPREEMPT_INCARNATION") or "0"
        _current = Session(cluster, store, incarnation, timeout, _pending)
        on_interpreter_end(functools.partial(at_interpreter_end, _current))
        tell(_current.activity.heartbeat)
    if _current.cluster != cluster:
        raise UsageError(
            f"this process already takes part in {_current.cluster}, and a second "
            f"handler names {cluster}; one process can belong to one cluster only"
        )
    _current.coordinator.deadlines.save_timeout = timeout
    _current.come_back()
    return _current


def _warn_of_others() -> None:
    """Where TF_CONFIG names workers that the program does not know of."""
    with contextlib.suppress(ConfigurationError):  # then it is not for us
        named = cluster_from_environment(os.environ)
        if named.world > 1:
            log.warning(
                "tfpreempt: TF_CONFIG says that this process is worker %d of %d, and "
                "the program has no cluster: it trains, and commits, alone. If all "
                "are to train together, pass strategy.cluster_resolver of a "
                "tf.distribute.MultiWorkerMirroredStrategy (model.fit: make the model "
                "in its scope); if not, unset TF_CONFIG.",
                named.worker,
                named.world,
            )


@contextlib.contextmanager
def new_process() -> Iterator[None]:
    """For tests: inside, no handler was made in this process yet.

    Handlers that are still open at the end take part no more, without a last commit.
    What was before goes on where it was.
    """
    global _current, _pending
    before, _current, _pending = (_current, _pending), None, []
    try:
        yield
    finally:
        made = current()
        _current, _pending = before
        if made is not None:
            for run in made.runs:
                made.part(run)
            made.come_back()
            made.runtime.stop()
            if isinstance(made.runtime.store, MemoryStore):
                made.runtime.store.close()  # ends the reads of the threads


def keep(notice: Notice) -> bool:
    """Keeps a notice that came while no run listened, for the next run. Any thread.

    Returns:
        Whether the notice waits for the next run; False: a run that listens by now has
        the notice.
    """
    _pending.append(notice)
    if _current is not None:
        _current.deliver_pending_notices()
    return notice in tuple(_pending)  # another thread may take a notice


def take_back(notice: Notice) -> bool:
    """Whether a notice that was kept was still unserved; it is the caller's now."""
    return take_notice(_pending, notice)


def take_kept() -> bool:
    """Whether notices were kept and are unserved; they are the caller's now."""
    taken = [notice for notice in tuple(_pending) if take_back(notice)]
    return bool(taken)


def hears_notices() -> bool:
    """Whether a run of this process listens, or the process exits. Any thread."""
    if _current is None:
        return False
    return _current.exit.left or any(run.watcher.is_started for run in _current.runs)


def current() -> Session | None:
    """The session of this process; None before its first handler."""
    return _current


SLOWEST = 10.0
"""Seconds by which one source may tell of a notice before another does; they poll."""

_protection: Protection | None = None
_is_starting = False  # whether a handler or a fit is being made; the main thread writes
_newest: Protection | None = None  # of those that were made here, closed or not


class Protection:
    """Listens for notices that no handler hears; `protect` makes it.

    A context manager, which closes it. Main thread.

    Args:
        config: how to leave.
        watched: what to listen to.
        find_more: see `Watcher`.
    """

    def __init__(
        self,
        config: TerminationConfig,
        watched: tuple[WatchedSource, ...],
        find_more: FindSources | None = None,
    ) -> None:
        global _newest
        self._config = config
        self._process = os.getpid()
        self._alarms: list[threading.Timer] = []
        self._left: Notice | None = None  # to the runs that listened
        self._names = frozenset(each.source.name for each in watched)
        self._watcher = Watcher(watched, 0, self._hear, find_more=find_more)
        _newest = self
        self._watcher.start()

    def rearm(self) -> None:
        """Listens again after TensorFlow has taken SIGTERM.

        It does where a MultiWorkerMirroredStrategy is made, and keeps what comes then
        for the handler; the handler's constructor calls this.
        """
        self._watcher.rearm()

    def _unheard(self, sources: tuple[WatchedSource, ...]) -> tuple[WatchedSource, ...]:
        """Those that it does not listen to, by their names."""
        return tuple(each for each in sources if each.source.name not in self._names)

    def close(self) -> None:
        """Listens no more, and puts signals back. Idempotent."""
        global _protection
        self._watcher.close()
        for alarm in self._alarms:
            alarm.cancel()
        if _protection is self:
            _protection = None

    def __enter__(self) -> Protection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hear(self, notice: Notice) -> None:
        """Serves a notice, unless a run of this process listens. Any thread."""
        if os.getpid() != self._process:
            return
        if hears_notices():
            self._left = notice
            return
        text = f"tfpreempt: notice from {notice.origin}"
        wait = _seconds_to_wait(notice)
        if wait == 0.0:
            self._leave(f"{text}, and nothing is being trained")
            return
        if not keep(notice):
            return
        left = (
            "" if wait is None else f"; without one the process leaves in {wait:.1f} s"
        )
        log.warning("%s: the next handler of this process serves it%s", text, left)
        if wait is not None:
            alarm = threading.Timer(wait, self._expire, [notice])
            alarm.daemon = True
            alarm.start()
            self._alarms.append(alarm)

    def _take_unheard(self, heard_at: float) -> Notice | None:
        """Returns a notice that was left to a run whose own source never told of it.

        Args:
            heard_at: monotonic seconds of the newest notice of the runs.
        """
        left, self._left = self._left, None
        return left if left and left.received_at > heard_at + SLOWEST else None

    def _expire(self, notice: Notice) -> None:
        """The time is over: leaves, if nobody has served the notice."""
        if take_back(notice):
            self._leave(
                "tfpreempt: the machine goes, nothing is being trained, and the "
                f"process waits for {', '.join(holders())}"
            )

    def leave_by(self, error: Exception, *, is_printed: bool = False) -> None:
        """An error ends what was to serve a notice: the process is started again.

        The machine goes in any case. If the error is the program's own, the next run
        comes to it without a notice, and fails.

        Args:
            error: no handler will serve the notice for.
            is_printed: whether its traceback is to be seen already.
        """
        if os.getpid() != self._process or not take_kept():
            return
        name = type(error).__name__
        log.error(
            "tfpreempt: %s is taken for a consequence of the notice, not for a failure",
            name,
            exc_info=None if is_printed else error,
        )
        self._leave(f"tfpreempt: the machine goes, and {name} was raised")

    def _leave(self, why: str) -> None:
        """Ends the process from this thread: main may be in C++ for long."""
        keep_streams()
        log.warning("%s; leaving to be started again, the last commit stands", why)
        exit_hard(lambda: self._config.leave(True, _cluster()))


def protect(termination_config: Any = None) -> Protection:
    """Makes a notice outside of training a preemption too, not a failure.

    For the first line of a program: importing, building and tracing take their time,
    and so do an evaluation or an export after the loop. A handler or a fit that takes
    part hears its notices itself. Without one,

    - before the first, a process alone leaves at once, for nothing was trained yet. A
      worker of a cluster keeps the notice for the handler that is being made, so that
      all workers leave together; if none comes it leaves before the machine goes, or
      where an error ends the program, whose traceback is printed;
    - after the last, whose final state is committed, the program may go on until just
      before the machine goes. Where the config knows no grace it leaves at once.

    It leaves from a thread and like a process that a signal ends, without `finally`
    blocks and exit hooks, but with the code that makes the platform start it again. A
    second call takes the place of the first. Needs no TensorFlow.

    Main thread.

    Args:
        termination_config: what to listen to and how to leave, as for a handler; None
            detects the platform.

    Returns:
        What listens: `close()` ends it, as does leaving it as a context manager.

    Raises:
        ConfigurationError: the config, or TF_CONFIG, cannot work.
        NotMainThreadError: signals can only be watched from the main thread.
    """
    global _protection
    config = resolve_config(termination_config)
    cluster_from_environment(os.environ)  # refused now, not when a notice comes
    made = Protection(config, config.watched_sources(), config.finder())
    before, _protection = _protection, made
    if before is not None:
        before.close()
    return _protection


@contextlib.contextmanager
def protected_start(config: TerminationConfig) -> Iterator[None]:
    """While a handler or a fit is made: signals are heard before it can serve them.

    If it cannot be made, a notice that was kept for it is a reason to leave at once.

    Args:
        config: of the one that is made.
    """
    global _is_starting
    signals = config.watched_signals()
    if _protection is not None:
        _protection.rearm()
        signals = _protection._unheard(signals)
    meanwhile = Protection(config, signals)
    _is_starting = True
    try:
        yield
    except Exception as error:
        meanwhile.leave_by(error)
        raise
    finally:
        _is_starting = False
        meanwhile.close()


def take_over() -> None:
    """A handler or a fit was closed: what it heard too late to serve stands yet.

    So does what it was to hear, and did not any more. A known deadline holds until the
    process has ended, without `protect()` too: the next handler serves the notice, or
    the process exits just before the deadline.
    """
    here = _current
    if here is None:
        return
    notice = here.take_left_over()
    if _protection is None:
        if notice is not None and notice.grace_seconds and _newest is not None:
            _newest._hear(notice)
        elif notice is not None:
            keep(notice)
        return
    notice = notice or _protection._take_unheard(here.heard_at)
    if notice is not None:
        _protection._hear(notice)


def _at_exit() -> None:
    """The interpreter ends. Python has printed the error by which it does, if any."""
    error, here = getattr(sys, "last_value", None), _protection or _newest
    if here is not None and isinstance(error, Exception):
        here.leave_by(error, is_printed=True)
    elif here is not None and error is None and not (_current and _current.exit.left):
        take_over()  # of handlers that the session has closed; threads may go on


# With the import: the session's own hook is registered later, so it is called earlier.
on_interpreter_end(_at_exit)


def _seconds_to_wait(notice: Notice) -> float | None:
    """How long a notice may stay unserved.

    Returns:
        Seconds; 0: leave at once; None: until the next handler is there.
    """
    here = _current
    has_trained = here is not None and here.gate.started > 0
    others_wait = _cluster().world > 1 and (_is_starting or not has_trained)
    if not has_trained and not others_wait:
        return 0.0
    if notice.grace_seconds:
        age = SystemClock().monotonic() - notice.received_at
        return max(0.0, until_end(notice.grace_seconds) - age)
    return None if others_wait else 0.0


def _cluster() -> Cluster:
    """The handlers' cluster, if there ever was one; else TF_CONFIG's."""
    here = _current
    return cluster_from_environment(os.environ) if here is None else here.cluster
