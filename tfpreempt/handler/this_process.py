"""This process's session: at most one, for a process belongs to one cluster."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from tfpreempt.coordination.memory import MemoryStore
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core import frameworks
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.cluster import cluster_from_environment, read_cluster
from tfpreempt.core.events import Notice
from tfpreempt.core.life import tell
from tfpreempt.errors import ConfigurationError, UsageError
from tfpreempt.handler.process_end import on_interpreter_end
from tfpreempt.handler.remote_cluster import connection
from tfpreempt.handler.session import PendingNotices, Session
from tfpreempt.handler.training_end import at_interpreter_end

log = logging.getLogger(__name__)

_current: Session | None = None
_pending = PendingNotices()


def _after_fork_in_child() -> None:
    """The parent's handlers refuse to work here; a handler made here has a session."""
    global _current, _pending
    if _current is None:
        return
    for member in _current.members:
        member.stop_at = -1  # so that run() looks
    _current, _pending = None, PendingNotices()


os.register_at_fork(after_in_child=_after_fork_in_child)


def find_session(cluster_resolver: Any, save_timeout: float) -> Session:
    """The session of this process, made at the first call.

    Args:
        cluster_resolver: names the cluster; None for one process.
        save_timeout: seconds that waiting may take where no deadline is known; the
            newest member's word holds.

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
            store = service.open_store(cluster.jobs)
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
    before, _current, _pending = (_current, _pending), None, PendingNotices()
    try:
        yield
    finally:
        made = current()
        _current, _pending = before
        if made is not None:
            for member in made.members:
                made.part(member)
            made.come_back()
            made.runtime.stop()
            if isinstance(made.runtime.store, MemoryStore):
                made.runtime.store.close()  # ends the reads of the threads


def keep(notice: Notice) -> bool:
    """A notice came while nobody listened: the next member serves it. Any thread.

    Returns:
        Whether it waits for that; False: a member that listens by now has it.
    """
    _pending.keep(notice)
    if _current is not None:
        _current.deliver_pending_notices()
    return notice in _pending


def take_back(notice: Notice) -> bool:
    """Whether a notice that was kept was still unserved; it is the caller's now."""
    return _pending.take(notice)


def take_kept() -> bool:
    """Whether notices were kept and are unserved; they are the caller's now."""
    taken = [notice for notice in _pending if take_back(notice)]
    return bool(taken)


def hears_notices() -> bool:
    """Whether a member of this process listens, or it is on its way out. Any thread."""
    if _current is None:
        return False
    return _current.exit.left or any(m.watcher.is_started for m in _current.members)


def current() -> Session | None:
    """The session of this process; None before its first handler."""
    return _current
