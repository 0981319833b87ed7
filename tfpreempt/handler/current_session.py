"""The session of this process, and notices that arrive while no handler listens.

A process belongs to a single cluster, and has at most one session.
`handle_early_notices()` handles the notices that arrive before the first handler
listens, or after the last handler is closed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfpreempt.coordination.deadlines import BYES
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.key_value_store import CoordinationService, KeyValueStore
from tfpreempt.core import frameworks
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import (
    Cluster,
    cluster_from_environment,
    connected_cluster,
    read_cluster,
)
from tfpreempt.core.deadline import until_end
from tfpreempt.core.events import Notice
from tfpreempt.core.heartbeat import start_heartbeat
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.errors import ConfigurationError, UsageError
from tfpreempt.handler.exit import (
    blocking_threads_and_children,
    exit_hard,
    keep_streams,
    on_interpreter_end,
)
from tfpreempt.handler.session import Session, take_notice
from tfpreempt.handler.single_client import connection
from tfpreempt.handler.training_end import at_interpreter_end
from tfpreempt.notice.watcher import FindSources, NoticeSourceConfig, Watcher
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.platforms.detected import resolve_config

if TYPE_CHECKING:
    import tensorflow as tf

log = logging.getLogger(__name__)

_current: Session | None = None
_pending: list[Notice] = []  # notices that arrived while no run listened


def _after_fork_in_child() -> None:
    """Detaches a forked child from the session of its parent.

    In the child, the parent's handlers raise errors, and a new handler has a new
    session.
    """
    global _current, _pending
    if _current is None:
        return
    for run in _current.runs:
        # So `run()` calls the session, which raises an error in a child.
        run.stop_at = -1
    _current, _pending = None, []


os.register_at_fork(after_in_child=_after_fork_in_child)


def find_session(cluster_resolver: Any, peer_timeout: float) -> Session:
    """Returns the session of this process; the first call creates the session.

    Args:
        cluster_resolver: resolver that names the cluster; None for the processes of
            `jax.distributed`, or for a single process.
        peer_timeout: timeout in seconds for waits without a known deadline; replaces
            the value of an earlier handler.

    Raises:
        ConfigurationError: the resolver or the timeout is not valid.
        UsageError: this process already belongs to another cluster.
    """
    global _current
    cluster = read_cluster(cluster_resolver, drives_others=connection() is not None)
    timeout = check_seconds("peer_timeout", peer_timeout)
    if _current is None:
        store: KeyValueStore
        if cluster.num_workers > 1:
            service: CoordinationService
            service = frameworks.adapter(cluster.framework, "coordination")
            store = service.make_store(cluster)
        else:
            store = InMemoryStore()
            if cluster_resolver is None and connection() is None:
                _warn_of_others()
        incarnation = os.environ.get("TFPREEMPT_INCARNATION") or "0"
        if cluster.framework == "jax":
            # Ignore TFPREEMPT_INCARNATION: the supervisors of two machines may set
            # different values. A constant is enough, because JAX's service ends with
            # process 0, so the keys of the last start no longer exist.
            incarnation = "0"
        _current = Session(cluster, store, incarnation, timeout, _pending)
        on_interpreter_end(functools.partial(at_interpreter_end, _current))
        start_heartbeat(_current.activity.heartbeat)
    if _current.cluster != cluster:
        raise UsageError(
            f"this process already belongs to {_current.cluster}, and a second "
            f"handler names {cluster}; a process can belong to one cluster only"
        )
    _current.coordinator.deadlines.peer_timeout = timeout
    _current.resume_after_exit()
    return _current


def _warn_of_others() -> None:
    """Warns if the environment variables describe workers that the program does not
    use."""
    # Ignore a malformed TF_CONFIG: the variable may be meant for another program.
    with contextlib.suppress(ConfigurationError):
        named = cluster_from_environment(os.environ)
        if named.num_workers > 1:
            variable = "JAX_NUM_PROCESSES" if named.framework == "jax" else "TF_CONFIG"
            log.warning(
                "%s says that this process is worker %d of %d, but the "
                "program has no cluster resolver: this process trains and commits "
                "alone. To train together, pass strategy.cluster_resolver of a "
                "tf.distribute.MultiWorkerMirroredStrategy (with model.fit: create "
                "the model in the scope of the strategy); with JAX, call "
                "jax.distributed.initialize() first. Otherwise, unset %s.",
                variable,
                named.worker,
                named.num_workers,
                variable,
            )


def keep(notice: Notice) -> bool:
    """Keeps a notice for the next run, because no run listens at the moment.

    May be called on any thread.

    Returns:
        Whether the notice is kept. False if a run that has begun to listen has taken
        the notice.
    """
    _pending.append(notice)
    if _current is not None:
        _current.deliver_pending_notices()
    return notice in tuple(_pending)  # a thread may have taken the notice


def current() -> Session | None:
    """Returns the session of the process; None before the first handler."""
    return _current


def current_cluster() -> Cluster:
    """Returns the cluster of the handlers. Before the first handler: the processes of
    `jax.distributed`, or the cluster that environment variables describe."""
    if _current is not None:
        return _current.cluster
    connected = connected_cluster()
    is_alone = connected.num_workers == 1
    return cluster_from_environment(os.environ) if is_alone else connected


SLOWEST = 10.0
"""Longest time in seconds between two sources' reports of a preemption."""

