"""What a handler listens to: the config's sources, and TensorFlow's own key."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from tfpreempt.core.cluster import Cluster
from tfpreempt.core.deadline import after_travel
from tfpreempt.core.events import Notice
from tfpreempt.handler.remote_cluster import Connection
from tfpreempt.notice.native import NativeKeySource
from tfpreempt.notice.watcher import WatchedSource, Watcher
from tfpreempt.platforms.config import TerminationConfig

NATIVE_DELAY = 1.0
"""Seconds: TensorFlow looks for its SIGTERM that often, so its key is that late."""


def watch(
    config: TerminationConfig,
    cluster: Cluster,
    receive: Callable[[Notice], None],
    connection: Connection | None,
) -> Watcher:
    """Starts to listen; main thread.

    Args:
        config: names the sources and their grace.
        cluster: one with jobs has TensorFlow's key too.
        receive: a method; held weakly, so that the owner can be garbage-collected.
        connection: to remote workers; then their SIGTERM is heard of by that key.

    Raises:
        NotMainThreadError: signals are among the sources.
    """
    sources = list(config.watched_sources())
    if cluster.jobs or connection is not None:
        from tfpreempt.coordination import tf_service

        grace = config.grace_seconds
        left = None if grace is None else after_travel(grace, NATIVE_DELAY)
        identity = None if connection is None else connection.notice_identity
        read = tf_service.read_native_notice
        alone = connection is not None
        native = NativeKeySource(read, identity=identity, is_alone=alone)
        sources.append(WatchedSource(native, left))
    weak = weakref.WeakMethod(receive)

    def deliver(notice: Notice) -> None:
        alive = weak()
        if alive is not None:
            alive(notice)

    watcher = Watcher(sources, cluster.worker, deliver)
    watcher.start()
    return watcher