_protection: EarlyNoticeHandler | None = None
_is_starting = False  # whether a handler or fit is being created; main thread writes
_newest: EarlyNoticeHandler | None = None  # the newest object, even if closed


class EarlyNoticeHandler:
    """Handles notices while no handler listens. Created by `handle_early_notices`.

    A context manager: the end of the `with` block closes the object. For use on the
    main thread.

    Args:
        config: configuration of the exit.
        watched: notice sources to watch.
        find_more: function that finds further notice sources in the background; see
            `Watcher`.
    """

    def __init__(
        self,
        config: TerminationConfig,
        watched: tuple[NoticeSourceConfig, ...],
        find_more: FindSources | None = None,
    ) -> None:
        global _newest
        self._config = config
        self._process = os.getpid()
        self._alarms: list[threading.Timer] = []
        self._left: Notice | None = None  # notice that a listening run should handle
        self._names = frozenset(each.source.name for each in watched)
        self._watcher = Watcher(watched, 0, self._on_notice, find_more=find_more)
        _newest = self
        self._watcher.start()

    def close(self) -> None:
        """Stops listening, and restores the signal handlers. Idempotent."""
        global _protection
        self._watcher.close()
        for alarm in self._alarms:
            alarm.cancel()
        if _protection is self:
            _protection = None

    def __enter__(self) -> EarlyNoticeHandler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _on_notice(self, notice: Notice) -> None:
        """Handles a notice, unless a run of this process listens, or the process is
        exiting.

        May be called on any thread.
        """
        if os.getpid() != self._process:
            return
        here = _current
        if here is not None and (
            here.exit.left or any(run.watcher.is_started for run in here.runs)
        ):
            self._left = notice
            return
        text = f"preemption notice from {notice.origin}"
        wait = _seconds_to_wait(notice)
        if wait == 0.0:
            seconds = 0.0 if notice.grace_seconds else BYES
            self._leave(f"{text}; no training is running", seconds)
            return
        if not keep(notice):
            return
        left = (
            ""
            if wait is None
            else f"; without a handler, the process exits in {wait:.1f} s"
        )
        log.warning(
            "%s: the next handler of this process will handle the notice%s", text, left
        )
        if wait is not None:
            alarm = threading.Timer(wait, self._expire, [notice])
            alarm.daemon = True
            alarm.start()
            self._alarms.append(alarm)

    def _expire(self, notice: Notice) -> None:
        """Exits at the end of the grace period, if no run has taken the notice."""
        if take_notice(_pending, notice):
            self._leave(
                "the machine will be terminated, no training is running, and the "
                f"process waits for {', '.join(blocking_threads_and_children())}"
            )

    def leave_by(self, error: Exception, *, is_printed: bool = False) -> None:
        """Exits with the restart code if an error is raised while a notice is pending.

        The machine will be terminated in any case, so the error counts as a consequence
        of the notice. If the cause is a fault of the program, the error is raised again
        after the restart, without a notice, and ends the program.

        Args:
            error: error that ends the program, so that no handler can handle the
                notice.
            is_printed: whether the traceback of the error was already printed.
        """
        kept = tuple(_pending) if os.getpid() == self._process else ()
        if not [each for each in kept if take_notice(_pending, each)]:
            return
        name = type(error).__name__
        log.error(
            "%s counts as a consequence of the preemption notice, not as a failure",
            name,
            exc_info=None if is_printed else error,
        )
        self._leave(f"the machine will be terminated, and {name} was raised")

    def _leave(self, why: str, seconds: float = 0.0) -> None:
        """Ends the process at once, from this thread.

        The main thread may be in C++ code for long, where SystemExit cannot be raised.

        Args:
            why: cause of the exit, for the log.
            seconds: longest wait for the other workers, if their framework requires
                that the workers end together.
        """
        keep_streams()
        log.warning("%s. Exiting to be restarted; the last commit is still valid", why)
        end = functools.partial(self._config._exit, True, current_cluster())
        if _current is None:
            exit_hard(end)
        else:
            _current.exit.end_within(seconds, end)


def handle_early_notices(
    termination_config: TerminationConfig
    | tf.distribute.experimental.TerminationConfig
    | None = None,
) -> EarlyNoticeHandler:
    """Handles notices outside of training: the process exits to be restarted.

    Without this function a notice before or after training would end the process as a
    failure. Call the function in the first line of the program: imports and model
    building take time, and so do an evaluation or an export after training. While a
    handler or a fit is open, the handler or fit receives the notices. Otherwise:

    - Before the first handler: a single process exits at once, because no step was
      trained. A worker of a cluster keeps the notice for the first handler, so that all
      workers exit together. If no handler is created, the worker exits before the
      machine is terminated, or when an error ends the program (the traceback is
      printed).
    - After the last handler, which has committed the final state: the program may run
      until just before the machine is terminated. Without a known grace period the
      process exits at once.

    The exit happens in a thread, so `finally` blocks and exit hooks do not run. The
    exit code makes the platform restart the process. A second call replaces the first.
    TensorFlow is not needed. Call the function on the main thread.

    Args:
        termination_config: notices to watch and configuration of the exit, as for a
            handler; None detects the platform.

    Returns:
        The object that watches for notices. To stop, call `close()`, or use the object
        as a context manager.

    Raises:
        ConfigurationError: the config, or TF_CONFIG, is not valid.
        NotMainThreadError: the caller is not the main thread, where Python requires
            signals to be watched.
    """
    global _protection
    show_log_lines()
    config = resolve_config(termination_config)
    cluster_from_environment(os.environ)  # raise errors of TF_CONFIG now, not later
    made = EarlyNoticeHandler(config, config._notice_sources(), config._source_finder())
    before, _protection = _protection, made
    if before is not None:
        before.close()
    return _protection


@contextlib.contextmanager
def handling_notices_during_setup(config: TerminationConfig) -> Iterator[None]:
    """Context manager: watches for signals while the body creates a handler or a fit.

    If the body raises an error and a notice has arrived, the process exits at once.

    Args:
        config: configuration of the handler or fit.
    """
    global _is_starting
    signals = config._signal_sources()
    if _protection is not None:
        # Creating a MultiWorkerMirroredStrategy has installed TensorFlow's own SIGTERM
        # handler, so that a SIGTERM no longer arrives.
        _protection._watcher.rearm()
        names = _protection._names
        signals = tuple(each for each in signals if each.source.name not in names)
    meanwhile = EarlyNoticeHandler(config, signals)
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
    """Handles the notices that a closed handler or fit has not handled.

    Such a notice arrived too late for the handler, or the handler was closed before its
    sources reported the notice. If the deadline is known, the next handler handles the
    notice, or the process exits just before the deadline, even without
    `handle_early_notices()`.
    """
    here = _current
    if here is None:
        return
    notice = here.take_left_over()
    if _protection is None:
        if notice is not None and notice.grace_seconds and _newest is not None:
            _newest._on_notice(notice)
        elif notice is not None:
            keep(notice)
        return
    if notice is None:
        # While a run listens, its own sources report notices. If the notice that
        # `_protection` has left to the run is much newer than the run's newest notice,
        # the run has missed the notice.
        left, _protection._left = _protection._left, None
        if left is not None and left.received_at > here.notice_at + SLOWEST:
            notice = left
    if notice is not None:
        _protection._on_notice(notice)


def _at_exit() -> None:
    """Handles pending notices at the end of the interpreter.

    By then Python has printed the error that ends the program, if any.
    """
    error, here = getattr(sys, "last_value", None), _protection or _newest
    if here is not None and isinstance(error, Exception):
        here.leave_by(error, is_printed=True)
    elif here is not None and error is None and not (_current and _current.exit.left):
        # A handler that was just closed may have left a notice. Without this call, the
        # process might wait for threads until the machine is terminated.
        take_over()


# Registered at import: the session's hook is registered later and runs earlier.
on_interpreter_end(_at_exit)


def _seconds_to_wait(notice: Notice) -> float | None:
    """Returns the time for which a notice may wait for a handler before the exit.

    Returns:
        Seconds; 0 to exit at once; None to wait for the next handler.
    """
    here = _current
    has_trained = here is not None and here.step_flag.started > 0
    others_wait = current_cluster().num_workers > 1 and (
        _is_starting or not has_trained
    )
    if not has_trained and not others_wait:
        return 0.0
    if notice.grace_seconds:
        age = SystemClock().monotonic() - notice.received_at
        # `ExitController.end_within` makes the chief wait for the other workers.
        end = until_end(notice.grace_seconds)
        if here is not None and here.cluster.num_workers > 1:
            end -= here.cluster.host_outlives
        return max(0.0, end - age)
    return None if others_wait else 0.0
